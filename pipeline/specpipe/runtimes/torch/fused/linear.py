"""One linear of an engine as the fused kernels read it.

How an engine stores quantized linears is in quantized_layout.py, what their numbers mean here in
products.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["plain", "fp8", "fp8_per_token", "int8", "int4"]

ROUNDED: tuple[Kind, ...] = ("fp8", "fp8_per_token")
"""Kinds whose inputs are rounded to e4m3 before they are multiplied."""

UNPACKED: tuple[Kind, ...] = ("int8", "int4")
"""Kinds whose numbers are made those of the engine's dtype before they are multiplied."""

Read = Callable[[str], "Tensor | None"]
"""Returns a tensor of an engine by name, or None where it has none."""

_MAX_INT4_BLOCK = 256
"""Channels whose numbers are packed together; bytes of a row that are loaded together, twice."""

_STORED: Mapping[torch.dtype, Kind] = {
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
    torch.uint8: "int4",
}


@dataclass(frozen=True)
class Linear:
    """A matrix [N, C], and perhaps a bias [N].

    weight       [N, C]; of int4 [N, C / 2], packed in blocks of `block` channels
    scale        float32 [N], or [groups, N]: what products are multiplied by
    input_scale  of kind fp8: what inputs are divided by and rounded; `scale` makes up for it
    gain         [C]: what inputs are multiplied by before all else
    heads_by_kv  whether its inputs are heads in the order (H_kv, G), and not (G, H_kv)
    """

    weight: Tensor
    bias: Tensor | None
    kind: Kind = "plain"
    scale: Tensor | None = None
    input_scale: float = 1.0
    gain: Tensor | None = None
    heads_by_kv: bool = False
    block: int = 0

    @property
    def num_columns(self) -> int:
        return self.weight.shape[0]

    @property
    def num_channels(self) -> int:
        return self.weight.shape[1] * (2 if self.kind == "int4" else 1)

    @property
    def rounds(self) -> bool:
        """Whether inputs are rounded to e4m3 before they are multiplied."""
        return self.kind in ROUNDED

    @property
    def group(self) -> int:
        """Channels that share a scale of [groups, N]; 0: all do."""
        if self.scale is None or self.scale.dim() == 1:
            return 0
        return self.num_channels // len(self.scale)

    def room(self, x: Tensor, fp8: torch.dtype) -> Tensor:
        """Returns the room for inputs like x: that of rounded ones, if they come so.

        fp8  what rounded numbers are multiplied as
        """
        if self.kind != "fp8":
            return x
        return x.flatten().view(fp8)[: x.numel()].view(x.shape)


def stored_kind(weight: Tensor) -> Kind:
    """Returns what an engine's weight is; of FP8, input scales say which."""
    return _STORED.get(weight.dtype, "plain")


def read_linear(read: Read, name: str, format_name: str | None) -> Linear | None:
    """Returns an engine's linear, quantized in a format; None where it has none of the name."""
    weight, bias = read(f"{name}.weight"), read(f"{name}.bias")
    if weight is None:
        return None
    gain = read(f"{name}.prequant")
    kind = stored_kind(weight)
    if kind == "plain":
        return Linear(weight.t().contiguous(), bias, gain=gain)
    scale = read(f"{name}.weight_scale")
    assert scale is not None
    scale = scale.float()
    if kind == "int4":
        # The engine repeats the one scale of a row for the groups of torch's kernel.
        scale = scale[:, 0].contiguous() if format_name == "int4_wo" else scale.t().contiguous()
        codes = _stored_int4(weight)
        num_channels = codes.shape[1]
        block = int4_block(num_channels, num_channels // len(scale) if scale.dim() == 2 else 0)
        is_dense = name.endswith(".dense")
        return Linear(
            packed(codes, block), bias, kind, scale, gain=gain, heads_by_kv=is_dense, block=block
        )
    input_scale = read(f"{name}.input_scale")
    scale = scale.expand(len(weight)).contiguous()
    if kind == "fp8" and input_scale is None:
        kind = "fp8_per_token"
    if input_scale is None:
        return Linear(weight, bias, kind, scale, gain=gain)
    return Linear(weight, bias, kind, scale * input_scale, input_scale.item(), gain)


def joined(first: Linear, second: Linear) -> Linear:
    """Returns the linear whose outputs are those of the first, then those of the second."""
    assert are_alike(first, second)

    def both(name: str) -> Tensor | None:
        a, b = getattr(first, name), getattr(second, name)
        return None if a is None else torch.cat([a, b], dim=-1)

    weight = torch.cat([first.weight, second.weight])
    return replace(first, weight=weight, bias=both("bias"), scale=both("scale"))


def are_alike(first: Linear, second: Linear) -> bool:
    """Says whether two linears of one input do the same to it, and can be one."""
    facts = [
        (linear.kind, linear.input_scale, linear.group, linear.bias is None, linear.gain is None)
        for linear in (first, second)
    ]
    if facts[0] != facts[1]:
        return False
    if first.gain is None or second.gain is None:
        return True
    return torch.equal(first.gain, second.gain)


def int4_block(num_channels: int, group: int) -> int:
    """Returns how many channels are packed together: a power of 2, no half in two groups."""
    block = min(num_channels & -num_channels, _MAX_INT4_BLOCK)
    return min(block, 2 * group) if group else block


def packed(codes: Tensor, block: int) -> Tensor:
    """Packs int4 numbers [N, C] into bytes [N, C / 2]: products.py."""
    low, high = (codes + 8).to(torch.uint8).unflatten(1, (-1, 2, block // 2)).unbind(2)
    return torch.bitwise_or(low, high << 4).flatten(1)


def _stored_int4(weight: Tensor) -> Tensor:
    """Returns the numbers [N, C] that an engine stores for torch's kernel, as int8."""
    codes = torch.stack([weight >> 4, weight & 15], dim=-1).flatten(1)
    return codes.to(torch.int8) - 8
