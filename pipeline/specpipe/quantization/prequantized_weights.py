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

from specpipe.checkpoints.checkpoint import HFCheckpoint, RawArray, brief, open_checkpoint
from specpipe.checkpoints.formats import FORMATS, Content, Scale
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.plain_weights import PlainWeights, config_of, match_weights
from specpipe.checkpoints.quantized_rules import is_linear
from specpipe.checkpoints.rules import Part
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
    read_small,
)
from specpipe.quantization.quantized_config import (
    check_sizes,
    plain_parts,
    quantized_linears,
)
from specpipe.quantization.weights import raw_array

_KV_SCALES = (
    KV_SCALES,
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
)
"""Where the scales of keys and values stand: ModelOpt, two versions of compressed-tensors."""


@dataclass(frozen=True)
class PrequantizedWeights:
    """A folder that others quantized, as `write_unified` reads it.

    config   the unified config, with its quantization
    linears  the quantized ones, by Hugging Face's names of the weights that they stand for
    """

    plain: PlainWeights
    config: UnifiedConfig
    format: str
    linears: Mapping[str, StoredLinear]
    kv_scales: Mapping[int, Tensor]

    @cached_property
    def _sources(self) -> dict[str, tuple[str, ...]]:
        """The Hugging Face weights of each unified linear."""
        return {
            module: tuple(dict.fromkeys(part.source.format(n=layer) for part in rule.parts))
            for module, rule, layer in quantized_linears(self.config)
        }

    @cached_property
    def _modules(self) -> dict[str, str]:
        return {source: module for module, sources in self._sources.items() for source in sources}

    @cached_property
    def _plain_parts(self) -> dict[tuple[str, tuple[str, ...]], Part]:
        return plain_parts(self.config)

    def rows(self, part: Part, layer: int | None, start: int, stop: int) -> Iterator[RawArray]:
        """Yields rows of a part in `stored_dtype`, as `write_unified` asks for them."""
        if part.content == "plain":
            yield from self.plain.rows(part, layer, start, stop)
            return
        if part.content == "kv_cache_scaling_factor":
            assert layer is not None
            yield raw_array(self.kv_scales[layer])
            return
        source = part.source.format(n=layer)
        scale = next((s for s in FORMATS[self.format].scales if s.content == part.content), None)
        if scale is not None and scale.axes in ("one", "in"):
            yield raw_array(self._shared(self._modules[source], scale)[start:stop])
            return
        plain = self._plain_parts[part.source, part.before]
        rows_each = part_shape(self.config, plain)[0] // part_shape(self.config, part)[0]
        first = source_rows(self.config, plain)[1]
        start, stop = first + start * rows_each, first + stop * rows_each
        again = self._rounds_again(source) if part.content == "quantized" else None
        for block in self.linears[source].rows(part.content, start, stop):
            yield raw_array(block if again is None else again(block))

    def _shared(self, module: str, scale: Scale) -> Tensor:
        """Returns a scale that the parts of a fused linear share: the greatest, or the only one."""
        scales = [self.linears[source].shared(scale.content) for source in self._sources[module]]
        if scale.content in ("activation_scaling_factor", "weights_scaling_factor"):
            return torch.stack(scales).amax(0)
        if not all(torch.equal(own, scales[0]) for own in scales):
            raise CheckpointError(
                f"{self.plain.folder}: {brief(self._sources[module])} have different "
                f"{SUFFIXES[scale.content]}s, but are one linear in the engine; {CURE}"
            )
        return scales[0]

    def _rounds_again(self, source: str) -> Callable[[Tensor], Tensor] | None:
        """Returns what brings fp8 numbers to the scale of all parts; None where they have it."""
        if self.format != "fp8":
            return None
        content: Content = "weights_scaling_factor"
        mine = self.linears[source].shared(content)
        common = self._shared(self._modules[source], Scale(content, "one"))
        if torch.equal(mine, common):
            return None
        return lambda rows: numbers.quantize_fp8(numbers.dequantize_fp8(rows, mine), common)


def open_prequantized(
    checkpoint: Path,
    scheme: Prequantized,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    limits: FileLimits = FILE_LIMITS,
) -> PrequantizedWeights:
    """Opens a quantized folder; refuses all that can be refused before its weights are read.

    scheme  what `read_prequantized` returned for it
    """
    source = open_checkpoint(checkpoint, allow_quantized=True, limits=limits)
    plain = config_of(source, scheme.hf_config, tp_size=tp_size, pp_size=pp_size, limits=limits)
    excluded = _plain_linears(source, plain, scheme)
    config = plain.quantized(scheme.quantization(excluded))
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
    used_names = {name for linear in linears.values() for name in linear.names}
    used_names |= kv_names | set(_empty_biases(source, config, linears))
    weights = match_weights(source, config, used_names)
    return PrequantizedWeights(weights, config, scheme.format, linears, kv_scales)


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
