"""Tensors of an engine, from Hugging Face ones that are made on its device: no file between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from specpipe.checkpoints.families import EMBEDDING, HEAD
from specpipe.checkpoints.rules import Part
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.checkpoints.unified_layout import part_shape, source_rows, tensor_rules
from specpipe.checkpoints.unified_sections import Quantization
from specpipe.runtimes.torch.layout import arranged, engine_rules
from specpipe.runtimes.torch.model_shape import ModelConfig
from specpipe.runtimes.torch.quantized_source import QuantizedSource

ReadTensor = Callable[[str], "Tensor | None"]

FP8 = Quantization(quant_algo="FP8", exclude_modules=["lm_head"])
"""The `quantization` of a unified config whose layers have their linears in FP8."""

_FP8_MAX = 448.0
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


def engine_tensors(
    config: UnifiedConfig, made: Iterator[tuple[str, Tensor]]
) -> tuple[list[str], ReadTensor]:
    """Returns the names of an engine's tensors (layout.py), and what makes one of them, once."""
    source = UnifiedSource(config, made)
    all_rules = engine_rules(ModelConfig.from_unified(config), cast(QuantizedSource, source))
    rules = {rule.name: rule for rule in all_rules if all(map(source.has, rule.sources))}

    def read(name: str) -> Tensor | None:
        rule = rules.get(name)
        return None if rule is None else arranged(cast(QuantizedSource, source), rule)

    return list(rules), read


def fp8_tensors(config: ModelConfig, read: ReadTensor) -> ReadTensor:
    """Rounds linears to FP8 with one scale for each, stored as quantized_layout.py has it.

    The scales of a linear can be read when its weight was.
    """
    scales: dict[str, Tensor] = {}

    def read_rounded(name: str) -> Tensor | None:
        linear, _, kind = name.rpartition(".")
        if linear not in config.formats:
            return read(name)
        if kind == "weight":
            weight = read(name)
            if weight is None:
                return None
            scales[linear] = (weight.abs().amax().float() / _FP8_MAX).reshape(1)
            return (weight.t().contiguous().float() / scales[linear]).to(torch.float8_e4m3fn)
        if kind == "weight_scale":
            return scales.get(linear)
        if kind == "input_scale" and linear in scales:
            return scales[linear].new_full((1,), _INPUT_MAX / _FP8_MAX)
        return read(name)

    return read_rounded
