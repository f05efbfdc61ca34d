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

from specpipe.checkpoints.formats import E4M3_MAX, INT8_MAX, Content
from specpipe.errors import CheckpointError
from specpipe.quantization import numbers
from specpipe.quantization.scales import Scales
from specpipe.quantization.tensors import TORCH_DTYPES, as_tensor
from specpipe.quantization.unified_rows import UnifiedRows

_CHUNK_BYTES = 1 << 20  # of plain weights that are rounded at a time; their floats stay in a cache

_TOLERANCE = 1.01
"""By this factor weights may exceed what calibration measured: it may have read another dtype."""


@dataclass(frozen=True)
class QuantizedWeights(UnifiedRows):
    """Makes the tensors of a quantized config, from plain weights and what was measured on them."""

    scales: Scales

    @cached_property
    def dtype(self) -> torch.dtype:
        """The checkpoint's own, of the scales that have no other."""
        return TORCH_DTYPES[self.config.plain_dtype]

    @cached_property
    def block_size(self) -> int:
        """How many numbers of a row share a scale, of a format where blocks do."""
        size = self.config.quantization.block_size
        assert size is not None, self.format
        return size

    def kv_cache_scale(self, layer: int) -> Tensor:
        measured = self.scales(f"transformer.layers.{layer}.attention", "kv_amax")
        return torch.from_numpy(measured / np.float32(E4M3_MAX))

    def shared(self, module: str, content: Content) -> Tensor:
        scale = self.format.scale(content)
        assert scale is not None and scale.measured is not None, content
        values = torch.from_numpy(self.scales(module, scale.measured) / np.float32(scale.greatest))
        if scale.dtype is not None:
            return values
        stored = values.to(self.dtype)
        if not bool((stored.isfinite() & (stored > 0)).all()):
            raise CheckpointError(
                f"{module} has a {content} that {self.config.dtype} cannot hold; set dtype to "
                "bfloat16 in config.json"
            )
        return stored

    def of_rows(self, source: str, content: Content, start: int, stop: int) -> Iterator[Tensor]:
        module = self.modules[source]
        num_columns = self.plain.tensors[source].shape[1]
        step = max(2, _CHUNK_BYTES // (num_columns * self.dtype.itemsize) // 2 * 2)
        prequant = None
        if self.format.has_prequant:
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
            values[row : row + len(block)] = as_tensor(block, self.config.plain_dtype)
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
        kind = self.format.weights
        if kind == "e4m3" and self.format.scale("weights_scaling_factor") is not None:
            return numbers.quantize_fp8(rows, self.shared(module, "weights_scaling_factor"))
        if kind == "e4m3":
            scales = numbers.row_scales(rows, E4M3_MAX)
            return scales if is_scale else numbers.quantize_fp8(rows, scales)
        if kind == "int8":
            scales = numbers.row_scales(rows, INT8_MAX)
            return scales if is_scale else numbers.quantize_int8(rows, scales)
        if kind == "e2m1":
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
