"""Bytes of weights and of the KV cache, exactly, from a unified config alone."""

from __future__ import annotations

from specpipe.checkpoints.checkpoint import ELEMENT_BYTES, num_elements
from specpipe.checkpoints.families import HEAD
from specpipe.checkpoints.quantized_rules import is_quantized, shares_embedding
from specpipe.checkpoints.rules import Part, TensorRule
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.checkpoints.unified_layout import (
    part_shape,
    pipeline_layers,
    stored_dtype,
    tensor_rules,
)
from specpipe.checkpoints.unified_sections import ParallelMapping

_BUILT_BITS = {"int8_wo": 8, "int4_wo": 4}
"""Bits of a weight in formats that are stored plain and quantized while an engine is built."""


def weights_bytes(config: UnifiedConfig) -> int:
    """Returns the bytes of a whole model's weights, scales included.

    A head that is the embedding counts once, unless it is quantized. Formats that are quantized
    while the engine is built count as they are then.
    """
    is_tied = shares_embedding(config)
    return sum(
        tensor_bytes(config, rule, layer)
        for rule, layer in tensor_rules(config)
        if not (is_tied and rule.name == HEAD)
    )


def tensor_bytes(
    config: UnifiedConfig, rule: TensorRule, layer: int | None, *, tp_size: int = 1
) -> int:
    """Returns the bytes of a unified tensor on one of `tp_size` ranks."""
    elements = sum(_elements(config, part, tp_size) for part in rule.parts)
    name = config.format
    module, _, kind = rule.name.format(n=layer).rpartition(".")
    if name in _BUILT_BITS and kind == "weight" and is_quantized(config, module):
        outputs = elements // _rank_inputs(config, rule.parts[0], tp_size)
        scales = outputs * ELEMENT_BYTES[config.plain_dtype]
        return elements * _BUILT_BITS[name] // 8 + scales
    return elements * ELEMENT_BYTES[stored_dtype(config, rule)]


def kv_cache_bytes_per_token(
    config: UnifiedConfig, *, tp_size: int = 1, pp_size: int = 1, pp_rank: int = 0
) -> int:
    """Returns the bytes of one token's keys and values on one rank; the first has most layers."""
    split = config.model_copy(update={"mapping": ParallelMapping.of(tp_size, pp_size)})
    num_layers = len(pipeline_layers(split, pp_rank))
    num_kv_heads = -(-config.num_key_value_heads // tp_size)  # fewer heads than ranks: copies
    is_plain = config.quantization.kv_cache_quant_algo is None
    element = ELEMENT_BYTES[config.plain_dtype] if is_plain else 1
    return 2 * num_layers * num_kv_heads * config.head_size * element


def _elements(config: UnifiedConfig, part: Part, tp_size: int) -> int:
    """Returns how many numbers of a part one rank holds."""
    elements = num_elements(part_shape(config, part))
    if part.split == "none":
        return elements
    ranks = min(tp_size, config.num_key_value_heads) if part.split == "kv_heads" else tp_size
    return -(-elements // ranks)


def _rank_inputs(config: UnifiedConfig, part: Part, tp_size: int) -> int:
    columns = part_shape(config, part)[1]
    return columns // tp_size if part.split == "columns" else columns
