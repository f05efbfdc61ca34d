"""What all kernels share: which rows a program takes, and how one kernel follows another."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

UNSPECIALIZED = ("num_rows", "group", "last", "first_row", "first_out", "most")
"""What the machine code must not depend on."""


@triton.jit
def rows_of_program(num_rows, ROWS: tl.constexpr):
    """The first row of a program's tile, and how many of the launch there are from it on."""
    first_row = tl.program_id(2) * ROWS
    return first_row, num_rows - first_row


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for what the kernel before this one wrote, and lets the next be put on the chip.

    In this order: all that is older than the kernel before was then written when a kernel starts,
    and need not be waited for.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def begin_between(PDL: tl.constexpr):
    """`begin` of a kernel so small that the next should call its weights in meanwhile.

    In this order the next may start while the kernel before this one still runs: of that it must
    not read before it waits either. All that is older was written then.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
