"""What an engine of the torch runtime needs in memory, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from specpipe.families import part_shape, tensor_rules
from specpipe.runtimes.memory import ELEMENT_BYTES, MemoryEstimate, kv_bytes_per_token


def estimate_memory(
    config: Mapping[str, Any],
    *,
    dtype: str,
    max_batch_size: int,
    max_seq_len: int,
    max_draft_len: int,
    max_num_tokens: int,
) -> MemoryEstimate:
    """Estimates an engine of a unified config; `dtype` is "float32", "bfloat16" or "float16"."""
    element = ELEMENT_BYTES[dtype]
    capacity = max_seq_len + max_draft_len + 1
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, head_size = config["hidden_size"], config["head_size"]
    weights_bytes = sum(
        prod(part_shape(config, part)) * (ELEMENT_BYTES["float32"] if part.one_plus else element)
        for rule, _ in tensor_rules(config)
        for part in rule.parts
    )
    if config["tie_word_embeddings"]:
        weights_bytes -= element * config["vocab_size"] * hidden  # one matrix serves twice
    kv_row = 2 * num_kv_heads * head_size
    row = 2 * hidden + 3 * num_heads * head_size + kv_row + 2 * config["intermediate_size"]
    num_masks = 2 if config.get("layer_types") else 1
    prefill_mask = num_masks * max_num_tokens * num_heads // num_kv_heads * capacity
    # Capped scores are there as a whole: before and after the softmax, in float32 and not.
    scores = 3 * max_num_tokens * num_heads * capacity
    if config.get("attn_logit_softcapping") is None:
        scores = 0
    logits = max_batch_size * (max_draft_len + 1) * config["vocab_size"]
    return MemoryEstimate(
        weights_bytes=weights_bytes,
        kv_cache_bytes=max_batch_size * capacity * kv_bytes_per_token(config, dtype),
        workspace_bytes=element * (2 * max_num_tokens * row + prefill_mask)
        + 4 * (scores + 2 * logits),
    )
