"""Drafts that propose several tokens in one pass: what their `config.json` says of it.

Such a draft reads its text with mask tokens behind it, all of one id, and the row of each says what
comes next but one, next but two, and so on (PARD: An et al. 2025, arXiv:2504.18583). vLLM reads
`pard_token` likewise (v1/spec_decode, `parallel_drafting_token_id`); the other key is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specpipe.checkpoints.hf_config import count
from specpipe.errors import CheckpointError

MASK_KEY, LENGTH_KEY = "pard_token", "specpipe_num_draft_tokens"


@dataclass(frozen=True)
class ParallelDraft:
    """How a draft proposes several tokens in one pass.

    mask_token_id     stands for each token that is not there yet
    num_draft_tokens  that it was trained to propose so; None: it does not say
    """

    mask_token_id: int
    num_draft_tokens: int | None = None


def parallel_keys(config: Mapping[str, Any], vocab_size: int) -> dict[str, int]:
    """Returns what a Hugging Face `config.json` says of it, by the same keys; none for others.

    Raises CheckpointError for a mask without an embedding row.
    """
    if config.get(MASK_KEY) is None:
        return {}
    keys = {MASK_KEY: count(config, MASK_KEY, minimum=0)}
    if keys[MASK_KEY] >= vocab_size:
        raise CheckpointError(
            f"config.json: {MASK_KEY} is {keys[MASK_KEY]}, but vocab_size {vocab_size}: the mask "
            "token has no embedding row"
        )
    if config.get(LENGTH_KEY) is not None:
        keys[LENGTH_KEY] = count(config, LENGTH_KEY)
    return keys


def parallel_draft(config: Mapping[str, Any], vocab_size: int) -> ParallelDraft | None:
    """Returns how a model drafts in parallel by its `config.json`; None where it does not."""
    keys = parallel_keys(config, vocab_size)
    return ParallelDraft(keys[MASK_KEY], keys.get(LENGTH_KEY)) if keys else None
