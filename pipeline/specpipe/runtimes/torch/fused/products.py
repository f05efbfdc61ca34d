"""Products with a streamed matrix, in Triton's language, whatever its numbers are kept in.

| kind | a matrix [N, C] | what x is rounded to | what a product is multiplied by |
|---|---|---|---|
| plain | the engine's dtype | | |
| fp8 | e4m3 | e4m3, at one scale known beforehand | scale [N] |
| fp8_per_token | e4m3 | e4m3, each row at a scale of its own | scale [N], and the row's |
| int8 | int8 | | scale [N] |
| int4 | two in a byte | | scale [N], or [groups, N] block by block |

Numbers are multiplied as the least dtype of tensor cores that holds them: integers in that of x,
e4m3 in float16. Sums are float32, scales come after them; so every product is exact.

e4m3 needs 1 / length of RMSNorm before the product and not behind it: x is multiplied by `factor`
[1, ROWS] and rounded where it is loaded. Where the kernel before knows the scale (static FP8
behind attention and MLP), it rounds, and x is e4m3 already.

An int4 block of 2 n channels has n bytes: channel i is in the low half of byte i, i + n in the high
half, 8 added to each. So a block is two blocks of plain numbers, without moving any.

Letters are those of kernels.py.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

KINDS = {"plain": 0, "fp8": 1, "fp8_per_token": 2, "int8": 3, "int4": 4}

PLAIN: tl.constexpr = tl.constexpr(KINDS["plain"])
FP8: tl.constexpr = tl.constexpr(KINDS["fp8"])
FP8_PER_TOKEN: tl.constexpr = tl.constexpr(KINDS["fp8_per_token"])
INT8: tl.constexpr = tl.constexpr(KINDS["int8"])
INT4: tl.constexpr = tl.constexpr(KINDS["int4"])
_E4M3_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def weight_block(
    weight_ptr, first_column,
    C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, KIND: tl.constexpr,
):
    """Pointers to the first block of some rows of a matrix: [BLOCK_N, BLOCK_C], of int4 half."""
    in_one: tl.constexpr = 2 if KIND == INT4 else 1
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C // in_one)
    row = C // in_one
    return weight_ptr + tl.cast(first_column, tl.int64) * row + n[:, None] * row + c[None, :]


@triton.jit
def _prefetch(pointers):
    """Calls weights into the L2 cache while the kernel before this one still runs."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_block(
    weight_ptr, first_column, first,
    C: tl.constexpr, BLOCK_N: tl.constexpr, PREFETCH: tl.constexpr, KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Prefetches PREFETCH channels of BLOCK_N rows from `first` on, by lines of 128 bytes."""
    if PDL:
        in_one: tl.constexpr = 2 if KIND == INT4 else 1
        line: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        lines: tl.constexpr = PREFETCH // in_one // line if PREFETCH // in_one > line else 1
        row = C // in_one
        n = tl.arange(0, BLOCK_N)
        c = tl.arange(0, lines) * line
        start = weight_ptr + tl.cast(first_column, tl.int64) * row + first // in_one
        _prefetch(start + n[:, None] * row + c[None, :])


@triton.jit
def _rows_block(
    x_ptr, start, num_rows, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr
):
    """Some channels of all rows, [BLOCK_C, ROWS]."""
    row = tl.arange(0, ROWS)
    c = start + tl.arange(0, BLOCK_C)
    return tl.load(x_ptr + row[None, :] * C + c[:, None], mask=row[None, :] < num_rows, other=0.0)


@triton.jit
def inputs(
    x_ptr, start, num_rows, factor,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
):
    """What a block of weights is multiplied by: [BLOCK_C, ROWS]; of int4, its two halves."""
    if KIND == INT4:
        half: tl.constexpr = BLOCK_C // 2
        low = _rows_block(x_ptr, start, num_rows, C, half, ROWS)
        high = _rows_block(x_ptr, start + half, num_rows, C, half, ROWS)
    else:
        low = _rows_block(x_ptr, start, num_rows, C, BLOCK_C, ROWS)
        if KIND == FP8 or KIND == FP8_PER_TOKEN:  # noqa: SIM109, of which Triton knows nothing
            if low.dtype != tl.float8e4nv:
                low = (low.to(tl.float32) * factor).to(tl.float8e4nv)  # rounds to ±448 at most
            low = low.to(tl.float16)
        high = low
    return low, high


@triton.jit
def _unpacked(packed, dtype: tl.constexpr):
    """The numbers in the low and in the high halves of bytes, less 8, in a dtype."""
    if dtype == tl.bfloat16:
        # 0x4300 and a number below 128 are the bits of 128 plus the number. Written out, since four
        # bytes at a time take a third of the instructions that single ones do.
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, one, less;
            and.b32 low, $4, 0x0F0F0F0F;
            shr.u32 high, $4, 4;
            and.b32 high, high, 0x0F0F0F0F;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC308C308;
            prmt.b32 $0, low, 0x43434343, 0x4140;
            prmt.b32 $1, low, 0x43434343, 0x4342;
            prmt.b32 $2, high, 0x43434343, 0x4140;
            prmt.b32 $3, high, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, $0, one, less;
            fma.rn.bf16x2 $1, $1, one, less;
            fma.rn.bf16x2 $2, $2, one, less;
            fma.rn.bf16x2 $3, $3, one, less;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((packed & 15).to(tl.int8) - 8).to(dtype)
        high = ((packed >> 4).to(tl.int8) - 8).to(dtype)
    return low, high


@triton.jit
def add_product(
    sums, weights, x, high_x, scale_ptr, first_column, start,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr,
):
    """sums [BLOCK_N, ROWS] and the product of a block of weights with `inputs`.

    GROUP  channels that share a scale [groups, N]; 0: all of them do, and scales come later
    """
    if KIND == INT4:
        low, high = _unpacked(weights, x.dtype)
        if GROUP == 0:
            sums = tl.dot(low, x, sums, input_precision="ieee")
            sums = tl.dot(high, high_x, sums, input_precision="ieee")
        else:
            scale = scale_ptr + first_column + tl.arange(0, BLOCK_N)
            part = tl.dot(low, x, input_precision="ieee")
            if GROUP < BLOCK_C:
                sums += part * tl.load(scale + start // GROUP * N)[:, None]
                part = tl.dot(high, high_x, input_precision="ieee")
            else:
                part = tl.dot(high, high_x, part, input_precision="ieee")
            last = (start + BLOCK_C // 2) // GROUP
            sums += part * tl.load(scale + last * N)[:, None]
    else:
        if KIND == INT8:
            weights = weights.to(x.dtype)
        elif weights.dtype == tl.float8e4nv:
            weights = weights.to(tl.float16)
        sums = tl.dot(weights, x, sums, input_precision="ieee")
    return sums


@triton.jit
def product(
    x_ptr, weight_ptr, scale_ptr, factor, first_column, first, stop, num_rows,
    N: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
):
    """W · x over the channels first ... stop, float32 [BLOCK_N, ROWS]; see `scaled`."""
    in_one: tl.constexpr = 2 if KIND == INT4 else 1
    sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    block = weight_block(weight_ptr, first_column, C, BLOCK_N, BLOCK_C, KIND)
    for start in range(first, stop, BLOCK_C):
        weights = tl.load(block + start // in_one, eviction_policy="evict_first")
        x, high_x = inputs(x_ptr, start, num_rows, factor, C, BLOCK_C, ROWS, KIND)
        sums = add_product(
            sums, weights, x, high_x, scale_ptr, first_column, start,
            N, BLOCK_N, BLOCK_C, GROUP, KIND,
        )
    return sums


@triton.jit
def scaled(
    sums, factor, scale_ptr, first_column,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
):
    """A product [BLOCK_N, ROWS] times the scales that no loop applied; what `factor` did undone."""
    if KIND == FP8_PER_TOKEN:
        sums *= 1.0 / factor
    if KIND != PLAIN and GROUP == 0:
        sums *= tl.load(scale_ptr + first_column + tl.arange(0, BLOCK_N))[:, None]
    return sums


@triton.jit
def blocks_of_rows(ptr, num_blocks, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """What the kernel before left of each row, block by block of its channels: [BLOCKS, ROWS]."""
    block = tl.arange(0, BLOCKS)
    place = block[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    return tl.load(ptr + place, mask=block[:, None] < num_blocks, other=0.0)


@triton.jit
def inverse_length(squares, epsilon, C: tl.constexpr):
    """What RMSNorm multiplies each row by, [1, ROWS]; squares [blocks, ROWS]."""
    return tl.rsqrt(tl.sum(squares, axis=0) / C + epsilon)[None, :]


@triton.jit
def peak_factor(peaks):
    """What takes the peak of each row to the greatest of e4m3, [1, ROWS]; peaks [blocks, ROWS]."""
    peak = tl.max(peaks, axis=0)
    return tl.where(peak > 0, _E4M3_MAX / peak, 1.0)[None, :]


@triton.jit
def normed_factor(
    squares, peaks_ptr, num_blocks, input_scale, epsilon,
    C: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
):
    """The factor of x that waits for its RMSNorm; where that is done behind the product, 1.

    A row at a scale of its own is rounded to the same numbers, divided by its length or not.
    """
    if KIND == FP8:
        factor = inverse_length(squares, epsilon, C) / input_scale
    elif KIND == FP8_PER_TOKEN:
        factor = peak_factor(blocks_of_rows(peaks_ptr, num_blocks, BLOCKS, ROWS))
    else:
        factor = 1.0
    return factor


@triton.jit
def normed(
    sums, squares, factor, scale_ptr, first_column, epsilon,
    C: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
):
    """A product with x as it is, [BLOCK_N, ROWS] → the product with its RMSNorm, scales applied."""
    if KIND != FP8:
        sums *= inverse_length(squares, epsilon, C)
    return scaled(sums, factor, scale_ptr, first_column, BLOCK_N, GROUP, KIND)


@triton.jit
def as_input(x, gain, input_scale, dtype: tl.constexpr, HAS_GAIN: tl.constexpr, KIND: tl.constexpr):
    """Float32 x as a linear of some kind takes it: times its gain, and rounded if it can be."""
    if HAS_GAIN:
        x = x.to(dtype).to(tl.float32) * gain.to(tl.float32)
    if KIND == FP8:
        x = (x.to(dtype).to(tl.float32) * (1.0 / input_scale)).to(tl.float8e4nv)
    elif KIND == FP8_PER_TOKEN:
        x = x.to(dtype).to(tl.float32)
    return x
