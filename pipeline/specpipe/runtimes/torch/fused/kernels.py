"""The kernels of a decoder layer for a few rows, in Triton's language.

A decode step moves every weight through the chip once and does little with it, so each kernel is
made to stream one matrix: five of them make a layer.

| kernel | does |
|---|---|
| rotary_linear | RMSNorm, queries, keys and values, rotary embedding, KV cache write |
| attention | queries against the pages of their sequence, split over its length: attention.py |
| add_linear | output projection, or the MLP's, added to the hidden states; readies the next norm |
| gated_linear | RMSNorm, gate and up projections, activation |
| score | RMSNorm, the head, and the best token of each block of the vocabulary |

Linears in FP8 have a small one before them that rounds their input, round_input; in wide launches
others behind a norm have measure_rows, which adds up what RMSNorm must know.

What a row computes must not depend on how many rows there are, or a draft token would change what
the target says: verification would find other tokens than decoding one by one. So each row takes
one column of a tile of ROWS columns; how the sum of a product is divided depends on the matrix
alone, and what attention adds to what on positions alone. Losslessness is then exact in any dtype,
not up to ties.

A launch of WIDTH rows, 16 or some powers of 2 above, is divided among programs by columns, and
where those have no room for all rows by these, too.

Letters beyond style: R rows of a step, C channels of the input (K of the matrix product), N of the
output, G query heads per key-value head, P positions of a page.

RMSNorm is divided between kernels: the one that makes the hidden states multiplies them by the
norm's weights and adds up their squares, block by block; the next multiplies its product by what
follows from the sum. So its loop is that of a plain product.

Matrices are [N, C], so that a program reads whole stretches of memory, and may be quantized:
products.py. The 2 channels that rope turns together stand next to each other, and query heads in
the order (G, H_kv): layout.py.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.attention import list_blocks
from specpipe.runtimes.torch.fused.products import (
    FP8,
    FP8_PER_TOKEN,
    INT4,
    add_product,
    as_input,
    column_scales,
    held_inputs,
    held_weights,
    inputs,
    inverse_length,
    joined,
    no_sums,
    normed,
    prefetch_block,
    product,
    squares_of_rows,
    sum_in_pairs,
    unnormed,
    weight_block,
)
from specpipe.runtimes.torch.fused.programs import (
    UNSPECIALIZED,
    begin,
    begin_between,
    rows_of_program,
)

_E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
_SILU: tl.constexpr = tl.constexpr(0)
_GELU_TANH: tl.constexpr = tl.constexpr(1)
ACTIVATIONS = {"silu": 0, "swiglu": 0, "gelu_pytorch_tanh": 1}


@triton.jit(do_not_specialize=UNSPECIALIZED)
def embed(
    tokens_ptr, positions_ptr, texts_ptr, slots_ptr, table_ptr, gain_ptr, hidden_ptr, scaled_ptr,
    squares_ptr, blocks_ptr, tokens_stride, scale, num_rows, most,
    C: tl.constexpr, BLOCK_C: tl.constexpr, HAS_TEXTS: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """hidden, scaled [R, C] and squares [1, R] of embeddings of tokens; one program a row.

    If there is one more, it lists the blocks of all texts for the attention of every layer.

    tokens  by row; if HAS_TEXTS by position, in the text [tokens_stride] that texts names
    """
    begin(PDL)
    row = tl.program_id(0)
    if row == num_rows:
        list_blocks(blocks_ptr, positions_ptr, slots_ptr, num_rows, most, WIDTH, CHUNK, BLOCK)
        return
    position = tl.load(positions_ptr + row)
    if position < 0:
        return
    place = row
    if HAS_TEXTS:
        place = tl.load(texts_ptr + row) * tokens_stride + position
    token = tl.load(tokens_ptr + place)
    c = tl.arange(0, BLOCK_C)
    squares = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, C, BLOCK_C):
        inside = start + c < C
        x = tl.load(table_ptr + tl.cast(token, tl.int64) * C + start + c, mask=inside, other=0.0)
        x = (x * scale).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + row * C + start + c, x, mask=inside)
        wide = x.to(tl.float32)
        squares += wide * wide
        gain = tl.load(gain_ptr + start + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + row * C + start + c, wide * gain, mask=inside)
    tl.store(squares_ptr + row, tl.sum(squares))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def round_input(
    x_ptr, squares_ptr, out_ptr, row_scales_ptr, num_parts, epsilon, input_scale,
    C: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):
    """out [R, C] = x [R, C], with its RMSNorm if HAS_NORM, rounded to e4m3 for a linear of KIND.

    There is a program for each row. BLOCK_C is C or more.

    row_scales  float32 [R]: what a product of kind fp8_per_token is multiplied by, row by row
    """
    begin_between(PDL)
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK_C)
    x = tl.load(x_ptr + row * C + c, mask=c < C, other=0.0).to(tl.float32)
    length = 1.0
    if HAS_NORM:
        part = tl.arange(0, PARTS)
        squares = tl.load(squares_ptr + part * WIDTH + row, mask=part < num_parts, other=0.0)
        length = tl.sqrt(tl.sum(squares) / C + epsilon)
    if KIND == FP8:
        factor = 1.0 / (length * input_scale)
    else:
        # The row is rounded to the same numbers, divided by its length or not.
        peak = tl.max(tl.abs(x))
        factor = tl.where(peak > 0, _E4M3_MAX / peak, 1.0)
        tl.store(row_scales_ptr + row, 1.0 / (length * factor))
    tl.store(out_ptr + row * C + c, (x * factor).to(tl.float8e4nv), mask=c < C)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def measure_rows(
    squares_ptr, row_scales_ptr, num_rows, num_parts, epsilon,
    C: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """What RMSNorm multiplies each row of a wide launch by, float32 [R]: ROWS rows a program."""
    begin_between(PDL)
    first_row, num_rows = rows_of_program(num_rows, ROWS)
    squares = squares_of_rows(squares_ptr + first_row, num_rows, num_parts, PARTS, ROWS, WIDTH)
    row = tl.arange(0, ROWS)[None, :]
    place = row_scales_ptr + first_row + row
    tl.store(place, inverse_length(squares, epsilon, C), mask=row < num_rows)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def rotary_linear(
    scaled_ptr, squares_ptr, row_scales_ptr, weight_ptr, scale_ptr, bias_ptr, rotations_ptr,
    query_ptr, keys_ptr, values_ptr, pages_ptr, positions_ptr,
    slots_ptr, num_rows, num_parts, pages_stride, epsilon,
    C: tl.constexpr, H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PREFETCH: tl.constexpr, HAS_BIAS: tl.constexpr,
    TURNS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
    WAYS: tl.constexpr = 1, HELD: tl.constexpr = 0,
):
    """Queries to query [R, H · D], keys and values to their pages [pages, H_kv, P, D].

    scaled are hidden states times the norm's weights, or what round_input made of them, with
    row_scales. A program has BLOCK_N channels of one head. Without TURNS all of them go to query
    [R, (H + 2 H_kv) · D] as they are: for models that normalize heads first, see turn_heads.
    """
    first_column = tl.program_id(0) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    first_row, num_rows = rows_of_program(num_rows, ROWS)
    prefetch_block(weight_ptr, first_column, HELD, C, BLOCK_N, PREFETCH, KIND, PDL)
    held = held_weights(weight_ptr, first_column, 0, C, BLOCK_N, HELD, WAYS)
    # The step before, of which the positions are, ended two kernels ago at least.
    position = tl.load(positions_ptr + first_row + row, mask=row < num_rows, other=-1)
    slot = tl.load(slots_ptr + first_row + row, mask=row < num_rows, other=0)
    is_row = position >= 0
    position = tl.maximum(position, 0)
    page = tl.load(pages_ptr + slot * pages_stride + position // PAGE)
    head = first_column // D
    channel = first_column % D
    if TURNS:
        cosine, sine = _rotations(rotations_ptr, position, channel, D, BLOCK_N)
    else:
        cosine, sine = 0.0, 0.0  # for what is behind a return, and compiled all the same
    if HAS_BIAS:
        bias = tl.load(bias_ptr + first_column + n).to(tl.float32)[:, None]
    scales = column_scales(scale_ptr, first_column, BLOCK_N, GROUP, KIND)
    begin(PDL)
    norms = unnormed(
        squares_ptr + first_row, row_scales_ptr + first_row, num_rows, num_parts,
        PARTS, ROWS, WIDTH, KIND,
    )
    x = product(
        scaled_ptr + first_row * C, weight_ptr, scale_ptr, first_column, 0, C, num_rows,
        (H + 2 * H_KV) * D, C, BLOCK_N, BLOCK_C, ROWS, GROUP, KIND, WAYS, held, HELD,
    )
    x = normed(x, norms, epsilon, C, WIDTH, KIND) * scales
    if HAS_BIAS:
        x += bias
    if not TURNS:
        out = query_ptr + (first_row + row)[None, :] * ((H + 2 * H_KV) * D) + first_column
        out += n[:, None]
        tl.store(out, x, mask=row[None, :] < num_rows)
        return
    # The dtype that keys are kept in, before they are turned, as one product after the other has.
    x = x.to(query_ptr.dtype.element_ty).to(tl.float32)
    if head < H + H_KV:
        x = _turned(x, cosine, sine, BLOCK_N, ROWS)
    if head < H:
        out = query_ptr + (first_row + row)[None, :] * (H * D) + first_column + n[:, None]
        tl.store(out, x, mask=is_row[None, :])
    else:
        kv_head = (head - H) % H_KV
        place = (tl.cast(page, tl.int64) * H_KV + kv_head) * PAGE + position % PAGE
        offset = place[None, :] * D + channel + n[:, None]
        if head < H + H_KV:
            tl.store(keys_ptr + offset, x, mask=is_row[None, :])
        else:
            tl.store(values_ptr + offset, x, mask=is_row[None, :])


@triton.jit
def _rotations(rotations_ptr, position, channel, D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cosines and sines [BLOCK_N / 2, ROWS] of the pairs of channels of a head from `channel` on.

    rotations  [positions, D / 2, 2]: cosine and sine of each pair of channels
    """
    pair = channel // 2 + tl.arange(0, BLOCK_N // 2)
    turn = rotations_ptr + position[None, :] * D + 2 * pair[:, None]
    return tl.load(turn), tl.load(turn + 1)


@triton.jit
def _turned(x, cosine, sine, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """Rotary embedding of channels [BLOCK_N, ROWS] of a head."""
    even, odd = tl.split(x.reshape(BLOCK_N // 2, 2, ROWS).permute(0, 2, 1))
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    return turned.permute(0, 2, 1).reshape(BLOCK_N, ROWS)


@triton.jit
def turn_heads(
    qkv_ptr, query_gain_ptr, key_gain_ptr, rotations_ptr,
    query_ptr, keys_ptr, values_ptr, pages_ptr, positions_ptr,
    slots_ptr, pages_stride, epsilon,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):
    """Norm and rotary embedding of each head, and the KV cache write: program (ROWS rows, head)."""
    begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + row)
    if tl.max(position, axis=0) < 0:
        return
    is_row = (position >= 0)[:, None]
    position = tl.maximum(position, 0)
    channel = tl.arange(0, D)[None, :]
    qkv = qkv_ptr + (row * (H + 2 * H_KV) + head)[:, None] * D + channel
    x = tl.load(qkv, mask=is_row, other=0.0).to(tl.float32)
    dtype = query_ptr.dtype.element_ty
    if head < H + H_KV:
        if HAS_NORM:
            x *= tl.rsqrt(tl.sum(x * x, axis=1) / D + epsilon)[:, None]
            if head < H:
                gain = tl.load(query_gain_ptr + channel)
            else:
                gain = tl.load(key_gain_ptr + channel)
            x = (x.to(dtype).to(tl.float32) * gain.to(tl.float32)).to(dtype).to(tl.float32)
        even, odd = tl.split(x.reshape(ROWS, D // 2, 2))
        pair = rotations_ptr + position[:, None] * D + 2 * tl.arange(0, D // 2)[None, :]
        cosine = tl.load(pair)
        sine = tl.load(pair + 1)
        turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
        x = turned.reshape(ROWS, D)
    if head < H:
        tl.store(query_ptr + (row * H + head)[:, None] * D + channel, x, mask=is_row)
    else:
        slot = tl.load(slots_ptr + row)
        page = tl.load(pages_ptr + slot * pages_stride + position // PAGE)
        place = (tl.cast(page, tl.int64) * H_KV + (head - H) % H_KV) * PAGE + position % PAGE
        place = place[:, None] * D + channel
        if head < H + H_KV:
            tl.store(keys_ptr + place, x, mask=is_row)
        else:
            tl.store(values_ptr + place, x, mask=is_row)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def add_linear(
    x_ptr, row_scales_ptr, weight_ptr, scale_ptr, bias_ptr, gain_ptr, hidden_ptr, scaled_ptr,
    squares_ptr, parts_ptr, arrivals_ptr, num_rows,
    N: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    SPLITS: tl.constexpr, SUMMED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PREFETCH: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    PDL: tl.constexpr, WAYS: tl.constexpr = 1, HELD: tl.constexpr = 0,
):
    """hidden [R, N] += x [R, C] · Wᵀ: program (BLOCK_N channels, one of SPLITS parts of C, rows).

    The last part of a block to arrive adds them all up, always in the same order.

    row_scales  those of a rounded x: round_input
    scaled      [R, N]: the new hidden states times the weights of the norm that comes next
    squares     float32 [N / SUMMED, WIDTH]: sums of SUMMED new hidden states' squares
    parts       float32 [SPLITS, WIDTH, N]
    arrivals    [WIDTH / ROWS, N / BLOCK_N]
    """
    first_column = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    first_row, num_rows = rows_of_program(num_rows, ROWS)
    size: tl.constexpr = C // SPLITS
    first = split * size
    prefetch_block(weight_ptr, first_column, first + HELD, C, BLOCK_N, PREFETCH, KIND, PDL)
    held = held_weights(weight_ptr, first_column, first, C, BLOCK_N, HELD, WAYS)
    n = first_column + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    place = (first_row + row)[None, :] * N + n[:, None]
    mask = row[None, :] < num_rows
    # The hidden states were written two kernels ago at least.
    hidden = tl.load(hidden_ptr + place, mask=mask, other=0.0)
    gain = tl.load(gain_ptr + n).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n).to(tl.float32)[:, None]
    scales = column_scales(scale_ptr, first_column, BLOCK_N, GROUP, KIND)
    begin(PDL)
    if KIND == FP8_PER_TOKEN:
        scales *= tl.load(row_scales_ptr + first_row + row)[None, :]
    added = product(
        x_ptr + first_row * C, weight_ptr, scale_ptr, first_column, first, size, num_rows,
        N, C, BLOCK_N, BLOCK_C, ROWS, GROUP, KIND, WAYS, held, HELD,
    )
    if SPLITS > 1:
        part = parts_ptr + place
        tl.store(part + split * (WIDTH * N), added, mask=mask)
        tl.debug_barrier()
        counter = arrivals_ptr + tl.program_id(2) * (N // BLOCK_N) + tl.program_id(0)
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived < SPLITS - 1:
            return
        tl.store(counter, 0)
        added = tl.zeros([BLOCK_N, ROWS], tl.float32)
        for index in tl.static_range(SPLITS):  # their loads are under way together
            added += tl.load(
                part + index * (WIDTH * N), mask=mask, other=0.0, cache_modifier=".cg"
            )
    added *= scales
    if HAS_BIAS:
        added += bias
    dtype = hidden_ptr.dtype.element_ty
    # One rounding for the product, one for the sum, as a matrix product and an addition have.
    hidden = (hidden.to(tl.float32) + added.to(dtype).to(tl.float32)).to(dtype)
    tl.store(hidden_ptr + place, hidden, mask=mask)
    wide = hidden.to(tl.float32)
    tl.store(scaled_ptr + place, wide * gain[:, None], mask=mask)
    in_block: tl.constexpr = BLOCK_N // SUMMED
    squares = sum_in_pairs((wide * wide).reshape(in_block, SUMMED, ROWS)).reshape(in_block, ROWS)
    block = tl.program_id(0) * in_block + tl.arange(0, in_block)
    tl.store(squares_ptr + block[:, None] * WIDTH + first_row + row[None, :], squares)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gated_linear(
    scaled_ptr, squares_ptr, row_scales_ptr, weight_ptr, scale_ptr, bias_ptr, out_gain_ptr, out_ptr,
    num_rows, num_parts, epsilon, out_scale,
    N: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PREFETCH: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_GAIN: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, NEXT: tl.constexpr, PDL: tl.constexpr, WAYS: tl.constexpr = 1,
    HELD: tl.constexpr = 0,
):
    """out [R, N] = activation(x · Wᵀ) · (x · Vᵀ) of the normalized x [R, C]; W over V is [2 N, C].

    scaled and row_scales are those of rotary_linear. out is ready for a linear of kind NEXT.

    out_gain  [N]; its dtype is the engine's, even where it is not read
    """
    first_column = tl.program_id(0) * BLOCK_N
    n = first_column + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    first_row, num_rows = rows_of_program(num_rows, ROWS)
    prefetch_block(weight_ptr, first_column, HELD, C, BLOCK_N, PREFETCH, KIND, PDL)
    prefetch_block(weight_ptr, N + first_column, HELD, C, BLOCK_N, PREFETCH, KIND, PDL)
    fc_held = held_weights(weight_ptr, first_column, 0, C, BLOCK_N, HELD, WAYS)
    gate_held = held_weights(weight_ptr, N + first_column, 0, C, BLOCK_N, HELD, WAYS)
    fc_scales = column_scales(scale_ptr, first_column, BLOCK_N, GROUP, KIND)
    gate_scales = column_scales(scale_ptr, N + first_column, BLOCK_N, GROUP, KIND)
    if HAS_BIAS:
        fc_bias = tl.load(bias_ptr + n).to(tl.float32)[:, None]
        gate_bias = tl.load(bias_ptr + N + n).to(tl.float32)[:, None]
    gain = out_scale
    if HAS_GAIN:
        gain = tl.load(out_gain_ptr + n)[:, None]
    begin(PDL)
    fc = no_sums(BLOCK_N, ROWS, WAYS)
    gate = no_sums(BLOCK_N, ROWS, WAYS)
    norms = unnormed(
        squares_ptr + first_row, row_scales_ptr + first_row, num_rows, num_parts,
        PARTS, ROWS, WIDTH, KIND,
    )
    scaled_ptr += first_row * C
    in_one: tl.constexpr = 2 if KIND == INT4 else 1
    if HELD > 0:
        held_x = held_inputs(scaled_ptr, 0, num_rows, C, HELD, WAYS, ROWS)
        fc = tl.dot(fc_held, held_x, fc, input_precision="ieee")
        gate = tl.dot(gate_held, held_x, gate, input_precision="ieee")
    fc_block = weight_block(weight_ptr, first_column, C, BLOCK_N, BLOCK_C, KIND, WAYS)
    gate_block = weight_block(weight_ptr, N + first_column, C, BLOCK_N, BLOCK_C, KIND, WAYS)
    for start in range(HELD, C, BLOCK_C):
        fc_weights = tl.load(fc_block + start // in_one, eviction_policy="evict_first")
        gate_weights = tl.load(gate_block + start // in_one, eviction_policy="evict_first")
        x, high_x = inputs(scaled_ptr, start, num_rows, C, BLOCK_C, ROWS, KIND, WAYS)
        fc = add_product(
            fc, fc_weights, x, high_x, scale_ptr, first_column, start,
            2 * N, BLOCK_N, BLOCK_C, GROUP, KIND,
        )
        gate = add_product(
            gate, gate_weights, x, high_x, scale_ptr, N + first_column, start,
            2 * N, BLOCK_N, BLOCK_C, GROUP, KIND,
        )
    fc = joined(fc, BLOCK_N, ROWS, WAYS)
    gate = joined(gate, BLOCK_N, ROWS, WAYS)
    fc = normed(fc, norms, epsilon, C, WIDTH, KIND) * fc_scales
    gate = normed(gate, norms, epsilon, C, WIDTH, KIND) * gate_scales
    if HAS_BIAS:
        fc += fc_bias
        gate += gate_bias
    dtype = out_gain_ptr.dtype.element_ty
    out = as_input(activated(fc, gate, dtype, ACTIVATION), gain, out_scale, dtype, HAS_GAIN, NEXT)
    place = (first_row + row)[None, :] * N + n[:, None]
    tl.store(out_ptr + place, out, mask=row[None, :] < num_rows)


@triton.jit
def activated(fc, gate, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """activation(fc) · gate in float32, of numbers of a dtype."""
    fc = fc.to(dtype).to(tl.float32)
    gate = gate.to(dtype).to(tl.float32)
    if ACTIVATION == _SILU:
        fc = fc / (1.0 + tl.exp(-fc))
    else:
        inner = 0.7978845608028654 * (fc + 0.044715 * fc * fc * fc)
        fc = fc * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    return fc.to(dtype).to(tl.float32) * gate
