"""What a TensorRT engine needs in GPU memory, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from specpipe.checkpoint import ELEMENT_BYTES as STORED_BYTES
from specpipe.families import part_shape, tensor_rules
from specpipe.quantization.tensors import is_quantized
from specpipe.runtimes.memory import ELEMENT_BYTES, MemoryEstimate, kv_bytes_per_token
from specpipe.runtimes.tensorrt import shapes


def estimate_memory(
    config: Mapping[str, Any],
    *,
    dtype: str,
    max_batch_size: int,
    max_seq_len: int,
    max_draft_len: int,
    max_num_tokens: int,
) -> MemoryEstimate:
    """Estimates an engine of a unified config.

    The workspace is what one layer has at once, twice, and the logits; the library plans it on the
    GPU and tells no number before.
    """
    element = ELEMENT_BYTES[dtype]
    weights_bytes = sum(
        (STORED_BYTES[rule.dtype] if rule.dtype else element) * prod(part_shape(config, part))
        for rule, _ in tensor_rules(config)
        for part in rule.parts
    )
    if config["tie_word_embeddings"] and not is_quantized(config, "lm_head"):
        weights_bytes -= element * config["vocab_size"] * config["hidden_size"]
    capacity = shapes.capacity(max_seq_len, max_draft_len)
    rows = max(max_num_tokens, max_batch_size * (max_draft_len + 1))
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    row = (
        2 * config["hidden_size"]
        + 3 * heads * config["head_size"]
        + 3 * config["intermediate_size"]
    )
    logits_bytes = 4 * max_batch_size * (max_draft_len + 1) * config["vocab_size"]
    return MemoryEstimate(
        weights_bytes=weights_bytes,
        kv_cache_bytes=max_batch_size * capacity * kv_bytes_per_token(config, dtype),
        workspace_bytes=2 * element * rows * row + 2 * logits_bytes,
    )
