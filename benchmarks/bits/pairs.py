"""Pairs for benchmarks.bits, made in memory of the small trained one, and what they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.bits.asked import Material
from benchmarks.gpu.models import FusedModel, Source
from benchmarks.inflate import open_source, size_of
from benchmarks.source_prompts import source_prompts
from specpipe.roles import Role
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.torch.pair import fused_pair_of
from specpipe.speculative.guide import Guide
from specpipe.text.tokenizer import Tokenizer

MODELS = Path(__file__).parents[2] / "models" / "python-code"

_STOP_STRINGS = ("return", "\n\n", "self", "):\n")  # what is often there in a source
_GUIDES = {
    "regex": Guide(type="regex", text=r"[a-z]{2,8}(, [a-z]{1,6}){1,3}\."),
    "choice": Guide(type="choice", text='["yes", "no", "it depends"]'),
    "schema": Guide(
        type="json_schema",
        text='{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, '
        '"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["name", "n"], '
        '"additionalProperties": false}',
    ),
}
_TEXT_TOKENS = 20_000
_PREFIX_TOKENS = 300


def fused_pair(
    sizes: str | None,
    options: PairOptions,
    tokenizer: Tokenizer,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_tokens: int | None = None,
    draft: Path = MODELS / "draft",
) -> EnginePair:
    """Makes the pair in the device's memory, as small as it is or inflated to TARGET+DRAFT.

    kv_cache_tokens  of all requests, for each model; None: each can have its full length
    draft            a checkpoint folder
    """
    target_size, _, draft_size = (sizes or "").partition("+")
    wanted: Mapping[Role, str] = {"draft": draft_size, "target": target_size}
    models: dict[Role, FusedModel] = {}
    engines = {}
    for role, size in wanted.items():
        folder = draft if role == "draft" else MODELS / role
        source = Source(folder, None, device, dtype)
        models[role] = FusedModel.make(replace(source, size=size_of(size)) if size else source)
        engines[role] = models[role].engine(
            max_seq_len=options.max_seq_len,
            max_draft_len=options.num_draft_tokens,
            max_batch_size=options.max_batch_size,
            kv_cache_tokens=kv_cache_tokens,
        )
    return fused_pair_of(
        engines["draft"],
        engines["target"],
        replace(options, parallel=models["draft"].unified.parallel),
        tokenizer.detokenizer,
        guides=tokenizer.guides,
    )


def source_material(
    tokenizer: Tokenizer,
    *,
    num_questions: int,
    max_prompt_tokens: int,
    max_tokens: int,
    max_num_draft_tokens: int,
    num_prefixes: int = 0,
) -> Material:
    """Prompts that are pieces of Python sources, which the small pair was trained on."""
    config, _ = open_source(MODELS / "target")
    text = source_prompts(tokenizer, 1, _TEXT_TOKENS)[0]
    return Material(
        text=text,
        prefixes=[text[n * _PREFIX_TOKENS :][:_PREFIX_TOKENS] for n in range(num_prefixes)],
        num_questions=num_questions,
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        max_num_draft_tokens=max_num_draft_tokens,
        vocab_size=config["vocab_size"],
        end_token_ids=tokenizer.end_token_ids,
        stop_strings=_STOP_STRINGS,
        guides=_GUIDES,
    )
