"""Reads quantized linears of a unified checkpoint: dequantized, or as the kernels take them.

Weights are whole in memory only in the form that is asked for; the rest is done in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specpipe.checkpoints.formats import Content, Format
from specpipe.checkpoints.quantized_rules import is_quantized
from specpipe.checkpoints.unified import UnifiedCheckpoint
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.quantization import numbers
from specpipe.quantization.tensors import as_tensor
from specpipe.runtimes.torch.kernel_choice import Kernel, fits, int4_group_size

_ROWS = 1024  # that are dequantized at a time; an even number, as two of int4 share their bytes

TensorsByContent = Mapping[Content, Tensor]
"""Rows of a linear's weight, under "quantized" (also one still plain), and their scales."""


@dataclass(frozen=True)
class QuantizedSource:
    """A checkpoint, whose linears may be quantized, and what an engine makes of these.

    dtype   what the engine computes in
    kernel  what multiplies by a quantized weight, where it fits; None: all are emulated

    Linears are named as in the unified config. Methods that take several give them joined along
    their outputs; these must be `are_alike`.
    """

    checkpoint: UnifiedCheckpoint
    dtype: str
    kernel: Kernel | None

    @property
    def config(self) -> UnifiedConfig:
        return self.checkpoint.config

    @cached_property
    def _made(self) -> Format:
        assert self.config.quantization.row is not None
        return self.config.quantization.row

    @cached_property
    def _shared_scale(self) -> Content | None:
        """The one scale of all numbers of a weight as kernels multiply by it; None: rows have
        theirs."""
        return next(
            (
                scale.content
                for scale in self._made.scales
                if scale.axes == "one" and scale.content.startswith("weights_")
            ),
            None,
        )

    @property
    def rounds_activations(self) -> bool:
        return self._made.activations is not None

    def are_alike(self, *modules: str) -> bool:
        """Says whether linears of one input treat it alike, and so can be one."""
        return len({self._treatment(module) for module in modules}) == 1

    def size(self, modules: tuple[str, ...]) -> tuple[int, int]:
        """Returns the number of outputs and of inputs."""
        sizes = [self._size(module) for module in modules]
        return sum(rows for rows, _ in sizes), sizes[0][1]

    def kernel_of(self, modules: tuple[str, ...]) -> Kernel | None:
        """Returns the kernel that multiplies by these; None where they are emulated."""
        for module in modules:
            if not is_quantized(self.config, module) or not fits(
                self.kernel, self.config.quantization, self.dtype, *self._size(module)
            ):
                return None
        return self.kernel

    def dequantized(self, modules: tuple[str, ...]) -> Tensor:
        """Returns the weight [out, in] with which the target kernels multiply."""
        dtype = torch.float32 if self.rounds_activations else getattr(torch, self.dtype)
        return _joined([self._by_rows(module, self._dequantized, dtype) for module in modules])

    def codes(self, modules: tuple[str, ...]) -> Tensor:
        """Returns the weight [out, in] as kernels multiply by it: bits of FP8, or integers."""
        make, dtype = self._integers, torch.int8
        if self.kernel == "fp8":
            make, dtype = self._fp8_bits, torch.uint8
        return _joined([self._by_rows(module, make, dtype) for module in modules])

    def scale_shape(self, modules: tuple[str, ...]) -> tuple[int, ...]:
        """Returns the shape of `scales`."""
        rows, columns = self.size(modules)
        if self.kernel == "int4":
            return rows, columns // int4_group_size(self.config.quantization, columns)
        return (rows,) if self._shared_scale is None else (1,)

    def scales(self, modules: tuple[str, ...]) -> Tensor:
        """Returns what `codes` are multiplied by: [1], [out] or [out, groups]."""
        if self._shared_scale is not None:
            return self.shared(modules, self._shared_scale)
        scales = _joined([self._scales(module) for module in modules])
        shape = self.scale_shape(modules)
        return scales.reshape(len(scales), -1).expand(-1, shape[1]) if len(shape) > 1 else scales

    def zeros(self, modules: tuple[str, ...]) -> Tensor:
        """Returns what is added to the product of `codes` and `scales`, of a format with `zero`."""
        return _joined([self.read(f"{module}.zero") for module in modules])

    def has_scale(self, modules: tuple[str, ...], content: Content) -> bool:
        """Says whether these have such a scale."""
        return self._made.scale(content) is not None and is_quantized(self.config, modules[0])

    def shared(self, modules: tuple[str, ...], content: Content) -> Tensor:
        """Returns a scale that these have alike."""
        return self.read(f"{modules[0]}.{content}")

    def read(self, name: str) -> Tensor:
        """Reads a tensor as it is."""
        raw = self.checkpoint.tensor(name)
        return as_tensor(raw.data, raw.dtype)

    def _size(self, module: str) -> tuple[int, int]:
        rows, columns = self.checkpoint.shape(f"{module}.weight")
        if is_quantized(self.config, module):
            rows *= 2 if self._made.packs == "out" else 1
            columns *= 2 if self._made.packs == "in" else 1
        return rows, columns

    def _treatment(self, module: str) -> tuple[Any, ...]:
        """Describes what becomes of a linear's input, by values; empty where nothing does."""
        if not is_quantized(self.config, module):
            return ()
        kernel = self.kernel_of((module,))
        if kernel is None and not self.rounds_activations and not self._made.has_prequant:
            return ()
        contents = ["activation_scaling_factor", "prequant_scaling_factor"]
        if kernel == "fp8" and self._shared_scale is not None:
            contents.append(self._shared_scale)
        scales = [
            self.checkpoint.tensor(f"{module}.{scale.content}").data.tobytes()
            for scale in self._made.scales
            if scale.content in contents
        ]
        return (kernel, *scales)

    def _by_rows(
        self, module: str, make: Callable[[TensorsByContent], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Returns what `make` gives for the rows of a linear, block by block, as `dtype`."""
        weight = self.read(f"{module}.weight")
        if not is_quantized(self.config, module):
            return weight.to(dtype)
        made = torch.empty(self._size(module), dtype=dtype)
        for start, tensors in self._blocks(module, weight):
            rows = make(tensors)
            made[start : start + len(rows)] = rows
        return made

    def _blocks(self, module: str, weight: Tensor) -> Iterator[tuple[int, TensorsByContent]]:
        packed = 2 if self._made.packs == "out" else 1
        scales = {
            scale.content: self.read(f"{module}.{scale.content}") for scale in self._made.scales
        }
        shared = {scale.content for scale in self._made.scales if scale.is_shared}
        for start in range(0, self._size(module)[0], _ROWS):
            rows = slice(start, start + _ROWS)
            tensors: dict[Content, Tensor] = {
                content: scale if content in shared else scale[rows]
                for content, scale in scales.items()
            }
            tensors["quantized"] = weight[start // packed : (start + _ROWS) // packed]
            yield start, tensors

    def _scales(self, module: str) -> Tensor:
        """Returns the scales of one linear's `codes`, as they are stored or the builder's own."""
        if not self._made.is_stored:
            return self._built_scales(self.read(f"{module}.weight"))
        content = next(scale.content for scale in self._made.scales if not scale.is_shared)
        return self.read(f"{module}.{content}")

    def _built_scales(self, weight: Tensor) -> Tensor:
        return numbers.row_scales(weight, 2.0 ** (self._made.bits - 1)).to(weight.dtype)

    def _dequantized(self, tensors: TensorsByContent) -> Tensor:
        assert self.config.format is not None
        return numbers.dequantize(self.config.format, tensors)

    def _fp8_bits(self, tensors: TensorsByContent) -> Tensor:
        weight = tensors["quantized"]
        if self._made.weights == "int4":
            values = numbers.dequantize_int4(weight, tensors["weights_scaling_factor"])
            weight = numbers.quantize_fp8(values, tensors["weights_scaling_factor_2"])
        return weight.view(torch.uint8)

    def _integers(self, tensors: TensorsByContent) -> Tensor:
        weight = tensors["quantized"]
        if self._made.is_stored:
            return numbers.unpack_rows(weight)
        quotients = self._dequantized(tensors) / self._built_scales(weight).float().unsqueeze(-1)
        return numbers.to_int(quotients, self._made.bits)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
