"""What an engine of the torch runtime needs in memory, from its config alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from specpipe.checkpoints.checkpoint import ELEMENT_BYTES
from specpipe.checkpoints.quantized_rules import is_quantized, shares_embedding
from specpipe.checkpoints.unified_config import DTYPES, UnifiedConfig
from specpipe.checkpoints.unified_layout import tensor_rules, whole_shape
from specpipe.checkpoints.unified_sections import UNQUANTIZED
from specpipe.machine.memory import MemoryEstimate
from specpipe.runtimes.torch.fused_sizes import (
    max_parts,
    most_rows,
    paged_capacity,
    prompt_width_of,
)
from specpipe.runtimes.torch.graph_memory import graph_bytes
from specpipe.runtimes.torch.kernel_choice import Kernel, fits, int4_group_size, is_packed

_SCORED_TOKENS = 64
"""Tokens of a prompt whose rows of logits a forward gives at least: a guess."""


def estimate_memory(
    config: UnifiedConfig,
    *,
    dtype: str,
    max_batch_size: int,
    max_seq_len: int,
    max_draft_len: int,
    max_num_tokens: int,
    on_gpu: bool = False,
    kernel: Kernel | None = None,
    kv_cache_tokens: int | None = None,
) -> MemoryEstimate:
    """Estimates an engine of a unified config; `dtype` is "float32", "bfloat16" or "float16".

    on_gpu           has room for what the fused kernels take, too, which run there if they can
    kernel           what multiplies by quantized weights, where it fits
    kv_cache_tokens  positions of all sequences together; None: all can have their full length
    """
    element = ELEMENT_BYTES[DTYPES[dtype]]
    capacity = max_seq_len + max_draft_len + 1
    if on_gpu:
        capacity = paged_capacity(max_seq_len, max_draft_len)
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    hidden = config.hidden_size
    weights_bytes = sum(_weight_bytes(config, dtype, kernel))
    if shares_embedding(config):
        weights_bytes -= element * config.vocab_size * hidden  # one matrix serves twice
    qkv = 3 * config.query_size + 2 * config.key_size
    row = 2 * hidden + qkv + 2 * config.intermediate_size
    num_masks = 2 if config.layer_types else 1
    prefill_mask = num_masks * max_num_tokens * num_heads // num_kv_heads * capacity
    # Capped scores are there as a whole: before and after the softmax, in float32 and not.
    scores = 3 * max_num_tokens * num_heads * capacity
    if config.attention_cap is None:
        scores = 0
    logits = max_logits(max_batch_size, max_draft_len) * config.vocab_size
    forward_bytes = element * (2 * max_num_tokens * row + prefill_mask) + 4 * scores
    forward_bytes += _rounding_bytes(config, max_num_tokens)
    if on_gpu:
        fused_bytes = _fused_bytes(config, capacity, max_batch_size, max_draft_len)
        fused_bytes += _prompt_bytes(config, element, max_seq_len)
        forward_bytes = max(forward_bytes, fused_bytes)
    elif dtype == "float32":
        forward_bytes += _packed_bytes(config)
    if kv_cache_tokens is None:
        kv_cache_tokens = max_batch_size * capacity
    return MemoryEstimate(
        weights_bytes=weights_bytes,
        kv_cache_bytes=kv_cache_tokens * element * config.kv_size,
        workspace_bytes=forward_bytes + 4 * 2 * logits,
    )


def max_logits(max_batch_size: int, max_draft_len: int) -> int:
    """Returns the most rows of logits of a forward: a batch's, or a part of a prompt's."""
    return max(max_batch_size * (max_draft_len + 1), _SCORED_TOKENS)


def _weight_bytes(config: UnifiedConfig, dtype: str, kernel: Kernel | None) -> Iterator[int]:
    for rule, layer in tensor_rules(config.quantized(UNQUANTIZED)):
        module, _, kind = rule.name.format(n=layer).rpartition(".")
        shape = whole_shape(config, rule)
        if kind == "weight" and is_quantized(config, module):
            yield _linear_bytes(config, dtype, kernel, *shape)
        else:
            stored = "F32" if rule.parts[0].one_plus else DTYPES[dtype]
            yield ELEMENT_BYTES[stored] * prod(shape)


def _linear_bytes(
    config: UnifiedConfig, dtype: str, kernel: Kernel | None, rows: int, columns: int
) -> int:
    """Returns the bytes of a quantized weight and of the scales that are not one for all."""
    element = ELEMENT_BYTES[DTYPES[dtype]]
    if not fits(kernel, config.quantization, dtype, rows, columns):
        is_rounded = config.quantization.activations is not None
        return rows * columns * (ELEMENT_BYTES["F32"] if is_rounded else element)
    if kernel == "int4":  # a scale and a zero point for each group
        groups = columns // int4_group_size(config.quantization, columns)
        return rows * (columns // 2 + 2 * groups * element)
    if kernel == "int8":
        return rows * (columns + element)
    scales_bytes = 4 if config.quantization.activations == "fp8_per_token" else 0
    return rows * (columns + scales_bytes)


def _packed_bytes(config: UnifiedConfig) -> int:
    """Returns what copies of matrices in oneDNN's order take, if all linears are plain."""
    hidden, intermediate, query = config.hidden_size, config.intermediate_size, config.query_size
    linears = (
        hidden * (query + 2 * config.key_size),
        query * hidden,
        2 * hidden * intermediate,
        intermediate * hidden,
    )
    matrices = [*config.num_hidden_layers * linears, hidden * config.vocab_size]
    return ELEMENT_BYTES["F32"] * sum(filter(is_packed, matrices))


def _rounding_bytes(config: UnifiedConfig, max_num_tokens: int) -> int:
    """Returns what rounding the activations of a linear takes at most, its result included."""
    kind = config.quantization.activations
    if kind is None:
        return 0
    copies = 12 if kind == "nvfp4" else 4  # in float32
    widest = max(config.hidden_size, config.intermediate_size, config.query_size)
    return 4 * max_num_tokens * (copies * widest + 2 * config.intermediate_size)


def _fused_bytes(
    config: UnifiedConfig, capacity: int, max_batch_size: int, max_draft_len: int
) -> int:
    """Returns what fused engines keep of a step (parts of attention, logits), and what its
    recordings take. What is kept of a row to draw its token is some 20 KB.
    """
    rows = most_rows(max_batch_size, max_draft_len)
    num_parts = rows * config.num_attention_heads * max_parts(capacity)
    part = config.head_size + 2  # sums of values; the highest score, and the sum of weights
    floats = num_parts * part + rows * config.vocab_size
    recorded = graph_bytes(
        config.num_hidden_layers,
        capacity=capacity,
        max_batch_size=max_batch_size,
        max_draft_len=max_draft_len,
        is_parallel=config.parallel is not None,
    )
    return ELEMENT_BYTES["F32"] * floats + recorded


def _prompt_bytes(config: UnifiedConfig, element: int, max_seq_len: int) -> int:
    """Returns what fused engines keep of a launch of prompts, and a matrix in integers unpacked."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, qkv = config.query_size, config.query_size + 2 * config.key_size
    row = 2 * hidden + qkv + 2 * query + intermediate
    largest = 0
    if config.quantization.activations is not None:
        row += max(hidden, query, intermediate)  # rounded
    elif config.format is not None:
        largest = 2 * intermediate * hidden
    return element * (prompt_width_of(max_seq_len) * row + largest)
