"""torch's CUDA kernels for quantized weights; what they must agree with is in quantized.py.

Weights and scales are as quantized_layout.py stores them; which kernel fits is decided in
kernel_choice.py. Layouts: PyTorch 2.11, aten/src/ATen/native/cuda/ScaledBlas.cpp, int8mm.cu and
int4mm.cu.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specpipe.checkpoints.formats import E4M3_MAX
from specpipe.checkpoints.unified_sections import Quantization
from specpipe.quantization import numbers
from specpipe.runtimes.torch.kernel_choice import Kernel, kernel_for

_OPERATORS: Mapping[Kernel, str] = {
    "fp8": "aten::_scaled_mm",
    "int8": "aten::_weight_int8pack_mm",
    "int4": "aten::_weight_int4pack_mm",
}
_STORED: Mapping[torch.dtype, Kernel] = {
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
    torch.uint8: "int4",
}
_MAX_INT8_ROWS = 8
"""torch's int8 kernel reads the whole weight for every row; converting it first costs 5 bytes a
number, once."""


def usable_kernel(quantization: Quantization) -> Kernel | None:
    """Returns the kernel for a format that this GPU and this torch have; None for none."""
    if quantization.format is None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    kernel = kernel_for(quantization, 10 * major + minor)
    if kernel is None:
        return None
    # The one for int8 came after torch 2.6.
    is_there = torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATORS[kernel], "CUDA")
    return kernel if is_there else None


def kernel_of(weights: Mapping[str, Tensor], linear: str) -> Kernel | None:
    """Returns the kernel that the engine's `linear` is stored for; None where it is emulated."""
    return _STORED.get(weights[f"{linear}.weight"].dtype)


def kernel_linear(weights: Mapping[str, Tensor], linear: str) -> _KernelLinear:
    """Returns the engine's `linear`, which `kernel_of` has a kernel for."""
    kernel = kernel_of(weights, linear)
    assert kernel is not None
    kinds = {"fp8": _FP8Linear, "int8": _Int8Linear, "int4": _Int4Linear}
    return kinds[kernel](weights, linear)


class _KernelLinear:
    """A weight [out, in] that stays quantized."""

    def __init__(self, weights: Mapping[str, Tensor], linear: str) -> None:
        self._weight = weights[f"{linear}.weight"]
        self._scale = weights[f"{linear}.weight_scale"]
        self._bias = weights.get(f"{linear}.bias")
        self._prequant = weights.get(f"{linear}.prequant")
        self._input_scale = weights.get(f"{linear}.input_scale")

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes x · W + b to `out`."""
        if self._prequant is not None:
            x = x * self._prequant
        out.copy_(self._multiply(x.contiguous()))
        if self._bias is not None:
            out.add_(self._bias)

    def _multiply(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _FP8Linear(_KernelLinear):
    """One scale for all activations, known beforehand, or one for each row, taken from it."""

    def __init__(self, weights: Mapping[str, Tensor], linear: str) -> None:
        super().__init__(weights, linear)
        if self._input_scale is None:
            self._scale = self._scale.unsqueeze(0)  # [1, out] to go with [T, 1]

    def _multiply(self, x: Tensor) -> Tensor:
        if self._input_scale is None:
            scale = numbers.row_scales(x, E4M3_MAX)
            codes, scale = numbers.quantize_fp8(x, scale), scale.unsqueeze(1)
        else:
            scale = self._input_scale
            codes = numbers.quantize_fp8(x, scale)
        return torch._scaled_mm(
            codes, self._weight.t(), scale_a=scale, scale_b=self._scale, out_dtype=x.dtype
        )


class _Int8Linear(_KernelLinear):
    def _multiply(self, x: Tensor) -> Tensor:
        if len(x) <= _MAX_INT8_ROWS:
            return torch._weight_int8pack_mm(x, self._weight, self._scale)
        return torch.mm(x, self._weight.to(x.dtype).t()).mul_(self._scale)


class _Int4Linear(_KernelLinear):
    def __init__(self, weights: Mapping[str, Tensor], linear: str) -> None:
        super().__init__(weights, linear)
        num_inputs = 2 * self._weight.shape[1]
        self._group_size = num_inputs // self._scale.shape[1]
        # As many tiles of 16 inputs as can be loaded together.
        inner_tiles = next(n for n in (8, 4, 2) if num_inputs % (16 * n) == 0)
        self._weight = torch._convert_weight_to_int4pack(self._weight, inner_tiles)
        # (number - 8) · scale + zero: [groups, out, 2]
        zero = weights.get(f"{linear}.weight_zero", torch.zeros_like(self._scale))
        self._scale = torch.stack([self._scale.t(), zero.t()], dim=-1).contiguous()

    def _multiply(self, x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm(x, self._weight, self._group_size, self._scale)
