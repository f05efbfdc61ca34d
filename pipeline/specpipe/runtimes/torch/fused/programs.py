"""What all kernels share: how many rows they take, and how one follows another."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = 16
"""Columns of every tile: rows that one launch takes at most."""

UNSPECIALIZED = ("num_rows", "group", "first_row")
"""What the machine code must not depend on."""


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for what the kernel before this one wrote, and lets the next be put on the chip.

    In this order: all that is older than the kernel before was then written when a kernel starts,
    and need not be waited for.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
