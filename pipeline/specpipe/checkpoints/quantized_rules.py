"""The tensors of quantized linears in a unified checkpoint, as rules made from the plain ones.

Suffixes, shapes and splits: TensorRT-LLM's checkpoint format (docs/source/architecture/
checkpoint.md), and what NVIDIA ModelOpt 0.47 writes (modelopt/torch/export/model_config.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from specpipe.checkpoints.formats import Axes, Format, Scale
from specpipe.checkpoints.rules import Part, Split, TensorRule
from specpipe.checkpoints.unified_config import UnifiedConfig

_LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj", "lm_head")
_ATTENTION = "transformer.layers.{n}.attention"


def is_linear(module: str) -> bool:
    """Returns whether a module of the unified checkpoint is one that a format may quantize."""
    return module.endswith(_LINEARS)


def is_quantized(config: UnifiedConfig, module: str) -> bool:
    """Returns whether a unified config has a linear quantized, named as
    `transformer.layers.0.mlp.fc`.

    `exclude_modules` of its `quantization` are patterns of names, as TensorRT-LLM matches them.
    """
    if config.format is None or not is_linear(module):
        return False
    excluded = config.quantization.exclude_modules or ()
    return not any(fnmatchcase(module, pattern) for pattern in excluded)


def shares_embedding(config: UnifiedConfig) -> bool:
    """Returns whether the head is the embedding; a quantized one no longer is."""
    return config.tie_word_embeddings and not is_quantized(config, "lm_head")


def quantized_rules(
    config: UnifiedConfig, rule: TensorRule, layer: int | None
) -> Iterator[TensorRule]:
    """Yields the rules that replace a plain tensor's in a checkpoint of this config."""
    module, _, kind = rule.name.rpartition(".")
    row = config.quantization.row
    if (
        row is None
        or not row.is_stored
        or kind != "weight"
        or not is_quantized(config, module.format(n=layer))
    ):
        yield rule
        return
    parts = tuple(_quantized_part(row, part) for part in rule.parts)
    yield replace(rule, parts=parts, dtype=row.weight_dtype)
    for scale in row.scales:
        parts = tuple(_scale_part(scale, part) for part in rule.parts)
        if scale.is_shared:
            parts = parts[:1]
        yield replace(rule, name=f"{module}.{scale.content}", parts=parts, dtype=scale.dtype)


def kv_cache_rule(config: UnifiedConfig) -> TensorRule | None:
    """Returns the rule of a layer's KV cache scale; None where the cache is not quantized."""
    if config.quantization.kv_cache_quant_algo is None:
        return None
    part = Part(_ATTENTION, ("1",), content="kv_cache_scaling_factor")
    return TensorRule(f"{_ATTENTION}.kv_cache_scaling_factor", (part,), dtype="F32")


def _quantized_part(row: Format, part: Part) -> Part:
    rows, columns = part.shape
    if row.packs == "out":
        rows = f"{rows}/2"
    elif row.packs == "in":
        columns = f"{columns}/2"
    return replace(part, shape=(rows, columns), content="quantized")


def _scale_part(scale: Scale, part: Part) -> Part:
    rows, columns = part.shape
    shapes: dict[Axes, tuple[str, ...]] = {
        "one": ("1",),
        "out": (rows,),
        "in": (columns,),
        "blocks": (rows, f"{columns}/block"),
    }
    return replace(
        part, shape=shapes[scale.axes], split=_scale_split(scale.axes, part), content=scale.content
    )


def _scale_split(axes: Axes, part: Part) -> Split:
    """Returns how a scale is divided over the ranks of its weight."""
    if axes == "blocks":
        return part.split
    if axes == "out":
        return "none" if part.split == "columns" else part.split
    return "rows" if axes == "in" and part.split == "columns" else "none"
