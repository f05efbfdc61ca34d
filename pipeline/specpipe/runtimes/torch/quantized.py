"""Linears with quantized weights, as the target kernels compute them; the emulation is exact.

Activations are rounded as each format does it, products are added up in float32, and the result is
rounded to the engine's dtype. The weights are as quantized_layout.py stores them. A linear that a
kernel of torch multiplies gives the same but for the order of the sum: kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from specpipe.checkpoints.formats import E4M3_MAX, FORMATS
from specpipe.checkpoints.quantized_rules import is_quantized
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.quantization import numbers
from specpipe.runtimes.torch.kernels import kernel_linear, kernel_of

Multiply = Callable[[Tensor, Tensor], object]
"""(x [T, in], out [T, out]): writes x · W + b to `out`."""

Round = Callable[[Tensor], Tensor]
"""Activations [T, in] in float32 → the numbers, scales included, that a kernel multiplies by."""


_UNIFIED_LINEARS = {
    "qkv": "attention.qkv",
    "dense": "attention.dense",
    "mlp_in": "mlp.fc",
    "mlp_fc": "mlp.fc",
    "mlp_gate": "mlp.gate",
    "mlp_out": "mlp.proj",
}
"""The linears of a layer in an engine, and in the unified config."""


def linear_formats(config: UnifiedConfig) -> dict[str, str]:
    """Returns the format of every quantized linear of a unified config, by its engine's name."""
    name = config.format
    if name is None:
        return {}
    modules = {
        f"layers.{n}.{linear}": f"transformer.layers.{n}.{module}"
        for n in range(config.num_hidden_layers)
        for linear, module in _UNIFIED_LINEARS.items()
    }
    modules["head"] = "lm_head"
    return {linear: name for linear, module in modules.items() if is_quantized(config, module)}


def quantized_linear(name: str, weights: Mapping[str, Tensor], linear: str) -> Multiply | None:
    """Returns how the engine's `linear` of format `name` multiplies; None: as a plain one."""
    if kernel_of(weights, linear) is not None:
        return kernel_linear(weights, linear)
    round_ = _rounding(name, weights.get(f"{linear}.input_scale"))
    if round_ is None and f"{linear}.prequant" not in weights:
        return None
    return _Emulated(weights, linear, round_)


def in_checkpoint_order(multiply: Multiply, group_size: int, head_size: int) -> Multiply:
    """Returns a linear for `dense`, whose inputs stand in the checkpoint's order of heads.

    What it is given has heads in the order (G, H_kv): model.py.
    """

    def write(x: Tensor, out: Tensor) -> None:
        heads = x.unflatten(-1, (group_size, -1, head_size))
        multiply(heads.transpose(-3, -2).flatten(-3), out)

    return write


def round_to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Returns float32: the FP8 numbers nearest to x / scale, times the scale."""
    return numbers.dequantize_rows(numbers.quantize_fp8(x, scale), scale)


def _rounding(name: str, input_scale: Tensor | None) -> Round | None:
    """Returns what a format does to activations; None where they stay as they are."""
    kind = FORMATS[name].activations
    if kind is None:
        return None
    if kind == "fp8_per_token":
        return lambda x: round_to_fp8(x, numbers.row_scales(x, E4M3_MAX))
    assert input_scale is not None
    if kind == "fp8":
        return partial(round_to_fp8, scale=input_scale)
    return partial(_round_to_int8 if kind == "int8" else _round_to_nvfp4, scale=input_scale)


def _round_to_int8(x: Tensor, scale: Tensor) -> Tensor:
    return numbers.dequantize_rows(numbers.quantize_int8(x, scale), scale)


def _round_to_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    """Rounds blocks of 16 channels, each with an FP8 scale of its own under the layer's `scale`."""
    block_scales = numbers.nvfp4_block_scales(x, scale)
    return numbers.dequantize_nvfp4(
        numbers.quantize_nvfp4(x, block_scales, scale), block_scales, scale
    )


class _Emulated:
    """A dequantized weight [in, out]; in float32 where activations are rounded."""

    def __init__(self, weights: Mapping[str, Tensor], linear: str, round_: Round | None) -> None:
        self._weight = weights[f"{linear}.weight"]
        bias = weights.get(f"{linear}.bias")
        self._bias = None if bias is None else bias.to(self._weight.dtype)
        self._prequant = weights.get(f"{linear}.prequant")
        self._round = round_

    def __call__(self, x: Tensor, out: Tensor) -> None:
        if self._prequant is not None:
            x = x * self._prequant
        if self._round is not None:
            x = self._round(x.float())
        if self._bias is None:
            out.copy_(torch.mm(x, self._weight))
        else:
            out.copy_(torch.addmm(self._bias, x, self._weight))
