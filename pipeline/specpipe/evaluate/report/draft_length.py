"""Which draft length pays at which load: predicted, measured, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specpipe.evaluate.report import conditions
from specpipe.evaluate.report.artifact import Artifact, Json, own_draft
from specpipe.evaluate.report.blocks import (
    UNKNOWN,
    Block,
    Code,
    Column,
    Figure,
    Missing,
    Notice,
    Paragraph,
    Table,
    interval,
    number,
    outdated,
    percent,
)
from specpipe.evaluate.report.charts import Axis, Chart, Panel, Series, Style, counted
from specpipe.evaluate.tune.measure import doubt
from specpipe.evaluate.tune.schedule import to_yaml


def blocks(artifact: Artifact) -> Iterator[Block]:
    """Yields predictions and measurements, costs, and the schedule in all forms."""
    tune = artifact.tune
    if tune is None:
        yield Missing("Draft lengths were not compared.", artifact.command("tune"))
        return
    yield from outdated(artifact, tune, "tune")
    own = own_draft(tune)
    if own["best"] is not None:
        yield Paragraph(_best_words(own["best"]))
    for sentence in own.get("doubts", ()):
        yield Paragraph(f"Nothing is recommended: {sentence}.")
    if warning := doubt((m["lowest"], m["highest"]) for m in own["measurements"]):
        yield Notice(warning)
    yield from _figures(artifact)
    yield _costs(own)
    if len(tune["drafts"]) > 1:
        yield _ranking(tune)
    if own["schedule"] is not None:
        yield Code(to_yaml(own["schedule"]).rstrip(), "specpipe (below speculation: in the YAML)")
    for form in tune["forms"]:
        if form["text"] is None:
            yield Paragraph(f"{form['name']}: {form['note']}.")
        else:
            yield Code(form["text"].rstrip(), f"{form['name']} ({form['note']})")


def _best_words(best: Sequence[Sequence[int]]) -> str:
    words = [
        f"{f'K = {length}' if length else 'no draft'} with {load} at once" for load, length in best
    ]
    return f"Measured best: {'; '.join(words)}."


def _costs(own: Json) -> Table:
    lengths = [length for length, _ in own["costs"][0]["verify_s"]] if own["costs"] else []
    return Table(
        "What a step costs",
        (
            Column("concurrency", "requests"),
            Column("draft step", "ms"),
            *(Column(f"target, K = {length}", "ms") for length in lengths),
            Column("rest without a draft", "ms"),
            Column("rest with the most", "ms"),
        ),
        [
            [
                str(load["batch_size"]),
                number(1e3 * _draft_seconds(load)),
                *(number(1e3 * seconds) for _, seconds in load["verify_s"]),
                number(1e3 * load["plain_rest_s"]),
                number(1e3 * load["drafting_rest_s"]),
            ]
            for load in own["costs"]
        ],
        is_folded=True,
        note="Target, K: one forward over K + 1 tokens of every request; K = 0 is a plain step. "
        "Rest: choosing tokens, text, bookkeeping. Draft step, of a draft that proposes all tokens "
        "in one pass: that for the most.",
    )


def _draft_seconds(load: Json) -> float:
    passes = load.get("pass_s")
    return float(passes[-1][1] if passes else load["draft_s"])


def _ranking(tune: Json) -> Table:
    return Table(
        "Drafts for this target",
        (
            Column("draft", is_text=True),
            Column("predicted", "× target alone"),
            Column("accepted", "%"),
            Column("", is_text=True),
        ),
        [
            [
                draft["checkpoint"],
                UNKNOWN if draft["reason"] else number(draft["score"]),
                percent(draft["acceptance"]["alpha"], 1) if draft["acceptance"] else UNKNOWN,
                draft["reason"] or ("the pair's own" if draft["is_own"] else ""),
            ]
            for draft in tune["drafts"]
        ],
        note="Predicted: geometric mean over the loads of the best draft length.",
    )


def _figures(artifact: Artifact) -> Iterator[Figure]:
    """Yields predicted and measured speed-up over K, a panel for each load."""
    tune = artifact.tune
    if tune is None:
        return
    own = own_draft(tune)
    measured = {(m["concurrency"], m["num_draft_tokens"]): m for m in own["measurements"]}
    panels = []
    for load in tune["settings"]["concurrencies"]:
        predicted = [p for p in own["predictions"] if p["concurrency"] == load]
        lengths = [p["num_draft_tokens"] for p in predicted]
        here = [m for (at, _), m in sorted(measured.items()) if at == load]
        panels.append(
            Panel(
                [
                    _line("published model", lengths, predicted, "published", 0, "dashed"),
                    _line("predicted", lengths, predicted, "speed_up", 1, "line"),
                    Series(
                        name="measured",
                        x=[m["num_draft_tokens"] for m in here],
                        y=[m["speed_up"] for m in here],
                        bounds=[(m["lowest"], m["highest"]) for m in here],
                        colour=2,
                        style="points",
                    ),
                ],
                title=f"{load} at once",
            )
        )
    yield Figure(
        slug="speed-up",
        title="Speed-up over draft length: predicted and measured",
        caption="Tokens per second over those of the target alone, which is 1. Predicted: from "
        "acceptance by position and measured costs; published model: from one acceptance "
        "probability and one cost ratio; measured: with the lowest and the highest round. "
        f"{conditions.of_tune(artifact, tune)}",
        chart=Chart(
            x=Axis(
                "K",
                "tokens/step",
                ticks=counted(tune["settings"]["max_draft_len"]),
            ),
            y=Axis("speed-up", "× target alone", low=0),
            panels=panels,
            reference=1.0,
        ),
        table=_speed_up_table(own, measured),
    )


def _line(
    name: str,
    lengths: Sequence[int],
    predicted: Sequence[Json],
    key: str,
    colour: int,
    style: Style,
) -> Series:
    return Series(name, lengths, [p[key] for p in predicted], colour=colour, style=style)


def _speed_up_table(own: Json, measured: dict[tuple[int, int], Any]) -> Table:
    rows = []
    for p in own["predictions"]:
        measurement = measured.get((p["concurrency"], p["num_draft_tokens"]), {})
        rows.append(
            [
                str(p["concurrency"]),
                str(p["num_draft_tokens"]),
                number(p["speed_up"]),
                number(measurement.get("speed_up")),
                interval(measurement.get("lowest"), measurement.get("highest")),
                number(p["published"]),
                number(p["memory_bound"]),
                number(p["expected_tokens"]),
                number(measurement.get("tokens_per_s"), 1),
            ]
        )
    return Table(
        "Predicted and measured speed-up",
        (
            Column("concurrency", "requests"),
            Column("K", "tokens"),
            Column("predicted", "×"),
            Column("measured", "×"),
            Column("lowest to highest round", "×"),
            Column("published model", "×"),
            Column("memory-bound model", "×"),
            Column("a step emits", "tokens"),
            Column("measured", "tokens/s"),
        ),
        rows,
        note="Published model: one acceptance probability and one cost ratio (Leviathan et al. "
        "2023, theorem 3.8). Memory-bound model: acceptance by position, forwards of a fixed time "
        "and a time for each row. Predicted: acceptance by position, every cost as measured. A "
        "step emits: as that acceptance promises.",
    )
