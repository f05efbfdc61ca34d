"""Quantized weights as `write_unified` asks for them, wherever their numbers come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from specpipe.checkpoints.checkpoint import RawArray
from specpipe.checkpoints.formats import Content, Format
from specpipe.checkpoints.plain_weights import PlainWeights
from specpipe.checkpoints.rules import Part
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.checkpoints.unified_layout import part_shape, source_rows
from specpipe.quantization.quantized_config import plain_parts, quantized_linears
from specpipe.quantization.tensors import as_raw


@dataclass(frozen=True)
class UnifiedRows(ABC):
    """Gives the tensors of a quantized config.

    plain   what stays plain of them
    config  the unified config, with its quantization
    """

    plain: PlainWeights
    config: UnifiedConfig

    @cached_property
    def format(self) -> Format:
        row = self.config.quantization.row
        assert row is not None
        return row

    @cached_property
    def modules(self) -> dict[str, str]:
        """The unified linear that each quantized Hugging Face weight belongs to."""
        return {
            part.source.format(n=layer): module
            for module, rule, layer in quantized_linears(self.config)
            for part in rule.parts
        }

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
            yield as_raw(self.kv_cache_scale(layer))
            return
        source = part.source.format(n=layer)
        scale = self.format.scale(part.content)
        if scale is not None and scale.is_shared:
            yield as_raw(self.shared(self.modules[source], part.content)[start:stop])
            return
        plain = self._plain_parts[part.source, part.before]
        rows_each = part_shape(self.config, plain)[0] // part_shape(self.config, part)[0]
        first = source_rows(self.config, plain)[1]
        start, stop = first + start * rows_each, first + stop * rows_each
        for block in self.of_rows(source, part.content, start, stop):
            yield as_raw(block)

    @abstractmethod
    def kv_cache_scale(self, layer: int) -> Tensor:
        """Returns the scale [1] of a layer's keys and values."""

    @abstractmethod
    def shared(self, module: str, content: Content) -> Tensor:
        """Returns a scale that all rows of a linear share, in the dtype that it is stored in."""

    @abstractmethod
    def of_rows(self, source: str, content: Content, start: int, stop: int) -> Iterator[Tensor]:
        """Yields what there is of some rows of a Hugging Face weight, an even number at a time.

        content  `quantized`, or a scale that is not shared
        """
