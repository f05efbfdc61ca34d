"""The report of a training: one HTML page with its curves, as `specpipe report` draws them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from specpipe.evaluate.report.blocks import (
    Column,
    Figure,
    Page,
    PageSection,
    Paragraph,
    Table,
    Tile,
    number,
)
from specpipe.evaluate.report.charts import Axis, Chart, Panel, Series, Style, counted
from specpipe.training.outcome import Outcome


def training_page(outcome: Outcome, *, name: str, made_at: datetime) -> Page:
    """Returns the page of a training."""
    settings = outcome.record["settings"]
    return Page(
        title=f"{name}: training",
        subtitle=f"{settings['loss']}, kept is step {outcome.best_step}",
        made_at=made_at.isoformat(timespec="seconds"),
        tiles=[
            Tile(
                name=f"tokens a step, {kind}",
                value=f"{gain.old:.2f} → {gain.new:.2f}",
                note=f"95 % interval of the difference {gain.low:+.3f} to {gain.high:+.3f}",
                tone="good" if gain.low > 0 else "bad" if gain.high < 0 else "neutral",
            )
            for kind, gain in outcome.gains.items()
        ],
        sections=[
            PageSection("acceptance", "Held-out acceptance", list(_acceptance(outcome))),
            PageSection("training", "Training", list(_training(outcome))),
        ],
    )


def _acceptance(outcome: Outcome) -> Iterator[Paragraph | Figure]:
    most = outcome.record["settings"]["num_draft_tokens"]
    yield Paragraph(
        f"Tokens of a step with {most} draft tokens, on the target's answers to prompts of files "
        "that training did not read."
    )
    steps, lengths = zip(*outcome.lengths, strict=True)
    yield Figure(
        slug="length",
        title="Acceptance length",
        caption="Mean tokens of a step over all held-out answers, at each evaluation",
        chart=Chart(
            x=Axis("training", "steps"),
            y=Axis("acceptance length", "tokens a step"),
            panels=[Panel([Series("trained", steps, lengths)])],
        ),
        table=Table(
            "Acceptance length",
            [Column("step"), Column("acceptance length", "tokens a step")],
            [[str(step), number(length, 3)] for step, length in outcome.lengths],
        ),
    )
    positions = list(range(1, most + 1))
    series = []
    rows = []
    for colour, (side, figures) in enumerate(
        (("before", outcome.before), ("after", outcome.after))
    ):
        for kind in outcome.gains:
            shares = figures[kind]["acceptance_by_position"]
            style: Style = "line" if kind == "greedy" else "dashed"
            series.append(Series(f"{side}, {kind}", positions, shares, colour=colour, style=style))
            rows += [
                [f"{side}, {kind}", str(position), number(share, 3)]
                for position, share in zip(positions, shares, strict=True)
            ]
    yield Figure(
        slug="positions",
        title="Acceptance by position",
        caption="Share of the draft tokens at a position that stand where all before them do",
        chart=Chart(
            x=Axis("position in a step", "draft tokens", ticks=counted(most)),
            y=Axis("acceptance", "share", low=0.0, high=1.0),
            panels=[Panel(series)],
        ),
        table=Table(
            "Acceptance by position",
            [Column("draft", is_text=True), Column("position"), Column("acceptance", "share")],
            rows,
        ),
    )


def _training(outcome: Outcome) -> Iterator[Paragraph | Figure]:
    if not outcome.losses:
        yield Paragraph("No losses were logged.")
        return
    steps, losses = zip(*outcome.losses, strict=True)
    yield Figure(
        slug="loss",
        title="Training loss",
        caption="Mean over the steps since the point before, in nats for divergences",
        chart=Chart(
            x=Axis("training", "steps"),
            y=Axis("loss", outcome.record["settings"]["loss"]),
            panels=[Panel([Series("loss", steps, losses)])],
        ),
        table=Table(
            "Training loss",
            [Column("step"), Column("loss")],
            [[str(step), number(loss, 4)] for step, loss in outcome.losses],
            is_folded=True,
        ),
    )
