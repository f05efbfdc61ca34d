"""The quantized weights and scales of a plain Hugging Face checkpoint, made row by row.

What the unified checkpoint and the Hugging Face export hold are these same numbers. A weight is
never whole in memory: its rows are read, divided by the scales and rounded as they are asked for;
the rows of a scale are computed from the same rows a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from specpipe.checkpoints.checkpoint import RawArray, num_elements
from specpipe.checkpoints.formats import E2M1_MAX, E4M3_MAX, FORMATS, Content
from specpipe.checkpoints.plain_weights import PlainWeights
from specpipe.checkpoints.rules import Part
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.checkpoints.unified_layout import part_shape, source_rows
from specpipe.errors import CheckpointError
from specpipe.quantization import numbers
from specpipe.quantization.quantized_config import plain_parts, quantized_linears
from specpipe.quantization.scales import Measured, Scales

_CHUNK_BYTES = 1 << 20  # of plain weights that are rounded at a time; their floats stay in a cache

_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # by bytes of an element

_GREATEST_ACTIVATION = {
    "fp8": E4M3_MAX,
    "w4a8_awq": E4M3_MAX,
    "int8_sq": numbers.INT8_MAX,
    "nvfp4": E2M1_MAX * E4M3_MAX,
}
"""What the greatest activation becomes when it is divided by activation_scaling_factor."""

_TOLERANCE = 1.01
"""By this factor weights may exceed what calibration measured: it may have read another dtype."""


@dataclass(frozen=True)
class QuantizedWeights:
    """Gives the tensors of a quantized config, from plain weights and what was measured on them.

    config  the unified config, with its quantization
    """

    plain: PlainWeights
    config: UnifiedConfig
    scales: Scales

    @cached_property
    def format(self) -> str:
        name = self.config.format
        assert name is not None
        return name

    @cached_property
    def dtype(self) -> torch.dtype:
        """The checkpoint's own, of the scales that have no other."""
        return _TORCH[self.config.dtype]

    @cached_property
    def block_size(self) -> int:
        """How many numbers of a row share a scale, of a format where blocks do."""
        size = self.config.quantization.block_size
        assert size is not None, self.format
        return size

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
        source = part.source.format(n=layer)
        if part.content == "kv_cache_scaling_factor":
            yield raw_array(self.kv_cache_scale(source))
            return
        module = self.modules[source]
        if self.is_shared(part.content):
            yield raw_array(self.shared(module, part.content)[start:stop])
            return
        plain = self._plain_parts[part.source, part.before]
        rows_each = part_shape(self.config, plain)[0] // part_shape(self.config, part)[0]
        first = source_rows(self.config, plain)[1]
        for block in self.of_rows(
            source, part.content, first + start * rows_each, first + stop * rows_each
        ):
            yield raw_array(block)

    def kv_cache_scale(self, attention: str) -> Tensor:
        """Returns the scale [1] of a layer's keys and values."""
        return torch.from_numpy(self.scales(attention, "kv_amax") / np.float32(E4M3_MAX))

    def is_shared(self, content: Content) -> bool:
        """Returns whether all rows of a linear share a scale: it is [1] or [in]."""
        return any(
            scale.content == content and scale.axes in ("one", "in")
            for scale in FORMATS[self.format].scales
        )

    def shared(self, module: str, content: Content) -> Tensor:
        """Returns a scale that all rows of a linear share, in the dtype that it is stored in."""
        if content == "prequant_scaling_factor":
            stored = torch.from_numpy(self.scales(module, "prequant")).to(self.dtype)
            if not bool((stored.isfinite() & (stored > 0)).all()):
                raise CheckpointError(
                    f"{module} has a prequant_scaling_factor that {self.config.dtype} cannot "
                    "hold; set dtype to bfloat16 in config.json"
                )
            return stored
        measured: Measured
        if content == "activation_scaling_factor":
            measured, greatest = "input_amax", _GREATEST_ACTIVATION[self.format]
        elif content == "weights_scaling_factor":  # fp8
            measured, greatest = "weight_amax", E4M3_MAX
        elif self.format == "nvfp4":
            measured, greatest = "weight_amax", E2M1_MAX * E4M3_MAX
        else:  # w4a8_awq
            measured, greatest = "weight_amax_2", E4M3_MAX
        return torch.from_numpy(self.scales(module, measured) / np.float32(greatest))

    def of_rows(self, source: str, content: Content, start: int, stop: int) -> Iterator[Tensor]:
        """Yields what is made of some rows of a Hugging Face weight, an even number at a time.

        content  `quantized`, or a scale that is not shared
        """
        module = self.modules[source]
        num_columns = self.plain.tensors[source].shape[1]
        step = max(2, _CHUNK_BYTES // (num_columns * self.dtype.itemsize) // 2 * 2)
        prequant = None
        if any(scale.axes == "in" for scale in FORMATS[self.format].scales):
            prequant = self.shared(module, "prequant_scaling_factor").float()
        for row in range(start, stop, step):
            values = self.read(source, row, min(step, stop - row))
            self._check(source, module, values)
            if prequant is not None:
                values /= prequant
            yield self._round(module, content, values)

    def read(self, source: str, start: int, count: int) -> Tensor:
        """Returns rows of a Hugging Face tensor in float32."""
        values = torch.empty((count, *self.plain.tensors[source].shape[1:]), dtype=torch.float32)
        row = 0
        for block in self.plain.blocks(source, start, count):
            signed = block.view(block.dtype.str.replace("u", "i"))
            values[row : row + len(block)] = torch.from_numpy(signed).view(self.dtype)
            row += len(block)
        return values

    def _check(self, source: str, module: str, values: Tensor) -> None:
        least, most = torch.aminmax(values)
        greatest = max(-float(least), float(most))
        if (module, "weight_amax") in self.scales.values:
            measured = float(self.scales(module, "weight_amax")[0])
            if greatest > measured * _TOLERANCE:
                raise CheckpointError(
                    f"{self.plain.folder}: {source} holds {greatest:.6g}, but the greatest weight "
                    f"of {module} was {measured:.6g} when its scales were measured: they are those "
                    "of another checkpoint; calibrate again"
                )

    def _round(self, module: str, content: Content, rows: Tensor) -> Tensor:
        """Returns the quantized rows, or their scales; prequant has been divided out."""
        is_scale = content != "quantized"
        if self.format == "fp8":
            return numbers.quantize_fp8(rows, self.shared(module, "weights_scaling_factor"))
        if self.format == "fp8_pc_pt":
            scales = numbers.row_scales(rows, E4M3_MAX)
            return scales if is_scale else numbers.quantize_fp8(rows, scales)
        if self.format == "int8_sq":
            scales = numbers.row_scales(rows, numbers.INT8_MAX)
            return scales if is_scale else numbers.quantize_int8(rows, scales)
        if self.format == "nvfp4":
            scale_2 = self.shared(module, "weights_scaling_factor_2")
            scales = numbers.nvfp4_block_scales(rows, scale_2)
            return scales if is_scale else numbers.quantize_nvfp4(rows, scales, scale_2)
        scales = numbers.block_scales(rows, self.block_size, self.dtype)
        if not bool(scales.isfinite().all()):
            raise CheckpointError(
                f"{module} has weights too great for scales in {self.config.dtype}; set dtype "
                "to bfloat16 in config.json"
            )
        return scales if is_scale else numbers.quantize_int4(rows, scales)


def raw_array(tensor: Tensor) -> RawArray:
    """Returns a tensor's elements as unsigned integers of their width."""
    itemsize = tensor.dtype.itemsize
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[itemsize]
    array: RawArray = tensor.contiguous().view(signed).numpy().view(_UNSIGNED[itemsize])
    assert array.size == num_elements(tensor.shape)
    return array
