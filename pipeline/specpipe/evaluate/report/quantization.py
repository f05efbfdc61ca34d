"""What quantization costs, as the build measured it."""

from __future__ import annotations

from collections.abc import Iterator

from specpipe.evaluate.report import conditions
from specpipe.evaluate.report.artifact import Artifact, Json
from specpipe.evaluate.report.blocks import (
    UNKNOWN,
    Block,
    Column,
    Figure,
    Missing,
    Notice,
    Paragraph,
    Table,
    number,
    percent,
    size,
)
from specpipe.evaluate.report.charts import Axis, Chart, Panel, Series
from specpipe.roles import ROLES


def blocks(artifact: Artifact) -> Iterator[Block]:
    """Yields both forms of each model, and acceptance of their pairings."""
    quality = artifact.quality
    if quality is None:
        if any(conditions.quantized(artifact.engines[role]) for role in ROLES):
            yield Missing(
                "What quantization costs was not measured: quality.measure is false, or the "
                "runtime quantizes by itself.",
                artifact.command("build"),
            )
        else:
            yield Paragraph("Nothing is quantized.")
        return
    yield _forms(quality)
    yield from _figures(artifact)
    for warning in quality["warnings"]:
        yield Notice(f"{warning[:1].upper()}{warning[1:]}")


def _forms(quality: Json) -> Table:
    rows = []
    for model in quality["models"]:
        measured = model["divergence"]
        for key in ("plain", "quantized"):
            form = model[key]
            if form is None:
                continue
            is_quantized = measured is not None and key == "quantized"
            perplexity = None
            if measured is not None:
                perplexity = measured["perplexity" if is_quantized else "plain_perplexity"]
            rows.append(
                [
                    model["role"],
                    form["name"],
                    size(form["weights_bytes"]),
                    size(form["kv_cache_bytes_per_token"]),
                    number(perplexity, 3),
                    number(measured["perplexity_ratio"], 4) if is_quantized else UNKNOWN,
                    number(measured["mean_kl"], 5) if is_quantized else UNKNOWN,
                    percent(measured["top1_agreement"], 2) if is_quantized else UNKNOWN,
                ]
            )
    texts = dict.fromkeys(m["texts"] for m in quality["models"] if m["texts"])
    return Table(
        "Both forms of each model on texts held out",
        (
            Column("model", is_text=True),
            Column("format", is_text=True),
            Column("weights"),
            Column("KV cache of a token"),
            Column("perplexity"),
            Column("perplexity / plain"),
            Column("mean KL", "nats"),
            Column("top-1 agreement", "%"),
        ),
        rows,
        note=f"Texts: {'; '.join(texts)}. Measured with runtime torch, {quality['engines']}."
        if texts
        else f"Measured with runtime torch, {quality['engines']}.",
    )


def _figures(artifact: Artifact) -> Iterator[Figure]:
    """Yields acceptance of every pairing of plain and quantized models."""
    quality = artifact.quality
    if quality is None or not quality["acceptance"]:
        return
    pairings = quality["acceptance"]
    targets = list(dict.fromkeys(pairing["target"] for pairing in pairings))
    drafts = list(dict.fromkeys(pairing["draft"] for pairing in pairings))
    by_forms = {(pairing["draft"], pairing["target"]): pairing for pairing in pairings}
    series = []
    for colour, target in enumerate(targets):
        known = [
            (place, by_forms[draft, target])
            for place, draft in enumerate(drafts)
            if by_forms.get((draft, target), {}).get("acceptance_rate") is not None
        ]
        has_errors = all(p["standard_error"] is not None for _, p in known)
        series.append(
            Series(
                name=f"target {target}",
                x=[place for place, _ in known],
                y=[100 * p["acceptance_rate"] for _, p in known],
                bounds=[_one_error(p) for _, p in known] if has_errors else (),
                colour=colour,
                style="bars",
            )
        )
    yield Figure(
        slug="quantized-acceptance",
        title="Acceptance before and after quantization",
        caption="Accepted / drafted tokens of every pairing of forms; bars: one standard error, "
        f"drawing prompts. {conditions.of_quality(quality)}",
        chart=Chart(
            x=Axis(
                "draft",
                "format",
                ticks=tuple(range(len(drafts))),
                tick_labels=tuple(drafts),
                low=-0.6,
                high=len(drafts) - 0.4,
            ),
            y=Axis("accepted / drafted", "%", low=0),
            panels=[Panel(series)],
        ),
        table=Table(
            "Acceptance by format",
            (
                Column("draft", is_text=True),
                Column("target", is_text=True),
                Column("rate", "%"),
                Column("standard error", "%"),
                Column("accepted", "draft tokens"),
                Column("drafted", "draft tokens"),
            ),
            [
                [
                    p["draft"],
                    p["target"],
                    percent(p["acceptance_rate"], 1),
                    percent(p["standard_error"], 1),
                    str(p["num_accepted_tokens"]),
                    str(p["num_draft_tokens"]),
                ]
                for p in pairings
            ],
        ),
    )


def _one_error(pairing: Json) -> tuple[float, float]:
    rate, error = pairing["acceptance_rate"], pairing["standard_error"]
    return 100 * max(rate - error, 0.0), 100 * (rate + error)
