"""What tests of kernels share: inputs, launches, and plain references in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from specpipe.runtimes.torch.fused.products import KINDS
from specpipe.runtimes.torch.fused_sizes import ROWS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter has no matrix product in bfloat16.
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
EPSILON = 1e-5
PAGE = 16
PLAIN = KINDS["plain"]
UNUSED = torch.full((1,), torch.nan, device=DEVICE)
"""For what a kernel is given only with quantized weights: test_quantized.py."""


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """What must be written before it is read."""
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())


def launch(kernel: object, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    pdl = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    options = {"launch_pdl": True} if pdl else {}
    kernel[grid](*arguments, **constants, PDL=pdl, **options)  # type: ignore[index]


def squares_of(hidden: Tensor, num_parts: int, width: int = ROWS) -> Tensor:
    """The sums of squares that go with hidden states [R, C], [parts, width]."""
    blocks = hidden.float().square().unflatten(1, (num_parts, -1)).sum(-1)
    out = torch.zeros(num_parts, width, device=DEVICE)
    out[:, : len(hidden)] = blocks.t()
    return out


def normed(hidden: Tensor, gain: Tensor) -> Tensor:
    hidden = hidden.double()
    length = (hidden.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    return hidden / length * gain.double()


def turned(x: Tensor, rotations: Tensor) -> Tensor:
    """Pairs of channels [..., D] turned by rotations [..., D / 2, 2]."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    turns = torch.view_as_complex(rotations.double().contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)
