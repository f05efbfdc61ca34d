"""Tensors of an engine, from Hugging Face ones that are made on its device: no file between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, cast

import torch
from torch import Tensor

from specpipe.checkpoints.families import EMBEDDING, HEAD
from specpipe.checkpoints.formats import AWQ_BLOCK_SIZES, E4M3_MAX
from specpipe.checkpoints.rules import Part
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.checkpoints.unified_layout import part_shape, source_rows, tensor_rules
from specpipe.checkpoints.unified_sections import UNQUANTIZED
from specpipe.config.sections import QuantizationConfig
from specpipe.quantization import numbers
from specpipe.quantization.quantized_config import quantized_config
from specpipe.runtimes.torch.kernel_choice import keeps_input_order, kernel_for
from specpipe.runtimes.torch.layout import arranged, engine_rules
from specpipe.runtimes.torch.model_shape import ModelConfig
from specpipe.runtimes.torch.quantized_layout import packed_codes
from specpipe.runtimes.torch.quantized_source import QuantizedSource

ReadTensor = Callable[[str], "Tensor | None"]
RoundedFormat = Literal["fp8", "int4_awq"]
"""Formats of linears that are made here, rounded to nearest: nothing is calibrated."""

_SM = 90  # of a GPU that has kernels for all of them
_INPUT_MAX = 20.0  # of normalized hidden states; nothing that is timed depends on it


class UnifiedSource:
    """Tensors of a unified checkpoint, of Hugging Face ones that are made in the order of layers.

    Each is read once. What comes before the one that is asked for is kept until it is read.
    """

    def __init__(self, config: UnifiedConfig, made: Iterator[tuple[str, Tensor]]) -> None:
        """config  of the unified checkpoint"""
        self._is_tied = config.tie_word_embeddings
        self._parts = {
            rule.name.format(n=layer): [(part, part.source.format(n=layer)) for part in rule.parts]
            for rule, layer in tensor_rules(config)
        }
        if self._is_tied:
            del self._parts["transformer.vocab_embedding.weight"]  # the head is it
        self._config = config
        self._made = made
        self._waiting: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        return name in self._parts

    def read(self, name: str) -> Tensor:
        parts = self._parts[name]
        rows = [self._rows(part, self._tensor(source)) for part, source in parts]
        for _, source in parts:
            self._waiting.pop(self._stored(source), None)
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def are_alike(self, *modules: str) -> bool:
        """Linears that are not quantized treat their input alike."""
        return True

    def _stored(self, source: str) -> str:
        return EMBEDDING if source == HEAD and self._is_tied else source

    def _tensor(self, source: str) -> Tensor:
        name = self._stored(source)
        while name not in self._waiting:
            made, tensor = next(self._made)
            self._waiting[made] = tensor
        return self._waiting[name]

    def _rows(self, part: Part, tensor: Tensor) -> Tensor:
        num_rows, start = source_rows(self._config, part)
        assert len(tensor) == num_rows
        return tensor[start : start + part_shape(self._config, part)[0]]


def rounded_config(config: UnifiedConfig, name: RoundedFormat) -> UnifiedConfig:
    """Returns a plain unified config with the linears of its layers in a format.

    Blocks of int4_awq are the largest that divide the inputs of all of them.
    """
    inputs = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads * config.head_size,
    )
    fitting = [size for size in AWQ_BLOCK_SIZES if not any(width % size for width in inputs)]
    block_size = next(iter(fitting), AWQ_BLOCK_SIZES[-1])
    return quantized_config(config, QuantizationConfig(format=name, awq_block_size=block_size))


def engine_tensors(
    config: UnifiedConfig, made: Iterator[tuple[str, Tensor]]
) -> tuple[list[str], ReadTensor]:
    """Returns the names of an engine's plain tensors (layout.py), and what makes one, once.

    config  of the engine; what it has quantized is rounded, and then scales can be read, too
    """
    plain = config.quantized(UNQUANTIZED)
    source = UnifiedSource(plain, made)
    all_rules = engine_rules(ModelConfig.from_unified(plain), cast(QuantizedSource, source))
    rules = {rule.name: rule for rule in all_rules if all(map(source.has, rule.sources))}
    if keeps_input_order(config.format, kernel_for(config.quantization, _SM)):
        for name, rule in rules.items():
            if name.endswith(".dense.weight"):
                rules[name] = replace(rule, arrange=lambda weight: weight)

    def read(name: str) -> Tensor | None:
        rule = rules.get(name)
        return None if rule is None else arranged(cast(QuantizedSource, source), rule)

    return list(rules), _rounded(config, read)


def _rounded(config: UnifiedConfig, read: ReadTensor) -> ReadTensor:
    """Rounds the linears that a config has quantized, stored as quantized_layout.py has them.

    The scales of a linear can be read when its weight was.
    """
    formats = ModelConfig.from_unified(config).formats
    scales: dict[str, Tensor] = {}

    def read_rounded(name: str) -> Tensor | None:
        linear, _, kind = name.rpartition(".")
        if linear not in formats or kind == "bias":
            return read(name)
        if kind != "weight":
            return scales.get(name)
        weight = read(name)
        if weight is None:
            return None
        rows = weight.t().contiguous()
        if formats[linear] == "fp8":
            scale = numbers.row_scales(rows.reshape(1, -1), E4M3_MAX)
            found = {
                "weight_scale": scale,
                "input_scale": scale.new_full((1,), _INPUT_MAX / E4M3_MAX),
            }
            stored = numbers.quantize_fp8(rows, scale)
        else:
            block_size = config.quantization.block_size
            assert block_size is not None
            scale = numbers.block_scales(rows, block_size, rows.dtype)
            # What AWQ searches for takes the time that ones take.
            found = {"weight_scale": scale, "prequant": rows.new_ones(rows.shape[1])}
            codes = numbers.unpack_rows(numbers.quantize_int4(rows, scale))
            stored = packed_codes("int4", codes)
        scales.update({f"{linear}.{of}": each for of, each in found.items()})
        return stored

    return read_rounded
