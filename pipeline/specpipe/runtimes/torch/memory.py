"""What an engine of the torch runtime needs in memory, from its config alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from specpipe.families import part_shape, tensor_rules
from specpipe.quantization.formats import FORMATS, format_of
from specpipe.quantization.tensors import is_quantized
from specpipe.runtimes.memory import ELEMENT_BYTES, MemoryEstimate, kv_bytes_per_token
from specpipe.runtimes.torch.fused.sizes import (
    LONGEST_RECORDED,
    PAGE,
    ROWS,
    max_parts,
    pages_of,
    spare_positions,
)
from specpipe.runtimes.torch.kernel_choice import Kernel, fits, int4_group_size


def estimate_memory(
    config: Mapping[str, Any],
    *,
    dtype: str,
    max_batch_size: int,
    max_seq_len: int,
    max_draft_len: int,
    max_num_tokens: int,
    on_gpu: bool = False,
    kernel: Kernel | None = None,
) -> MemoryEstimate:
    """Estimates an engine of a unified config; `dtype` is "float32", "bfloat16" or "float16".

    on_gpu  counts what the fused kernels take beside, which run there if they can
    kernel  what multiplies by quantized weights, where it fits
    """
    element = ELEMENT_BYTES[dtype]
    capacity = max_seq_len + max_draft_len + 1
    if on_gpu:
        capacity = PAGE * pages_of(max_seq_len + spare_positions(max_draft_len))
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, head_size = config["hidden_size"], config["head_size"]
    weights_bytes = sum(_weight_bytes(config, dtype, kernel))
    if config["tie_word_embeddings"] and not is_quantized(config, "lm_head"):
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
    num_rows = max_num_tokens
    if on_gpu:
        num_rows += min(max_num_tokens, LONGEST_RECORDED)  # what was recorded has its own
    return MemoryEstimate(
        weights_bytes=weights_bytes,
        kv_cache_bytes=max_batch_size * capacity * kv_bytes_per_token(config, dtype),
        workspace_bytes=element * (2 * num_rows * row + prefill_mask)
        + 4 * (scores + 2 * logits)
        + _rounding_bytes(config, max_num_tokens)
        + (_fused_bytes(config, capacity, max_draft_len) if on_gpu else 0),
    )


def _weight_bytes(config: Mapping[str, Any], dtype: str, kernel: Kernel | None) -> Iterator[int]:
    plain = {**config, "quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}
    for rule, layer in tensor_rules(plain):
        module, _, kind = rule.name.format(n=layer).rpartition(".")
        shapes = [part_shape(config, part) for part in rule.parts]
        if kind == "weight" and is_quantized(config, module):
            rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
            yield _linear_bytes(config, dtype, kernel, rows, columns)
        else:
            is_float32 = rule.parts[0].one_plus
            element = ELEMENT_BYTES["float32" if is_float32 else dtype]
            yield element * sum(prod(shape) for shape in shapes)


def _linear_bytes(
    config: Mapping[str, Any], dtype: str, kernel: Kernel | None, rows: int, columns: int
) -> int:
    """Returns the bytes of a quantized weight and of the scales that are not one for all."""
    if not fits(kernel, config, dtype, rows, columns):
        is_rounded = _activations(config) is not None
        return rows * columns * ELEMENT_BYTES["float32" if is_rounded else dtype]
    if kernel == "int4":  # a scale and a zero point for each group
        groups = columns // int4_group_size(config, columns)
        return rows * (columns // 2 + 2 * groups * ELEMENT_BYTES[dtype])
    if kernel == "int8":
        return rows * (columns + ELEMENT_BYTES[dtype])
    scales_bytes = 4 if format_of(config) == "fp8_pc_pt" else 0
    return rows * (columns + scales_bytes)


def _rounding_bytes(config: Mapping[str, Any], max_num_tokens: int) -> int:
    """Returns what rounding the activations of a linear takes at most, its result included."""
    kind = _activations(config)
    if kind is None:
        return 0
    hidden: int = config["hidden_size"]
    intermediate: int = config["intermediate_size"]
    heads: int = config["num_attention_heads"] * config["head_size"]
    copies = 12 if kind == "nvfp4" else 4  # in float32
    widest = max(hidden, intermediate, heads)
    return 4 * max_num_tokens * (copies * widest + 2 * intermediate)


def _fused_bytes(config: Mapping[str, Any], capacity: int, max_draft_len: int) -> int:
    """Returns what fused engines keep of a round: parts of attention, logits, and what is drawn."""
    num_parts = ROWS * config["num_attention_heads"] * max_parts(capacity)
    part = config["head_size"] + 2  # sums of values; the highest score, and the sum of weights
    vocab_size: int = config["vocab_size"]
    floats = int(num_parts * part) + ROWS * vocab_size
    drawn = 16 * vocab_size  # of each row a key and a mass of every token
    return ELEMENT_BYTES["float32"] * floats + (max_draft_len + 1) * drawn


def _activations(config: Mapping[str, Any]) -> str | None:
    name = format_of(config)
    return None if name is None else FORMATS[name].activations
