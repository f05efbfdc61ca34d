"""Products with a streamed matrix, in Triton's language, whatever its numbers are kept in.

| kind | a matrix [N, C] | what x is rounded to | what a product is multiplied by |
|---|---|---|---|
| plain | the engine's dtype | | |
| fp8 | e4m3 | e4m3, at one scale known beforehand | scale [N] |
| fp8_per_token | e4m3 | e4m3, each row at a scale of its own | scale [N], and the row's |
| int8 | int8 | | scale [N] |
| int4 | two in a byte | | scale [N], or [groups, N] block by block |

x of FP8 is rounded already: by the kernel that makes it where that knows the scale (static FP8
behind attention and MLP), else by round_input of kernels.py, RMSNorm included.

Numbers are multiplied in the dtype that x comes in, which holds those of the matrix: e4m3 comes as
itself for tensor cores that take it, in float16 for others. Sums are float32, scales come after
them. So products are exact; but Hopper adds up those of e4m3, in tiles of 64 columns and 4 warps,
with 14 bits of the greatest of them. It does so for a block of channels at a time here, blocks are
added in float32, and less is lost than bfloat16 loses of the result.

An int4 block of 2 n channels has n bytes: channel i is in the low half of byte i, i + n in the high
half, 8 added to each. So a block is two blocks of plain numbers, without moving any.

A small plain matrix takes less time to arrive than a kernel takes to begin and end, so there the
order of things decides. Its weights are loaded before `begin` and wait in shared memory (held);
and the channels of a block are divided into WAYS, each multiplied by a warp of its own, so that
instructions do not wait for the sums of the one before. The shape of the matrix says how: tiles.py.

Letters are those of kernels.py.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused_sizes import ROWS

KINDS = {"plain": 0, "fp8": 1, "fp8_per_token": 2, "int8": 3, "int4": 4}

PLAIN: tl.constexpr = tl.constexpr(KINDS["plain"])
FP8: tl.constexpr = tl.constexpr(KINDS["fp8"])
FP8_PER_TOKEN: tl.constexpr = tl.constexpr(KINDS["fp8_per_token"])
INT8: tl.constexpr = tl.constexpr(KINDS["int8"])
INT4: tl.constexpr = tl.constexpr(KINDS["int4"])
_NARROW: tl.constexpr = tl.constexpr(ROWS)
_FP8_CHANNELS: tl.constexpr = tl.constexpr(32)


@triton.jit
def weight_block(
    weight_ptr, first_column,
    C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, KIND: tl.constexpr,
    WAYS: tl.constexpr = 1,
):
    """Pointers to the first block of some rows of a matrix: [BLOCK_N, BLOCK_C], of int4 half.

    In ways: [WAYS, BLOCK_N, BLOCK_C / WAYS].
    """
    in_one: tl.constexpr = 2 if KIND == INT4 else 1
    row = C // in_one
    first = weight_ptr + tl.cast(first_column, tl.int64) * row
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C // in_one // WAYS)
    if WAYS > 1:
        way = tl.arange(0, WAYS) * (BLOCK_C // WAYS)
        block = first + way[:, None, None] + n[None, :, None] * row + c[None, None, :]
    else:
        block = first + n[:, None] * row + c[None, :]
    return block


@triton.jit
def held_weights(
    weight_ptr, first_column, first,
    C: tl.constexpr, BLOCK_N: tl.constexpr, HELD: tl.constexpr, WAYS: tl.constexpr,
):
    """HELD channels of some rows of a plain matrix from `first` on: [WAYS, BLOCK_N, HELD / WAYS].

    One way is [BLOCK_N, HELD]. Zeros are added up to a power of 2. Loaded before `begin`, they come
    into the chip while the kernel before this one still runs: the compiler puts them into shared
    memory there and then.
    """
    if HELD > 0:
        each: tl.constexpr = HELD // WAYS
        c = tl.arange(0, triton.next_power_of_2(each))
        way = tl.arange(0, WAYS) * each
        n = tl.arange(0, BLOCK_N)
        start = weight_ptr + tl.cast(first_column, tl.int64) * C + first
        held = tl.load(
            start + way[:, None, None] + n[None, :, None] * C + c[None, None, :],
            mask=(c < each)[None, None, :], other=0.0, eviction_policy="evict_first",
        )
        if WAYS == 1:
            held = held.reshape(held.shape[1], held.shape[2])
    else:
        held = 0
    return held


@triton.jit
def held_inputs(
    x_ptr, first, num_rows,
    C: tl.constexpr, HELD: tl.constexpr, WAYS: tl.constexpr, ROWS: tl.constexpr,
):
    """What held_weights are multiplied by: [WAYS, HELD / WAYS, ROWS], or [HELD, ROWS]."""
    each: tl.constexpr = HELD // WAYS
    c = tl.arange(0, triton.next_power_of_2(each))
    way = tl.arange(0, WAYS) * each
    row = tl.arange(0, ROWS)
    x = tl.load(
        x_ptr + first + way[:, None, None] + row[None, None, :] * C + c[None, :, None],
        mask=(c < each)[None, :, None] & (row < num_rows)[None, None, :], other=0.0,
    )
    if WAYS == 1:
        x = x.reshape(x.shape[1], x.shape[2])
    return x


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
    if PDL and PREFETCH > 0:
        in_one: tl.constexpr = 2 if KIND == INT4 else 1
        line: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        lines: tl.constexpr = PREFETCH // in_one // line if PREFETCH // in_one > line else 1
        row = C // in_one
        n = tl.arange(0, BLOCK_N)
        c = tl.minimum(tl.arange(0, triton.next_power_of_2(lines)), lines - 1) * line
        start = weight_ptr + tl.cast(first_column, tl.int64) * row + first // in_one
        _prefetch(start + n[:, None] * row + c[None, :])


@triton.jit
def _rows_block(
    x_ptr, start, num_rows, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    WAYS: tl.constexpr = 1,
):
    """Some channels of all rows, [BLOCK_C, ROWS]; in ways [WAYS, BLOCK_C / WAYS, ROWS]."""
    row = tl.arange(0, ROWS)
    if WAYS > 1:
        way = start + tl.arange(0, WAYS) * (BLOCK_C // WAYS)
        c = tl.arange(0, BLOCK_C // WAYS)
        x = tl.load(
            x_ptr + row[None, None, :] * C + way[:, None, None] + c[None, :, None],
            mask=(row < num_rows)[None, None, :], other=0.0,
        )
    else:
        c = start + tl.arange(0, BLOCK_C)
        x = tl.load(x_ptr + row[None, :] * C + c[:, None], mask=row[None, :] < num_rows, other=0.0)
    return x


@triton.jit
def inputs(
    x_ptr, start, num_rows,
    C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
    WAYS: tl.constexpr = 1,
):
    """What a block of weights is multiplied by: [BLOCK_C, ROWS]; of int4, its two halves."""
    if KIND == INT4:
        half: tl.constexpr = BLOCK_C // 2
        low = _rows_block(x_ptr, start, num_rows, C, half, ROWS)
        high = _rows_block(x_ptr, start + half, num_rows, C, half, ROWS)
    else:
        low = _rows_block(x_ptr, start, num_rows, C, BLOCK_C, ROWS, WAYS)
        high = low
    return low, high


@triton.jit
def unpacked_halves(packed, dtype: tl.constexpr):
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
        low, high = unpacked_halves(weights, x.dtype)
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
    elif x.dtype == tl.float8e4nv:
        if BLOCK_C < _FP8_CHANNELS:  # which no instruction of e4m3 takes
            sums = tl.dot(weights.to(tl.float16), x.to(tl.float16), sums)
        else:
            sums += tl.dot(weights, x, max_num_imprecise_acc=BLOCK_C)
    else:
        sums = tl.dot(weights.to(x.dtype), x, sums, input_precision="ieee")
    return sums


@triton.jit
def no_sums(BLOCK_N: tl.constexpr, ROWS: tl.constexpr, WAYS: tl.constexpr):
    """What products are added to: [BLOCK_N, ROWS], or so much for each way."""
    if WAYS > 1:
        sums = tl.zeros([WAYS, BLOCK_N, ROWS], tl.float32)
    else:
        sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    return sums


@triton.jit
def _pairs(x):
    first, second = tl.split(x)
    return first + second


@triton.jit
def joined(sums, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, WAYS: tl.constexpr):
    """The sum of all ways, [BLOCK_N, ROWS].

    Pair by pair each thread adds numbers that it has, brought to it at once. tl.sum would have
    threads exchange what they added, three times over.
    """
    if WAYS > 1:
        sums = sums.permute(1, 2, 0)
        if WAYS == 8:
            sums = _pairs(sums.reshape(BLOCK_N, ROWS, 4, 2))
        if WAYS >= 4:
            sums = _pairs(sums.reshape(BLOCK_N, ROWS, 2, 2))
        sums = _pairs(sums)
    return sums


@triton.jit
def product(
    x_ptr, weight_ptr, scale_ptr, first_column, first, SIZE: tl.constexpr, num_rows,
    N: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    WAYS: tl.constexpr = 1, held=0, HELD: tl.constexpr = 0,
):
    """W · x over SIZE channels from `first` on, float32 [BLOCK_N, ROWS]; see `column_scales`.

    held  what held_weights brought of the first HELD of them
    """
    in_one: tl.constexpr = 2 if KIND == INT4 else 1
    sums = no_sums(BLOCK_N, ROWS, WAYS)
    if HELD > 0:
        held_x = held_inputs(x_ptr, first, num_rows, C, HELD, WAYS, ROWS)
        sums = tl.dot(held, held_x, sums, input_precision="ieee")
    if HELD < SIZE:
        block = weight_block(weight_ptr, first_column, C, BLOCK_N, BLOCK_C, KIND, WAYS)
        for start in range(first + HELD, first + SIZE, BLOCK_C):
            weights = tl.load(block + start // in_one, eviction_policy="evict_first")
            x, high_x = inputs(x_ptr, start, num_rows, C, BLOCK_C, ROWS, KIND, WAYS)
            sums = add_product(
                sums, weights, x, high_x, scale_ptr, first_column, start,
                N, BLOCK_N, BLOCK_C, GROUP, KIND,
            )
    return joined(sums, BLOCK_N, ROWS, WAYS)


@triton.jit
def column_scales(
    scale_ptr, first_column, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr
):
    """What a product [BLOCK_N, ROWS] is multiplied by, where its loop has not done it.

    They are constant: to be read before the product, and before a kernel waits.
    """
    if KIND == PLAIN or GROUP > 0:
        scales = 1.0
    else:
        scales = tl.load(scale_ptr + first_column + tl.arange(0, BLOCK_N))[:, None]
    return scales


@triton.jit
def sum_in_pairs(x):
    """The sum over the second axis of x [G, N, R], [G, 1, R]: neighbours are added, and again.

    tl.sum adds in an order that follows from where numbers lie, and so from the rest of the tile;
    but two numbers have one sum.
    """
    if x.shape[1] > 1:
        pairs = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2])
        x = sum_in_pairs(tl.sum(pairs, axis=2))
    return x


@triton.jit
def squares_of_rows(
    ptr, num_rows, num_parts, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """What the kernel before left of each row, part by part of its channels: two sums, [2, ROWS].

    ptr is that of the first row, behind which the last part may have fewer than ROWS. Of two parts
    a warp reads all rows at once: each adds up every part, always in the same order, and no warp
    waits for another.
    """
    row = tl.arange(0, ROWS)[None, :]
    squares = tl.zeros([2, ROWS], tl.float32)
    for first in tl.static_range(0, PARTS, 2):
        part = first + tl.arange(0, 2)[:, None]
        is_there = (part < num_parts) & (row < num_rows)
        squares += tl.load(ptr + part * WIDTH + row, mask=is_there, other=0.0)
    return squares


@triton.jit
def inverse_length(squares, epsilon, C: tl.constexpr):
    """What RMSNorm multiplies each row by, [1, ROWS]; squares [2, ROWS].

    Flat in between, or the compiler lets the whole product lie as these few numbers do.
    """
    ROWS: tl.constexpr = squares.shape[1]
    total = tl.sum(squares.reshape(2, 1, ROWS), axis=0).reshape(ROWS)
    return tl.rsqrt(total / C + epsilon)[None, :]


@triton.jit
def unnormed(
    squares_ptr, row_scales_ptr, num_rows, num_parts,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):
    """What `normed` has to know of each row, to be read before the product.

    Squares [2, ROWS]. A wide launch has had measure_rows before it, as those of all its rows would
    fill the registers, and takes scales [1, ROWS], as of rounded rows, whose RMSNorm is done.
    """
    if KIND == FP8:
        found = 1.0
    elif KIND == FP8_PER_TOKEN or WIDTH > _NARROW:
        row = tl.arange(0, ROWS)
        found = tl.load(row_scales_ptr + row, mask=row < num_rows, other=0.0)[None, :]
    else:
        found = squares_of_rows(squares_ptr, num_rows, num_parts, PARTS, ROWS, WIDTH)
    return found


@triton.jit
def normed(
    sums, found, epsilon, C: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr
):
    """A product [BLOCK_N, ROWS] of x as it is → that of x with its RMSNorm; found: `unnormed`."""
    # Triton knows nothing of `in`.
    if KIND == FP8 or KIND == FP8_PER_TOKEN or WIDTH > _NARROW:  # noqa: SIM109
        sums *= found
    else:
        sums *= inverse_length(found, epsilon, C)
    return sums


@triton.jit
def as_input(x, gain, input_scale, dtype: tl.constexpr, HAS_GAIN: tl.constexpr, KIND: tl.constexpr):
    """Float32 x as a linear of some kind takes it: times its gain, and rounded if it can be.

    Numbers beyond ±448 become that.
    """
    if HAS_GAIN:
        x = x.to(dtype).to(tl.float32) * gain.to(tl.float32)
    if KIND == FP8:
        x = (x.to(dtype).to(tl.float32) * (1.0 / input_scale)).to(tl.float8e4nv)
    return x
