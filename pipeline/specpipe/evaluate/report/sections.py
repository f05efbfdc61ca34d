"""The sections of a report, in order; each says what is missing and how to get it."""

from __future__ import annotations

from datetime import datetime

from specpipe.evaluate.report import (
    acceptance,
    conditions,
    draft_length,
    load,
    pair,
    provenance,
    quantization,
    tiles,
    verification,
)
from specpipe.evaluate.report.artifact import Artifact, Json
from specpipe.evaluate.report.blocks import Page, PageSection
from specpipe.roles import ROLES


def make_page(artifact: Artifact, made_at: datetime) -> Page:
    """Returns the page; raises KeyError and the like where a result is not what it should be."""
    return Page(
        title=artifact.name,
        subtitle=_subtitle(artifact),
        made_at=made_at.strftime("%Y-%m-%d %H:%M UTC"),
        tiles=list(tiles.tiles(artifact)),
        sections=[
            PageSection(slug, title, list(blocks(artifact)))
            for slug, title, blocks in (
                ("pair", "The pair", pair.blocks),
                ("verification", "Is the output the target's?", verification.blocks),
                ("acceptance", "How much is accepted?", acceptance.blocks),
                ("draft-length", "Which draft length pays?", draft_length.blocks),
                ("load", "What does it gain under load?", load.blocks),
                ("quantization", "What does quantization cost?", quantization.blocks),
                ("provenance", "Where the numbers come from", provenance.blocks),
            )
        ],
    )


def _subtitle(artifact: Artifact) -> str:
    longest = artifact.options.get("num_draft_tokens")
    length = f"up to {longest}" if artifact.options.get("adaptive") else f"{longest}"
    copies = ""
    if artifact.options.get("prompt_lookup"):
        copies = " A request that runs alone may copy them from its own text instead."
    formats = {role: _format(artifact.engines[role]) for role in ROLES}
    return (
        f"Speculative decoding on runtime {artifact.runtime}: a draft ({formats['draft']}) "
        f"proposes {length} tokens a step, the target ({formats['target']}) verifies them."
        f"{copies}"
    )


def _format(engine: Json) -> str:
    return conditions.quantized(engine) or conditions.compute_dtype(engine)
