"""Quantized linears of an engine: what is stored of each, and in which order.

Where a kernel of torch multiplies (kernel_choice.py), the weight stays quantized:

| kernel | weight | weight_scale |
|---|---|---|
| fp8 | [out, in] F8_E4M3 | [1] or [out] F32 |
| int8 | [out, in] I8 | [out], in the engine's dtype |
| int4 | [out, in / 2] U8: + 8, two columns in a byte, the first high | [out, groups], likewise |

With zero points there is also a `weight_zero` [out, groups], added to number times scale.

Otherwise it is emulated, and stored dequantized, [in, out] as a plain one: in float32 where
activations are rounded too, because kernels add up exact products and the engine's dtype may not
hold the factors; else in the engine's dtype, to which kernels of weight-only formats dequantize
too. Beside either are

| input_scale | [1] F32 | activation_scaling_factor |
| prequant | [in], in the engine's dtype | prequant_scaling_factor |

Channels are moved as those of plain weights are, after dequantizing; scales of outputs, and
prequant, with them. One exception: the inputs of `dense` where `keeps_input_order`.

mlp.fc and mlp.gate are joined as those of plain weights, unless they treat their input in two ways:
with different scales, or one of them is not quantized. Then they are `mlp_fc` and `mlp_gate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specpipe.checkpoints.unified_config import DTYPES
from specpipe.runtimes.torch.kernel_choice import Kernel, keeps_input_order
from specpipe.runtimes.torch.quantized_source import QuantizedSource


@dataclass(frozen=True)
class Entry:
    """One tensor of the engine's file, which `make` reads and computes.

    dtype  as safetensors spells it; what `make` gives is rounded to it. F8_E4M3 comes as bits.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class Arrangement:
    """How `move` changes the order of a weight's channels: its inputs or its outputs.

    It takes the weight as [in, out], or a vector of the channels that it moves.
    """

    move: Callable[[Tensor], Tensor]
    moves_inputs: bool

    def weight(self, weight: Tensor) -> Tensor:
        """Moves and transposes [out, in]; returns [in, out]."""
        return self.move(weight.t())

    def inputs(self, x: Tensor) -> Tensor:
        """Moves [in]."""
        return self.move(x) if self.moves_inputs else x

    def outputs(self, x: Tensor) -> Tensor:
        """Moves [out], or the rows of [out, …]; leaves [1] alone."""
        return x if self.moves_inputs or len(x) == 1 else self.move(x.movedim(0, -1)).movedim(-1, 0)


_STORED_CODES: Mapping[Kernel, tuple[str, int]] = {
    "fp8": ("F8_E4M3", 1),
    "int8": ("I8", 1),
    "int4": ("U8", 2),
}
"""The dtype of a kernel's weight, as safetensors spells it, and how many numbers share a byte."""

_AS_IT_IS = Arrangement(lambda x: x, moves_inputs=True)


def quantized_entries(
    source: QuantizedSource, linear: str, modules: tuple[str, ...], arrangement: Arrangement
) -> Iterator[Entry]:
    """Yields the tensors of the engine's `linear`, joined along outputs from modules alike."""
    rows, columns = source.size(modules)
    dtype = DTYPES[source.dtype]
    kernel = source.kernel_of(modules)
    if linear.endswith(".dense") and keeps_input_order(source.config.format, kernel):
        arrangement = _AS_IT_IS
    if kernel is None:
        yield Entry(
            f"{linear}.weight",
            "F32" if source.rounds_activations else dtype,
            (columns, rows),
            lambda: arrangement.weight(source.dequantized(modules)),
        )
    else:
        stored, in_a_byte = _STORED_CODES[kernel]
        yield Entry(
            f"{linear}.weight",
            stored,
            (rows, columns // in_a_byte),
            lambda: packed_codes(kernel, arrangement.weight(source.codes(modules)).t()),
        )
        yield Entry(
            f"{linear}.weight_scale",
            "F32" if kernel == "fp8" else dtype,
            source.scale_shape(modules),
            lambda: arrangement.outputs(source.scales(modules)),
        )
        if source.has_scale(modules, "zero"):
            yield Entry(
                f"{linear}.weight_zero",
                dtype,
                source.scale_shape(modules),
                lambda: arrangement.outputs(source.zeros(modules)),
            )
    if source.has_scale(modules, "activation_scaling_factor"):
        yield Entry(
            f"{linear}.input_scale",
            "F32",
            (1,),
            lambda: source.shared(modules, "activation_scaling_factor"),
        )
    if source.has_scale(modules, "prequant_scaling_factor"):
        yield Entry(
            f"{linear}.prequant",
            dtype,
            (columns,),
            lambda: arrangement.inputs(source.shared(modules, "prequant_scaling_factor")),
        )


def packed_codes(kernel: Kernel, codes: Tensor) -> Tensor:
    """Returns codes [out, in] as the kernel takes them: int4 two in a byte."""
    if kernel != "int4":
        return codes
    shifted = (codes + 8).to(torch.uint8)
    return shifted[:, 0::2] << 4 | shifted[:, 1::2]
