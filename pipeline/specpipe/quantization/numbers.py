"""The number formats of quantized weights, in torch: rounding, packing, and back.

Pure functions of tensors on any device; they compute in float32. Rows are outputs, columns inputs:
[out, in], or [rows, in] of some of them.

e4m3  FP8 of the OCP standard (OFP8, revision 1.0): 4 bits exponent, 3 mantissa, up to ±448, no
      infinity. Numbers beyond are clamped.
e2m1  FP4 of the OCP Microscaling standard (revision 1.0, section 5.3.3): 0, ½, 1, 1½, 2, 3, 4, 6
      and their negatives; the fourth bit is the sign.
int4  -8 to 7, two in a byte, the first in the low half.

Where a scale would be 0, because all numbers that share it are, it is 1. Scales and packing are
those of NVIDIA ModelOpt 0.47 (modelopt/torch/export/quant_utils.py, quantization/qtensor/), but
every number is rounded once, from float32, where ModelOpt rounds quotients to the weight's dtype
before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from specpipe.checkpoints.formats import E2M1_MAX, E4M3_MAX, FORMATS, Content

INT4_MAX = 7.0
"""The greatest number that a scale is chosen for; the least is one further from 0."""

E4M3_MIN = 2.0**-9
"""The least positive number of e4m3."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code, without the sign


def to_e4m3(values: Tensor) -> Tensor:
    """Rounds to the nearest number of e4m3, ties to even, after clamping to ±448."""
    return values.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def to_int(values: Tensor, bits: Literal[4, 8]) -> Tensor:
    """Rounds to the nearest integer of 4 or 8 bits, ties to even, after clamping; as int8."""
    half = 2 ** (bits - 1)
    return values.float().round().clamp(-half, half - 1).to(torch.int8)


def to_e2m1(values: Tensor) -> Tensor:
    """Rounds to the nearest number of e2m1, ties to even, after clamping; its 4 bits as uint8."""
    size = values.float().abs().clamp_(max=E2M1_MAX)
    # Codes count upwards in steps of ½ to 2, of 1 to 4 and of 2 to 6, and ties go to even codes.
    code = torch.where(
        size < 2,
        (size * 2).round_(),
        torch.where(size < 4, size.round().add_(2), (size / 2).round_().add_(4)),
    )
    return code.to(torch.uint8) | (values < 0).to(torch.uint8) << 3


def from_e2m1(codes: Tensor) -> Tensor:
    """Returns the numbers of e2m1 codes in float32."""
    numbers = torch.tensor((*_E2M1, *(-number for number in _E2M1)), device=codes.device)
    return numbers[codes.long()]


def pack_rows(numbers: Tensor) -> Tensor:
    """Packs int4 numbers [rows, in], as int8, into int8 [rows / 2, in]: rows 2i and 2i + 1."""
    return (numbers[0::2] & 0x0F) | (numbers[1::2] << 4)


def unpack_rows(packed: Tensor) -> Tensor:
    """Returns the int4 numbers [rows, in] of what `pack_rows` made, as int8."""
    packed = packed.view(torch.int8)
    low, high = (packed << 4) >> 4, packed >> 4  # shifting right keeps the sign
    return torch.stack((low, high), 1).flatten(0, 1)


def pack_columns(codes: Tensor) -> Tensor:
    """Packs 4-bit codes [rows, in] into uint8 [rows, in / 2]: columns 2i and 2i + 1."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_columns(packed: Tensor) -> Tensor:
    """Returns the codes [rows, in] of what `pack_columns` made."""
    return torch.stack((packed & 0x0F, packed >> 4), -1).flatten(-2)


def row_scales(rows: Tensor, greatest: float) -> Tensor:
    """Returns scales [rows] with which the greatest number of each row becomes `greatest`."""
    return _no_zero(rows.float().abs().amax(-1) / greatest)


def block_scales(rows: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """Returns the scales [rows, in / block_size] of int4 numbers, rounded to `dtype`."""
    greatest = rows.float().unflatten(-1, (-1, block_size)).abs().amax(-1)
    return _no_zero((greatest / INT4_MAX).to(dtype))


def nvfp4_block_scales(rows: Tensor, scale_2: Tensor, block_size: int = 16) -> Tensor:
    """Returns the scales [rows, in / 16] of e2m1 numbers in e4m3; `scale_2` [1] scales them."""
    greatest = rows.float().unflatten(-1, (-1, block_size)).abs().amax(-1)
    scales = _no_zero(greatest / (E2M1_MAX * scale_2.float()))
    return to_e4m3(scales.clamp(min=E4M3_MIN))


def quantize_fp8(rows: Tensor, scale: Tensor) -> Tensor:
    """Rounds rows / scale to e4m3; scale [1], or [rows] with one for each."""
    return to_e4m3(rows.float() / _for_rows(scale))


def quantize_int8(rows: Tensor, scales: Tensor) -> Tensor:
    """Rounds rows / scales to int8; scales [rows]."""
    return to_int(rows.float() / _for_rows(scales), 8)


def dequantize_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """Returns what `quantize_fp8` or `quantize_int8` rounded to, in float32."""
    return weight.float() * _for_rows(scale)


def quantize_int4(rows: Tensor, scales: Tensor) -> Tensor:
    """Rounds rows / scales to int4 and packs an even number of rows; scales [rows, blocks]."""
    return pack_rows(to_int(rows.float() / _for_blocks(rows.shape[-1], scales), 4))


def dequantize_int4(weight: Tensor, scales: Tensor) -> Tensor:
    """Returns what `quantize_int4` rounded to, in float32."""
    return unpack_rows(weight).float() * _for_blocks(weight.shape[-1], scales)


def quantize_nvfp4(rows: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """Rounds rows / (scales · scale_2) to e2m1 and packs; scales [rows, in / 16], scale_2 [1]."""
    both = scales.float() * scale_2.float()
    return pack_columns(to_e2m1(rows.float() / _for_blocks(rows.shape[-1], both)))


def dequantize_nvfp4(weight: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """Returns what `quantize_nvfp4` rounded to, in float32."""
    numbers = from_e2m1(unpack_columns(weight))
    both = scales.float() * scale_2.float()
    return numbers * _for_blocks(numbers.shape[-1], both)


def weight_only(rows: Tensor, bits: Literal[4, 8], dtype: torch.dtype) -> Tensor:
    """Returns what TensorRT-LLM makes of plain weights for int8_wo and int4_wo, in float32.

    One scale per row, the greatest number / 2^(bits - 1), so that this one is clamped if it is
    positive. Ties are rounded away from 0, and the scale is rounded to `dtype` after the numbers
    were (TensorRT-LLM, kernels/cutlass_kernels/cutlass_preprocessors.cpp, symmetric_quantize).
    ModelOpt divides by 2^(bits - 1) - 1 instead.
    """
    half = 2 ** (bits - 1)
    scales = row_scales(rows, half)
    quotients = rows.float() / _for_rows(scales)
    whole = quotients.trunc()
    is_up = (quotients - whole).abs() >= 0.5
    numbers = torch.where(is_up, whole + quotients.sign(), whole).clamp(-half, half - 1)
    return numbers * _for_rows(scales.to(dtype))


def dequantize(name: str, tensors: Mapping[Content, Tensor]) -> Tensor:
    """Returns the weight [out, in] that a kernel of the format multiplies with, in float32.

    tensors  the linear's weight, quantized or for a builder to quantize, and its scales; what is
             multiplied are the activations after prequant_scaling_factor, which is not divided out
    """
    made, weight = FORMATS[name], tensors["quantized"]
    if not made.is_stored:  # in the checkpoint's dtype, in which TensorRT-LLM builds
        return weight_only(weight, made.bits, weight.dtype)
    scale = tensors[
        "per_channel_scale" if made.scale("per_channel_scale") else "weights_scaling_factor"
    ]
    scale_2 = tensors.get("weights_scaling_factor_2")
    if made.bits == 8:
        return dequantize_rows(weight, scale)
    if made.weights == "e2m1":
        assert scale_2 is not None
        return dequantize_nvfp4(weight, scale, scale_2)
    values = dequantize_int4(weight, scale)
    if "zero" in tensors:
        return values + _for_blocks(values.shape[-1], tensors["zero"])
    if scale_2 is not None:
        return dequantize_rows(quantize_fp8(values, scale_2), scale_2)
    return values


def _no_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _for_rows(scale: Tensor) -> Tensor:
    """Returns a scale [1] or [rows] in the form [rows, 1]."""
    return scale.float().unsqueeze(-1)


def _for_blocks(num_columns: int, scales: Tensor) -> Tensor:
    """Returns scales [rows, blocks] as [rows, in]."""
    return scales.float().repeat_interleave(num_columns // scales.shape[-1], -1)
