"""The weights of checkpoints that others quantized, for the unified checkpoint.

Numbers are not rounded again, but for what an engine that reads such a checkpoint rounds too:

- The unified checkpoint has one scale for all of an fp8 weight. Where q, k and v have different
  ones, they are rounded at the greatest, as TensorRT-LLM and vLLM do.
- Scales of int4 numbers are rounded to the checkpoint's dtype where they have another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from specpipe.checkpoints.checkpoint import HFCheckpoint, brief, open_checkpoint
from specpipe.checkpoints.formats import Content
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.plain_weights import config_of, match_weights
from specpipe.checkpoints.quantized_rules import is_linear
from specpipe.checkpoints.trtllm_build import fit_trtllm_build
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.checkpoints.unified_layout import part_shape, source_rows, tensor_rules
from specpipe.errors import CheckpointError
from specpipe.quantization import numbers
from specpipe.quantization.huggingface import KV_SCALES, SUFFIXES
from specpipe.quantization.prequantized import CURE, Prequantized
from specpipe.quantization.prequantized_linears import (
    PackedLinear,
    ScaledLinear,
    StoredLinear,
    one_number,
)
from specpipe.quantization.quantized_config import (
    check_sizes,
    quantized_linears,
)
from specpipe.quantization.tensors import read_small
from specpipe.quantization.unified_rows import UnifiedRows

_KV_SCALES = (
    KV_SCALES,
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
)
"""Where the scales of keys and values stand: ModelOpt, two versions of compressed-tensors."""


@dataclass(frozen=True)
class PrequantizedWeights(UnifiedRows):
    """A folder that others quantized.

    linears    the quantized ones, by Hugging Face's names of the weights that they stand for
    kv_scales  [1] by layer
    """

    linears: Mapping[str, StoredLinear]
    kv_scales: Mapping[int, Tensor]

    @cached_property
    def _sources(self) -> dict[str, tuple[str, ...]]:
        """The Hugging Face weights of each unified linear."""
        return {
            module: tuple(dict.fromkeys(part.source.format(n=layer) for part in rule.parts))
            for module, rule, layer in quantized_linears(self.config)
        }

    def kv_cache_scale(self, layer: int) -> Tensor:
        return self.kv_scales[layer]

    def shared(self, module: str, content: Content) -> Tensor:
        """Of the parts of a fused linear the greatest, or the only one."""
        scales = [self.linears[source].shared(content) for source in self._sources[module]]
        if content in ("activation_scaling_factor", "weights_scaling_factor"):
            return torch.stack(scales).amax(0)
        if not all(torch.equal(own, scales[0]) for own in scales):
            raise CheckpointError(
                f"{self.plain.folder}: {brief(self._sources[module])} have different "
                f"{SUFFIXES[content]}s, but are one linear in the engine; {CURE}"
            )
        return scales[0]

    def of_rows(self, source: str, content: Content, start: int, stop: int) -> Iterator[Tensor]:
        again = self._rounds_again(source) if content == "quantized" else None
        for block in self.linears[source].rows(content, start, stop):
            yield block if again is None else again(block)

    def _rounds_again(self, source: str) -> Callable[[Tensor], Tensor] | None:
        """Returns what brings fp8 numbers to the scale of all parts; None where they have it."""
        scale = self.format.scale("weights_scaling_factor")
        if scale is None or not scale.is_shared:
            return None
        mine = self.linears[source].shared(scale.content)
        common = self.shared(self.modules[source], scale.content)
        if torch.equal(mine, common):
            return None
        return lambda rows: numbers.quantize_fp8(numbers.dequantize_rows(rows, mine), common)


def open_prequantized(
    checkpoint: Path,
    scheme: Prequantized,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    limits: FileLimits = FILE_LIMITS,
    for_trtllm_build: bool = False,
) -> PrequantizedWeights:
    """Opens a quantized folder; refuses all that can be refused before its weights are read.

    scheme  what `read_prequantized` returned for it
    """
    source = open_checkpoint(checkpoint, allow_quantized=True, limits=limits)
    plain = config_of(source, scheme.hf_config, tp_size=tp_size, pp_size=pp_size, limits=limits)
    excluded = _plain_linears(source, plain, scheme)
    config = plain.quantized(scheme.quantization(excluded))
    if for_trtllm_build:
        config = fit_trtllm_build(config)
    check_sizes(config, cure=f"lower tp_size, or {CURE}")
    make = ScaledLinear if scheme.layout == "scaled" else PackedLinear
    linears: dict[str, StoredLinear] = {}
    for _, rule, layer in quantized_linears(config):
        for part in rule.parts:
            name = part.source.format(n=layer)
            if name not in linears:
                size = source_rows(config, part)[0], part_shape(config, part)[1]
                linears[name] = make(source, scheme, name.removesuffix("weight"), size, config)
    kv_names, kv_scales = _kv_scales(source, config)
    others = {name for linear in linears.values() for name in linear.names}
    others |= kv_names | set(_empty_biases(source, config, linears))
    weights = match_weights(source, config, others)
    return PrequantizedWeights(weights, config, linears, kv_scales)


def _plain_linears(
    source: HFCheckpoint, plain: UnifiedConfig, scheme: Prequantized
) -> tuple[str, ...]:
    """Returns the linears that are not quantized, by what is stored."""
    mark = "weight_scale" if scheme.layout == "scaled" else "qweight"
    excluded, num_linears = [], 0
    for rule, layer in tensor_rules(plain):
        module, _, kind = rule.name.format(n=layer).rpartition(".")
        if kind != "weight" or not is_linear(module):
            continue
        num_linears += 1
        names = {part.source.format(n=layer).removesuffix(".weight") for part in rule.parts}
        quantized = {name for name in names if f"{name}.{mark}" in source.tensors}
        if not quantized:
            excluded.append(module)
        elif quantized != names:
            raise CheckpointError(
                f"{source.folder}: {brief(sorted(quantized))} has a {mark}, but not "
                f"{brief(sorted(names - quantized))}, which is one linear with it in the "
                f"engine; {CURE}"
            )
    if len(excluded) == num_linears:
        raise CheckpointError(
            f"{source.folder} says that it is quantized, but no linear has a {mark}; download it "
            "again"
        )
    return tuple(excluded)


def _empty_biases(
    source: HFCheckpoint, config: UnifiedConfig, linears: Mapping[str, StoredLinear]
) -> Iterator[str]:
    """Yields biases that a family does not have; AutoGPTQ adds some, all of them 0."""
    used = {
        part.source.format(n=layer) for rule, layer in tensor_rules(config) for part in rule.parts
    }
    for weight in linears:
        name = weight.removesuffix("weight") + "bias"
        if name in source.tensors and name not in used:
            if bool(read_small(source.tensors[name]).any()):
                raise CheckpointError(
                    f"{source.folder}: {name} is not 0, but {config.architecture} has no such "
                    f"bias; {CURE}"
                )
            yield name


def _kv_scales(source: HFCheckpoint, config: UnifiedConfig) -> tuple[set[str], dict[int, Tensor]]:
    """Returns the scale [1] of each layer's keys and values, and the names of what was read."""
    used: set[str] = set()
    scales: dict[int, Tensor] = {}
    if config.quantization.kv_cache_quant_algo is None:
        return used, scales
    for layer in range(config.num_hidden_layers):
        pairs = [[f"model.layers.{layer}.{name}" for name in pair] for pair in _KV_SCALES]
        pair = next((p for p in pairs if source.tensors.keys() >= set(p)), None)
        if pair is None:
            raise CheckpointError(
                f"{source.folder} says that its KV cache is quantized, but has no {pairs[0][0]} or "
                f"{pairs[0][1]}; {CURE}"
            )
        scales[layer] = torch.stack([one_number(source, name) for name in pair]).amax(0)
        used.update(pair)
    return used, scales
