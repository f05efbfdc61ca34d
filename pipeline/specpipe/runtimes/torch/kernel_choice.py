"""Which kernel of torch multiplies by a quantized weight; importing this imports no torch.

A linear that no kernel fits is emulated: its weight is dequantized when the engine is built
(quantized_layout.py), its activations are rounded at every call (quantized.py). So is every linear
on a CPU and in float32, where exactness counts.

fp8   torch._scaled_mm, with one scale for the weight or one per output
int8  torch._weight_int8pack_mm
int4  torch._weight_int4pack_mm

Restrictions: PyTorch 2.11, aten/src/ATen/native/cuda/ScaledBlas.cpp, int8mm.cu and int4mm.cu.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from specpipe.checkpoints.formats import FORMATS
from specpipe.checkpoints.unified_sections import Quantization

Kernel = Literal["fp8", "int8", "int4"]

_KERNELS: Mapping[str, Kernel] = {
    "fp8": "fp8",
    "fp8_pc_pt": "fp8",
    "w4a8_awq": "fp8",  # its weights are rounded to FP8, at one scale
    "int8_wo": "int8",
    "int4_wo": "int4",
    "int4_awq": "int4",
    "int4_gptq": "int4",
}
"""Those of formats; a format that is not here is emulated."""
_MIN_SM: Mapping[Kernel, int] = {"fp8": 89, "int8": 80, "int4": 80}

_LEAST_PACKED, _MOST_PACKED = 1 << 17, 1 << 25
"""Numbers of a matrix: smaller ones gain nothing; of greater ones a copy takes too much memory."""

GROUP_SIZES = (256, 128, 64, 32)
"""How many numbers along `in` can share a scale in kernel int4."""


def kernel_for(quantization: Quantization, sm: int | None) -> Kernel | None:
    """Returns the kernel that runs a format on a GPU; None if none does.

    sm  the GPU's compute capability, times 10; None for a CPU
    """
    kernel = _KERNELS.get(quantization.format or "")
    return kernel if kernel is not None and sm is not None and sm >= _MIN_SM[kernel] else None


def is_packed(num_numbers: int) -> bool:
    """Returns whether a plain matrix has a copy in oneDNN's order (packed.py), on a CPU."""
    return _LEAST_PACKED <= num_numbers <= _MOST_PACKED


def fits(
    kernel: Kernel | None, quantization: Quantization, dtype: str, rows: int, columns: int
) -> bool:
    """Returns whether a kernel takes a weight [out, in] of this size and activations of `dtype`."""
    if kernel is None:
        return False
    half = ("bfloat16", "float16")
    if kernel == "int8":
        return dtype in half
    if kernel == "fp8":  # per output, torch's fallback for older cuBLAS writes bfloat16 alone
        dtypes = half[:1] if quantization.activations == "fp8_per_token" else half
        return dtype in dtypes and rows % 16 == columns % 16 == 0
    size = int4_group_size(quantization, columns)
    return dtype == "bfloat16" and rows % 8 == 0 and size in GROUP_SIZES


def int4_group_size(quantization: Quantization, columns: int) -> int:
    """Returns how many numbers of a row share a scale in kernel int4; one it does not know: none.

    Where all of a row share it (int4_wo), it is repeated for groups as large as the kernel takes.
    """
    if quantization.block_size is not None:
        return quantization.block_size
    return next((size for size in GROUP_SIZES if columns % size == 0), 0)


def keeps_input_order(name: str | None, kernel: Kernel | None) -> bool:
    """Returns whether `dense` takes its inputs in the checkpoint's order, not in the engine's.

    It does where blocks of inputs share a scale when they are multiplied.
    """
    return kernel == "int4" or (name is not None and FORMATS[name].activations == "nvfp4")
