"""Matrices in oneDNN's own order, for forwards of several rows on a CPU in float32.

MKL brings a matrix into its order anew at every product of four rows or more: one of [256, 4096]
then takes 3.6 times as long with 5 rows as with one, and 1.5 times as long where it is in oneDNN's
order already (EPYC with AVX-512, one thread, torch 2.13). That is what verifying draft tokens and
drafting in parallel cost. With one row MKL reads the matrix as it is, and is the faster.

In oneDNN's products a row's bits do not depend on how many rows there are, as they do in MKL's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specpipe.runtimes.torch.kernel_choice import is_packed

_TYPICAL_ROWS = 16
"""What the order is chosen for; it is the same for 5 to 64 rows of the matrices of small models."""


def packed(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor] | None:
    """Returns x [T, in] → x · W + b of a weight [in, out] and a bias [out], for T > 1.

    None where that is not worth the room, or this torch cannot. The operators are those that
    torch.compile writes into frozen graphs, torch/_inductor/fx_passes/mkldnn_fusion.py of 2.13.
    """
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    if not is_plain or not is_packed(weight.numel()) or not _is_supported():
        return None
    matrix = torch.ops.mkldnn._reorder_linear_weight(weight.t(), _TYPICAL_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise

    def product(x: Tensor) -> Tensor:
        result: Tensor = multiply(x, matrix, bias, "none", [], "")
        return result

    return product


def _is_supported() -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in names
    )
