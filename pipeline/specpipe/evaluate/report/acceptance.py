"""How often the target accepts what the draft proposes, by position in the step."""

from __future__ import annotations

from collections.abc import Iterator

from specpipe.evaluate.report import conditions
from specpipe.evaluate.report.artifact import Artifact, Json, own_draft
from specpipe.evaluate.report.blocks import (
    Block,
    Column,
    Figure,
    Missing,
    Paragraph,
    Table,
    count,
    interval,
    number,
    outdated,
    percent,
)
from specpipe.evaluate.report.charts import Axis, Chart, Panel, Series, counted


def blocks(artifact: Artifact) -> Iterator[Block]:
    """Yields acceptance by position, and what a step emits of it."""
    yield from outdated(artifact, artifact.tune, "tune")
    figures = list(_figures(artifact))
    if not figures:
        yield Missing("Acceptance by position was not measured.", artifact.command("tune"))
        return
    yield from figures
    if artifact.tune is None:
        return
    own = own_draft(artifact.tune)["acceptance"]
    yield Paragraph(
        f"Over all positions the target accepts {percent(own['alpha'], 1)} % of the draft tokens "
        f"that it judges (the α of Leviathan et al. 2023), in {count(own['num_steps'])} steps."
    )
    yield Table(
        "Tokens that a step emits",
        (Column("K", "tokens per step"), Column("expected", "tokens"), Column("95 % interval")),
        [
            [
                str(e["num_draft_tokens"]),
                number(e["tokens"]),
                interval(e["low"], e["high"]),
            ]
            for e in own["expected"]
        ],
        is_folded=True,
    )


def _figures(artifact: Artifact) -> Iterator[Figure]:
    """Yields acceptance by position, from tuning, else from the server's counters."""
    if artifact.tune is not None:
        yield _tuned_acceptance(artifact, artifact.tune)
    elif artifact.bench is not None:
        yield from _counted_acceptance(artifact, artifact.bench)


def _tuned_acceptance(artifact: Artifact, tune: Json) -> Figure:
    own = own_draft(tune)
    groups = {"all prompts": own["acceptance"]}
    if len(own["kinds"]) > 1:
        groups |= own["kinds"]
    series = []
    for colour, (name, acceptance) in enumerate(groups.items(), start=1):
        known = [p for p in acceptance["positions"] if p["rate"] is not None]
        has_bounds = colour == 1 and all(p["low"] is not None for p in known)
        series.append(
            Series(
                name=name,
                x=[p["position"] for p in known],
                y=[100 * p["rate"] for p in known],
                bounds=[(100 * p["low"], 100 * p["high"]) for p in known] if has_bounds else (),
                colour=colour,
            )
        )
    rows = [
        [
            name,
            str(p["position"]),
            f"{p['num_accepted']} / {p['num_judged']}",
            percent(p["rate"], 1),
            f"{percent(p['low'])} to {percent(p['high'])}",
        ]
        for name, acceptance in groups.items()
        for p in acceptance["positions"]
    ]
    return Figure(
        slug="acceptance",
        title="Acceptance by position of the draft token",
        caption="How often the target accepts a draft token whose predecessors it accepted; bars "
        f"hold 95 %, drawing prompts. {conditions.of_tune(artifact, tune)}",
        chart=Chart(
            x=_positions(tune["settings"]["max_draft_len"]),
            y=Axis("accepted / judged", "%", low=0, high=103),
            panels=[Panel(series)],
        ),
        table=Table(
            "Acceptance by position",
            (
                Column("prompts", is_text=True),
                Column("position"),
                Column("accepted / judged", "draft tokens"),
                Column("rate", "%"),
                Column("95 % interval", "%"),
            ),
            rows,
        ),
    )


def _counted_acceptance(artifact: Artifact, bench: Json) -> Iterator[Figure]:
    """Yields a figure with a line for each concurrency at which the last side drafted."""
    rates = {
        load["concurrency"]: counters["per_position"]
        for load in bench["loads"]
        for counters in [load["sides"][bench["sides"][-1]["name"]]["server_counters"]]
        if counters is not None and counters["per_position"]
    }
    if not rates:
        return
    longest = max(len(by_position) for by_position in rates.values())
    copied = "; copied tokens count, too" if artifact.options.get("prompt_lookup") else ""
    yield Figure(
        slug="acceptance",
        title="Acceptance by position of the draft token",
        caption="Accepted / drafted tokens at each position, by the server's own counters: a "
        f"position is accepted where all before it are{copied}. "
        f"{conditions.of_bench(artifact, bench)}",
        chart=Chart(
            x=_positions(longest),
            y=Axis("accepted / drafted", "%", low=0, high=103),
            panels=[
                Panel(
                    [
                        Series(
                            name=f"{load} at once",
                            x=range(1, len(by_position) + 1),
                            y=[100 * rate for rate in by_position],
                            colour=colour,
                        )
                        for colour, (load, by_position) in enumerate(rates.items(), start=1)
                    ]
                )
            ],
        ),
        table=Table(
            "Acceptance by position",
            (
                Column("concurrency", "streams"),
                *(Column(f"position {n}", "%") for n in range(1, longest + 1)),
            ),
            [
                [str(load), *(percent(rate, 1) for rate in known), *[""] * (longest - len(known))]
                for load, known in rates.items()
            ],
        ),
    )


def _positions(longest: int) -> Axis:
    return Axis("position in the step", "draft token", ticks=counted(longest))
