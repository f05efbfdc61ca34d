"""The model card of a trained draft: what it comes from, how it was made, what it is worth.

A model card is the README.md of a checkpoint; the YAML at its beginning is what the Hugging Face
hub reads (huggingface_hub's documentation, "Model Cards").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from specpipe import __version__
from specpipe.checkpoints.licences import Licences
from specpipe.errors import show
from specpipe.training.outcome import Outcome

_ASKED = ("loss", "num_steps", "num_epochs", "batch_tokens", "accumulate", "learning_rate", "seed")


def model_card(outcome: Outcome, licences: Licences, *, name: str) -> str:
    """Returns README.md; licences are those of the draft whose weights, or shape, were trained."""
    return "\n".join((*_header(licences), *_body(outcome, name))) + "\n"


def _header(licences: Licences) -> Iterator[str]:
    fields: dict[str, Any] = {"library_name": "transformers", "tags": ["speculative-decoding"]}
    if licences.declared:
        fields["license"] = list(licences.declared)
    if licences.name:
        fields["license_name"] = licences.name
    if licences.link:
        fields["license_link"] = licences.link
    yield "---"
    yield yaml.safe_dump(fields, sort_keys=True).rstrip()
    yield "---"


def _body(outcome: Outcome, name: str) -> Iterator[str]:
    record, settings = outcome.record, outcome.record["settings"]
    yield f"\n# {name}\n"
    yield (
        f"A draft for speculative decoding, trained by specpipe {__version__} on what its target "
        "answers. It is of use with this target alone; by itself it knows little."
    )
    if settings["parallel"]:
        yield (
            f"\nIt proposes {settings['parallel']} tokens in one pass, by mask tokens "
            f"(`pard_token` {record['mask']} of config.json)."
        )
    yield "\n## Held-out acceptance\n"
    yield (
        f"Tokens of a step with {settings['num_draft_tokens']} draft tokens, on answers of the "
        "target to prompts of files that training did not read. The interval is the bootstrap's, "
        "drawing files.\n"
    )
    yield "| answers | tokens | draft before | this draft | difference (95 % interval) |"
    yield "|---|---|---|---|---|"
    for kind, gain in outcome.gains.items():
        yield (
            f"| {kind} | {outcome.after[kind]['num_tokens']:,} | {gain.old:.3f} | {gain.new:.3f} | "
            f"{gain.difference:+.3f} ({gain.low:+.3f} to {gain.high:+.3f}) |"
        )
    yield "\n| | " + " | ".join(outcome.gains) + " |"
    yield "|---|" + "---|" * len(outcome.gains)
    for key, words in (("agreement", "same most likely token"), ("overlap", "Σ min(p, q)")):
        yield f"| {words}, before → after | " + _pairs(outcome, key)
    most = settings["num_draft_tokens"]
    for position in range(most):
        yield f"| draft token {position + 1} stands, before → after | " + _pairs(
            outcome, "acceptance_by_position", position
        )
    yield "\n## Made from\n"
    for role, words in (("base", "Draft before"), ("start", "Weights"), ("target", "Target")):
        yield f"- {words}: {_checkpoint(record[role])}"
    yield from _data(outcome.data)
    yield "\n## Settings\n"
    yield ", ".join(f"{key} {settings[key]}" for key in _ASKED if settings[key] is not None) + "."
    yield f"\nKept is step {outcome.best_step}. All settings, losses and figures: training.json."


def _pairs(outcome: Outcome, key: str, position: int | None = None) -> str:
    def value(figures: Mapping[str, Any]) -> str:
        found = figures[key] if position is None else figures[key][position]
        return f"{found:.3f}"

    cells = [
        f"{value(outcome.before[kind])} → {value(outcome.after[kind])}" for kind in outcome.gains
    ]
    return " | ".join(cells) + " |"


def _checkpoint(record: Mapping[str, Any]) -> str:
    name = f"`{show(record['name'])}`"
    if record.get("revision"):
        return f"{name} at revision {record['revision']}"
    files = ", ".join(f"{file} {digest[:16]}…" for file, digest in record["sha256"].items())
    return f"{name} (SHA-256: {files})"


def _data(data: Mapping[str, Any]) -> Iterator[str]:
    yield "\n## Trained on\n"
    yield (
        f"{data['num_training']:,} texts of {data['num_texts']:,}; held out were "
        f"{data['num_held_out']:,} of {data['num_held_out_groups']:,} files, and "
        f"{data['num_near']:,} were left out as nearly one of those.\n"
    )
    for collection in data["collections"]:
        for key in ("answered_by", "prompts", "licences", "settings"):
            value = json.dumps(collection[key], ensure_ascii=False, sort_keys=True)
            yield f"- {key.replace('_', ' ')}: `{value.replace('`', chr(39))}`"
