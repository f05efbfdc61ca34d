"""The kernels of prompts, in Triton's language: many rows of any sequences at once.

| kernel | does |
|---|---|
| unpack | weights in integers, as numbers that are multiplied |
| norm_rows | RMSNorm of each row |
| linear | a product with a matrix; perhaps added to the hidden states |
| gated | gate and up projections, activation |

Between them stand turn_heads of kernels.py and prompt_attention.py.

What a row computes must not depend on the rows beside it, or on how many there are, or a prompt's
keys and values would follow from what else runs: all channels of a product are added one after the
other, whatever a program's tile. Programs beyond num_rows, which stands in memory, end at once, so
that one recorded launch serves fewer rows. Those of the same columns follow each other: all rows
are multiplied by a block of the matrix while it is in the L2 cache.

Letters are those of kernels.py.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.kernels import activated
from specpipe.runtimes.torch.fused.products import (
    FP8_PER_TOKEN,
    INT4,
    add_product,
    as_input,
    column_scales,
    inputs,
    no_sums,
    product,
    unpacked_halves,
    weight_block,
)
from specpipe.runtimes.torch.fused.programs import begin


@triton.jit
def unpack(
    weight_ptr, scale_ptr, out_ptr,
    N: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):
    """out [N, C]: the numbers of a matrix in integers; program (BLOCK_N columns, BLOCK channels).

    BLOCK  channels that are packed together, or if not any number of them
    GROUP  channels that share a scale [C / GROUP, N], with which they are multiplied; 0: none do
    """
    begin(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    first = tl.program_id(1) * BLOCK
    out = out_ptr + tl.cast(n, tl.int64) * C + first
    dtype = out_ptr.dtype.element_ty
    if KIND == INT4:
        half: tl.constexpr = BLOCK // 2
        i = tl.arange(0, half)[None, :]
        packed = weight_ptr + tl.cast(n, tl.int64) * (C // 2) + first // 2 + i
        low, high = unpacked_halves(tl.load(packed, mask=n < N, other=0), dtype)
        if GROUP > 0:
            # No half of a block lies in two groups.
            scale = scale_ptr + n
            of_low = tl.load(scale + first // GROUP * N, mask=n < N, other=0.0)
            of_high = tl.load(scale + (first + half) // GROUP * N, mask=n < N, other=0.0)
            low = low.to(tl.float32) * of_low
            high = high.to(tl.float32) * of_high
        tl.store(out + i, low, mask=n < N)
        tl.store(out + half + i, high, mask=n < N)
    else:
        c = tl.arange(0, BLOCK)[None, :]
        is_there = (n < N) & (first + c < C)
        codes = tl.load(
            weight_ptr + tl.cast(n, tl.int64) * C + first + c, mask=is_there, other=0
        )
        tl.store(out + c, codes.to(dtype), mask=is_there)


@triton.jit
def _tile(num_rows_ptr, ROWS: tl.constexpr):
    """The first row of a program's tile, and how many there are from it on."""
    first_row = tl.program_id(0) * ROWS
    return first_row, tl.load(num_rows_ptr) - first_row


@triton.jit
def norm_rows(
    hidden_ptr, gain_ptr, out_ptr, num_rows_ptr, epsilon, out_scale,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, NEXT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [R, C]: RMSNorm of hidden [R, C], ready for a linear of kind NEXT; ROWS rows a program.

    BLOCK_C is C or more.
    """
    begin(PDL)
    first_row, num_rows = _tile(num_rows_ptr, ROWS)
    if num_rows <= 0:
        return
    row = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    place = (first_row + row) * C + c
    is_there = (row < num_rows) & (c < C)
    x = tl.load(hidden_ptr + place, mask=is_there, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=1) / C + epsilon)[:, None] * gain
    dtype = hidden_ptr.dtype.element_ty
    tl.store(out_ptr + place, as_input(x, 1.0, out_scale, dtype, False, NEXT), mask=is_there)


@triton.jit
def _row_scales(row_scales_ptr, num_rows, ROWS: tl.constexpr, KIND: tl.constexpr):
    """What a product [BLOCK_N, ROWS] is multiplied by, row by row."""
    scales = 1.0
    if KIND == FP8_PER_TOKEN:
        row = tl.arange(0, ROWS)
        scales = tl.load(row_scales_ptr + row, mask=row < num_rows, other=0.0)[None, :]
    return scales


@triton.jit
def linear(
    x_ptr, row_scales_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, num_rows_ptr,
    N: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [R, N] = x [R, C] · Wᵀ, or if ADDS that is added: program (ROWS rows, BLOCK_N columns).

    row_scales  those of a rounded x: round_input
    """
    begin(PDL)
    first_row, num_rows = _tile(num_rows_ptr, ROWS)
    if num_rows <= 0:
        return
    # A last block that has fewer columns overlaps the one before it.
    first_column = tl.minimum(tl.program_id(1) * BLOCK_N, N - BLOCK_N)
    x = product(
        x_ptr + first_row * C, weight_ptr, scale_ptr, first_column, 0, C, num_rows,
        N, C, BLOCK_N, BLOCK_C, ROWS, 0, KIND,
    )
    x *= column_scales(scale_ptr, first_column, BLOCK_N, 0, KIND)
    x *= _row_scales(row_scales_ptr + first_row, num_rows, ROWS, KIND)
    n = first_column + tl.arange(0, BLOCK_N)[:, None]
    if HAS_BIAS:
        x += tl.load(bias_ptr + n).to(tl.float32)
    row = tl.arange(0, ROWS)[None, :]
    out = out_ptr + (first_row + row) * N + n
    mask = row < num_rows
    if ADDS:
        dtype = out_ptr.dtype.element_ty
        # One rounding for the product, one for the sum, as a matrix product and an addition have.
        hidden = tl.load(out, mask=mask, other=0.0).to(tl.float32)
        x = hidden + x.to(dtype).to(tl.float32)
    tl.store(out, x, mask=mask)


@triton.jit
def gated(
    x_ptr, row_scales_ptr, weight_ptr, scale_ptr, bias_ptr, out_gain_ptr, out_ptr, num_rows_ptr,
    out_scale,
    N: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_GAIN: tl.constexpr,
    KIND: tl.constexpr, NEXT: tl.constexpr, PDL: tl.constexpr,
):
    """out [R, N] = activation(x · Wᵀ) · (x · Vᵀ) of x [R, C]; W over V is [2 N, C].

    out_gain, out  as those of gated_linear in kernels.py
    """
    begin(PDL)
    first_row, num_rows = _tile(num_rows_ptr, ROWS)
    if num_rows <= 0:
        return
    first_column = tl.program_id(1) * BLOCK_N
    x_ptr += first_row * C
    fc = no_sums(BLOCK_N, ROWS, 1)
    gate = no_sums(BLOCK_N, ROWS, 1)
    fc_block = weight_block(weight_ptr, first_column, C, BLOCK_N, BLOCK_C, KIND)
    gate_block = weight_block(weight_ptr, N + first_column, C, BLOCK_N, BLOCK_C, KIND)
    for start in range(0, C, BLOCK_C):
        fc_weights = tl.load(fc_block + start)
        gate_weights = tl.load(gate_block + start)
        x, _ = inputs(x_ptr, start, num_rows, C, BLOCK_C, ROWS, KIND)
        fc = add_product(
            fc, fc_weights, x, x, scale_ptr, first_column, start, 2 * N, BLOCK_N, BLOCK_C, 0, KIND
        )
        gate = add_product(
            gate, gate_weights, x, x, scale_ptr, N + first_column, start, 2 * N, BLOCK_N, BLOCK_C,
            0, KIND,
        )
    row_scales = _row_scales(row_scales_ptr + first_row, num_rows, ROWS, KIND)
    fc *= column_scales(scale_ptr, first_column, BLOCK_N, 0, KIND) * row_scales
    gate *= column_scales(scale_ptr, N + first_column, BLOCK_N, 0, KIND) * row_scales
    n = first_column + tl.arange(0, BLOCK_N)[:, None]
    if HAS_BIAS:
        fc += tl.load(bias_ptr + n).to(tl.float32)
        gate += tl.load(bias_ptr + N + n).to(tl.float32)
    gain = out_scale
    if HAS_GAIN:
        gain = tl.load(out_gain_ptr + n)
    dtype = out_gain_ptr.dtype.element_ty
    out = as_input(activated(fc, gate, dtype, ACTIVATION), gain, out_scale, dtype, HAS_GAIN, NEXT)
    row = tl.arange(0, ROWS)[None, :]
    tl.store(out_ptr + (first_row + row) * N + n, out, mask=row < num_rows)
