"""What a TensorRT engine needs in GPU memory, from its config alone."""

from __future__ import annotations

from math import prod

from specpipe.checkpoints.checkpoint import ELEMENT_BYTES
from specpipe.checkpoints.quantized_rules import shares_embedding
from specpipe.checkpoints.unified_config import DTYPES, UnifiedConfig
from specpipe.checkpoints.unified_layout import tensor_rules, whole_shape
from specpipe.machine.memory import MemoryEstimate
from specpipe.runtimes.tensorrt import shapes


def estimate_memory(
    config: UnifiedConfig,
    *,
    dtype: str,
    max_batch_size: int,
    max_seq_len: int,
    max_draft_len: int,
    max_num_tokens: int,
) -> MemoryEstimate:
    """Estimates an engine of a unified config.

    The workspace is what one layer has at once, twice, and the logits; the library plans it on the
    GPU and gives no number before.
    """
    element = ELEMENT_BYTES[DTYPES[dtype]]
    weights_bytes = sum(
        (ELEMENT_BYTES[rule.dtype] if rule.dtype else element) * prod(whole_shape(config, rule))
        for rule, _ in tensor_rules(config)
    )
    if shares_embedding(config):
        weights_bytes -= element * config.vocab_size * config.hidden_size
    is_parallel = config.parallel is not None
    capacity = shapes.capacity(max_seq_len, max_draft_len, is_parallel=is_parallel)
    max_rows = shapes.max_rows(max_draft_len, is_parallel=is_parallel)
    rows = max(max_num_tokens, max_batch_size * max_rows)
    qkv_size = config.query_size + 2 * config.key_size
    row = 2 * config.hidden_size + 3 * qkv_size + 3 * config.intermediate_size
    logits_bytes = 4 * max_batch_size * (max_draft_len + 1) * config.vocab_size
    return MemoryEstimate(
        weights_bytes=weights_bytes,
        kv_cache_bytes=max_batch_size * capacity * element * config.kv_size,
        workspace_bytes=2 * element * rows * row + 2 * logits_bytes,
    )
