"""Attention of rows over the pages of their sequences, in Triton's language.

A text is divided among programs by its length: a short one into chunks of few positions, so that
all of it is read at once, a long one into blocks of several chunks, so that each program reads one
while it computes another and few have to be joined. Of many sequences all are divided into blocks,
and most of their texts are one; nobody knows their lengths when a launch is recorded, so blocks are
listed first, and a fixed number of programs takes them in turns.

What is added to what is the same in every way, chunks to blocks and blocks to the whole, from left
to right: tests show that the bits are.

Letters are those of kernels.py.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.products import as_input
from specpipe.runtimes.torch.fused.programs import UNSPECIALIZED, begin

_FEW_QUERIES, _MANY_QUERIES = 16, 32
"""Of one program of attention: more would be another matrix instruction, with other rounding."""


def queries_of(num_queries: int, head_size: int, element_bytes: int) -> int:
    """Returns how many queries a program of attention takes, of num_queries that see one text.

    What is added to what must not depend on how many there are. More of float32 would be added up
    in another order; and the compiler divides the positions of a chunk among warps if channels of a
    head are more than queries, but else has each warp add up them all.
    """
    is_alike = element_bytes < 4 and head_size > _MANY_QUERIES
    return _MANY_QUERIES if is_alike and num_queries > _FEW_QUERIES else _FEW_QUERIES


@triton.jit
def _prefetch(ptr, num_bytes):
    """Calls bytes, 16 or a multiple, into the L2 cache: one thread says so, and goes on at once."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .b32 thread;
        .reg .pred is_first;
        mov.u32 thread, %tid.x;
        setp.eq.u32 is_first, thread, 0;
        @is_first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [ptr, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _places(
    pages_ptr, slot, pages_stride, seen, last_position, kv_head,
    H_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):
    """Where the keys and values of positions `seen` stand, [positions, D]."""
    page = tl.load(
        pages_ptr + slot * pages_stride + seen // PAGE, mask=seen <= last_position, other=0
    )
    place = (tl.cast(page, tl.int64) * H_KV + kv_head) * PAGE + seen % PAGE
    return place[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def _attended(query, keys, values, seen, position, window, scale):
    """What queries see of a chunk: sums [QUERIES, D] of values, highest scores, sums of weights.

    Multiplications and additions that could be one instruction are: whether a compiler makes them
    one must not depend on what is around.
    """
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")  # [QUERIES, CHUNK]
    is_seen = seen[None, :] <= position[:, None]
    if window > 0:
        is_seen &= seen[None, :] > position[:, None] - window
    highest = tl.max(tl.where(is_seen, scores * scale, -float("inf")), axis=1)
    weights = tl.exp(tl.fma(scores, scale, -highest[:, None]))
    weights = tl.where(is_seen, weights, 0.0)
    sums = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return sums, highest, tl.sum(weights, axis=1)


@triton.jit
def _joined(sums, highest, weight, more_sums, more_highest, more_weight):
    """Two of what `_attended` returns as one; the highest score of nothing is -inf."""
    higher = tl.maximum(highest, more_highest)
    old = tl.where(highest == -float("inf"), 0.0, tl.exp(highest - higher))
    new = tl.where(more_highest == -float("inf"), 0.0, tl.exp(more_highest - higher))
    sums = tl.fma(sums, tl.broadcast_to(old[:, None], sums.shape), more_sums * new[:, None])
    return sums, higher, tl.fma(weight, old, more_weight * new)


@triton.jit
def _nothing(QUERIES: tl.constexpr, D: tl.constexpr):
    """What joins anything without changing it."""
    sums = tl.zeros([QUERIES, D], tl.float32)
    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    return sums, highest, tl.zeros([QUERIES], tl.float32)


@triton.jit
def _attended_chunks(
    query, keys_ptr, values_ptr, pages_ptr, slot, pages_stride, first, stop, kv_head, position,
    last_position, window, scale,
    H_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, QUERIES: tl.constexpr,
):
    """What `_attended` returns of chunks first ... stop, joined from left to right."""
    sums, highest, weight = _nothing(QUERIES, D)
    for chunk in tl.range(first, stop, num_stages=STAGES):
        seen = chunk * CHUNK + tl.arange(0, CHUNK)
        place = _places(pages_ptr, slot, pages_stride, seen, last_position, kv_head, H_KV, D, PAGE)
        is_there = (seen <= last_position)[:, None]
        keys = tl.load(keys_ptr + place, mask=is_there, other=0.0)
        values = tl.load(values_ptr + place, mask=is_there, other=0.0)
        more_sums, more_highest, more_weight = _attended(
            query, keys, values, seen, position, window, scale
        )
        sums, highest, weight = _joined(sums, highest, weight, more_sums, more_highest, more_weight)
    return sums, highest, weight


@triton.jit
def _keep_part(sums_ptr, states_ptr, part, sums, highest, weight, is_query, D: tl.constexpr):
    """Writes a part of each query for whoever joins them."""
    place = part[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(sums_ptr + place, sums, mask=is_query[:, None])
    tl.store(states_ptr + 2 * part, highest, mask=is_query)
    tl.store(states_ptr + 2 * part + 1, weight, mask=is_query)
    tl.debug_barrier()


@triton.jit
def _joined_parts(
    sums_ptr, states_ptr, parts, first, stop, is_query,
    QUERIES: tl.constexpr, D: tl.constexpr, UNROLL: tl.constexpr,
):
    """Parts first ... stop of queries whose first ones are `parts`, from left to right."""
    channel = tl.arange(0, D)
    sums, highest, weight = _nothing(QUERIES, D)
    for start in range(first, stop, UNROLL):
        for step in tl.static_range(UNROLL):  # their loads are under way together
            part = parts + start + step
            is_part = is_query & (start + step < stop)
            more_highest = tl.load(
                states_ptr + 2 * part, mask=is_part, other=-float("inf"), cache_modifier=".cg"
            )
            more_weight = tl.load(
                states_ptr + 2 * part + 1, mask=is_part, other=0.0, cache_modifier=".cg"
            )
            more_sums = tl.load(
                sums_ptr + part[:, None] * D + channel[None, :], mask=is_part[:, None], other=0.0,
                cache_modifier=".cg",
            )
            sums, highest, weight = _joined(
                sums, highest, weight, more_sums, more_highest, more_weight
            )
    return sums, highest, weight


@triton.jit
def _write(
    out_ptr, out_gain_ptr, sums, weight, row, q, kv_head, is_written, out_scale,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, HEADS_BY_KV: tl.constexpr,
    HAS_GAIN: tl.constexpr, NEXT: tl.constexpr, DTYPE: tl.constexpr,
):
    """What queries q of a group attend to, ready for a linear of kind NEXT."""
    G: tl.constexpr = H // H_KV
    head = kv_head * G + q % G if HEADS_BY_KV else (q % G) * H_KV + kv_head
    place = head[:, None] * D + tl.arange(0, D)[None, :]
    gain = out_scale
    if HAS_GAIN:
        gain = tl.load(out_gain_ptr + place)
    out = as_input(sums / weight[:, None], gain, out_scale, DTYPE, HAS_GAIN, NEXT)
    tl.store(out_ptr + (row * (H * D))[:, None] + place, out, mask=is_written[:, None])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention(
    query_ptr, keys_ptr, values_ptr, pages_ptr, positions_ptr,
    slots_ptr, out_gain_ptr, out_ptr, sums_ptr, states_ptr, arrivals_ptr,
    pages_stride, max_parts, window, scale, group, num_rows, out_scale,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, TAKES_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr, QUERIES: tl.constexpr, QUERY_BLOCKS: tl.constexpr,
    UNROLL: tl.constexpr, HEADS_BY_KV: tl.constexpr, HAS_GAIN: tl.constexpr, NEXT: tl.constexpr,
    PDL: tl.constexpr,
):
    """What queries [R, H · D] attend to, [R, H · D]: program (queries, key-value head, part).

    `group` rows are of one sequence, or of nobody: those below position 0. The queries of a group
    and head are taken in QUERY_BLOCKS blocks of QUERIES. A part is a chunk, CHUNK positions, or if
    TAKES_BLOCKS a block, BLOCK chunks; the last program of some queries to arrive joins theirs.

    sums    float32 [R, H, max_parts, D]: of values, by part
    states  float32 [R, H, max_parts, 2]: the highest score, and the sum of weights below it
    window  positions that a row sees, its own included; 0: all

    out is ready for a linear of kind NEXT, which may want heads in the order (H_kv, G).
    """
    G: tl.constexpr = H // H_KV
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    first_row = tl.program_id(0) // QUERY_BLOCKS * group
    q = tl.program_id(0) % QUERY_BLOCKS * QUERIES + tl.arange(0, QUERIES)
    row = first_row + q // G
    # Positions and pages are older than the kernel before: see rotary_linear.
    position = tl.load(positions_ptr + row, mask=q < group * G, other=-1)
    slot = tl.load(slots_ptr + first_row)
    first_position = tl.load(positions_ptr + first_row)
    last_position = tl.load(positions_ptr + first_row + group - 1)
    if (first_position < 0) | (last_position < 0):  # look for those that are somebody's
        last_position = tl.max(position, axis=0)
        slots = tl.load(slots_ptr + row, mask=position >= 0, other=0)
        slot = tl.max(slots, axis=0)
    num_chunks = (last_position + CHUNK) // CHUNK
    first_chunk = 0
    if window > 0:
        first_chunk = tl.maximum(first_position - window + 1, 0) // CHUNK
    if TAKES_BLOCKS:
        first_part = first_chunk // BLOCK
        stop_part = tl.cdiv(num_chunks, BLOCK)
    else:
        first_part = first_chunk
        stop_part = num_chunks
    if (part < first_part) | (part >= stop_part):
        begin(PDL)
        return
    is_query = position >= 0
    head = (q % G) * H_KV + kv_head
    query_place = (row * H + head)[:, None] * D + tl.arange(0, D)[None, :]
    if TAKES_BLOCKS:
        first = tl.maximum(part * BLOCK, first_chunk)
        stop = tl.minimum((part + 1) * BLOCK, num_chunks)
        if PDL:
            # Keys of this step too: into the cache they may come before they are written.
            pages = pages_ptr + slot * pages_stride + first * CHUNK // PAGE
            page_bytes: tl.constexpr = PAGE * D * keys_ptr.dtype.element_ty.primitive_bitwidth // 8
            for i in tl.static_range(CHUNK // PAGE):
                if first * CHUNK + i * PAGE <= last_position:
                    page = tl.cast(tl.load(pages + i), tl.int64) * H_KV + kv_head
                    _prefetch(keys_ptr + page * (PAGE * D), page_bytes)
                    _prefetch(values_ptr + page * (PAGE * D), page_bytes)
        begin(PDL)
        query = tl.load(query_ptr + query_place, mask=is_query[:, None], other=0.0)
        sums, highest, weight = _attended_chunks(
            query, keys_ptr, values_ptr, pages_ptr, slot, pages_stride, first, stop, kv_head,
            position, last_position, window, scale, H_KV, D, PAGE, CHUNK, STAGES, QUERIES,
        )
    else:
        seen = part * CHUNK + tl.arange(0, CHUNK)
        place = _places(pages_ptr, slot, pages_stride, seen, last_position, kv_head, H_KV, D, PAGE)
        # So are the keys and values of earlier steps; those of this one are the kernel's before.
        any_row = tl.arange(0, ROWS)
        any_position = tl.load(positions_ptr + any_row, mask=any_row < num_rows, other=-1)
        any_slot = tl.load(slots_ptr + any_row, mask=any_row < num_rows, other=-1)
        is_ours = (any_slot == slot) & (any_position >= 0)
        first_new = tl.min(tl.where(is_ours, any_position, last_position), axis=0)
        is_old = (seen < first_new)[:, None]
        is_new = (seen >= first_new)[:, None] & (seen <= last_position)[:, None]
        old_keys = tl.load(keys_ptr + place, mask=is_old, other=0.0)
        old_values = tl.load(values_ptr + place, mask=is_old, other=0.0)
        begin(PDL)
        query = tl.load(query_ptr + query_place, mask=is_query[:, None], other=0.0)
        keys = tl.where(is_old, old_keys, tl.load(keys_ptr + place, mask=is_new, other=0.0))
        values = tl.where(is_old, old_values, tl.load(values_ptr + place, mask=is_new, other=0.0))
        sums, highest, weight = _attended(query, keys, values, seen, position, window, scale)
    parts = (row * H + head) * max_parts
    _keep_part(sums_ptr, states_ptr, parts + part, sums, highest, weight, is_query, D)
    counter = arrivals_ptr + tl.program_id(0) * H_KV + kv_head
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    if arrived < stop_part - first_part - 1:
        return
    tl.store(counter, 0)
    if TAKES_BLOCKS:
        sums, highest, weight = _joined_parts(
            sums_ptr, states_ptr, parts, first_part, stop_part, is_query, QUERIES, D, UNROLL
        )
    else:
        sums, highest, weight = _nothing(QUERIES, D)
        for block in range(first_part // BLOCK, tl.cdiv(stop_part, BLOCK)):
            first = tl.maximum(block * BLOCK, first_part)
            stop = tl.minimum((block + 1) * BLOCK, stop_part)
            more_sums, more_highest, more_weight = _joined_parts(
                sums_ptr, states_ptr, parts, first, stop, is_query, QUERIES, D, UNROLL
            )
            sums, highest, weight = _joined(
                sums, highest, weight, more_sums, more_highest, more_weight
            )
    _write(
        out_ptr, out_gain_ptr, sums, weight, row, q, kv_head, is_query, out_scale,
        H, H_KV, D, HEADS_BY_KV, HAS_GAIN, NEXT, query_ptr.dtype.element_ty,
    )


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def list_blocks(
    blocks_ptr, positions_ptr, slots_ptr, num_rows, most,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):
    """Lists the work of attention_of_many; one program does, once for all layers of a launch.

    Neighbouring rows of one sequence, positions one apart, are taken together, up to `most`; those
    below position 0 are nobody's. The longest blocks come first.

    blocks  int32 [4 + 4 · most blocks]: how many there are; then of each, from 4 on, what _block
            says
    """
    row = tl.arange(0, WIDTH)
    position = tl.load(positions_ptr + row, mask=row < num_rows, other=-1)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
    is_behind = (row > 0) & (row < num_rows)
    goes_on = is_behind & (position > 0)
    goes_on &= tl.load(positions_ptr + row - 1, mask=is_behind, other=-1) == position - 1
    goes_on &= tl.load(slots_ptr + row - 1, mask=is_behind, other=-1) == slot
    run = tl.associative_scan(tl.where(goes_on, 0, row), 0, _greater)
    is_first = (position >= 0) & ((row - run) % most == 0)
    together = tl.full([WIDTH], 1, tl.int32)
    goes_on = is_first
    for more in range(1, most):
        there = row + more < num_rows
        goes_on &= tl.load(positions_ptr + row + more, mask=there, other=-1) == position + more
        goes_on &= tl.load(slots_ptr + row + more, mask=there, other=-1) == slot
        together += tl.where(goes_on, 1, 0)
    entry = row | together << 8
    last_position = position + together - 1
    num_chunks = tl.where(is_first, last_position // CHUNK + 1, 0)
    num_whole = num_chunks // BLOCK
    first = tl.cumsum(num_whole, 0) - num_whole
    for block in range(tl.max(num_whole, axis=0)):
        _list(blocks_ptr, first + block, entry, block, slot, last_position, block < num_whole)
    rest = num_chunks % BLOCK
    # Each text's rest behind all that are longer, or as long and of earlier rows.
    key = rest * WIDTH - row
    place = tl.sum(tl.where(key[None, :] > key[:, None], 1, 0), axis=1)
    all_whole = tl.sum(num_whole, axis=0)
    _list(blocks_ptr, all_whole + place, entry, num_whole, slot, last_position, rest > 0)
    tl.store(blocks_ptr, all_whole + tl.sum(tl.where(rest > 0, 1, 0), axis=0))


@triton.jit
def _list(blocks_ptr, number, entry, block, slot, last_position, is_one):
    place = blocks_ptr + 4 + 4 * number
    tl.store(place, entry | block << 16, mask=is_one)
    tl.store(place + 1, slot, mask=is_one)
    tl.store(place + 2, last_position, mask=is_one)


@triton.jit
def _block(blocks_ptr, number):
    """Of a block that list_blocks wrote: the first row, the number of rows that see it, which of
    its text it is, their slot, and the position of the last.
    """
    place = blocks_ptr + 4 + 4 * number
    entry = tl.load(place)
    return entry & 255, entry >> 8 & 255, entry >> 16, tl.load(place + 1), tl.load(place + 2)


@triton.jit
def _turn(turn, num_items):
    """Which item a program takes: who had one of the longest has one of the shortest next."""
    step = tl.num_programs(0)
    item = turn * step + tl.program_id(0)
    if turn % 2 == 1:
        item = turn * step + step - 1 - tl.program_id(0)
    return item, tl.minimum(item, tl.maximum(num_items - 1, 0))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_of_many(
    query_ptr, keys_ptr, values_ptr, pages_ptr, blocks_ptr, out_gain_ptr, out_ptr, sums_ptr,
    states_ptr, arrivals_ptr, pages_stride, max_parts, window, scale, out_scale,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, QUERIES: tl.constexpr,
    QUERY_BLOCKS: tl.constexpr, UNROLL: tl.constexpr, HEADS_BY_KV: tl.constexpr,
    HAS_GAIN: tl.constexpr, NEXT: tl.constexpr, PDL: tl.constexpr,
):
    """`attention` of any number of rows, whose blocks list_blocks wrote.

    Program after program takes one for a key-value head, and the next when it has done that.
    Several share a processor: while one waits for keys, another computes.
    """
    G: tl.constexpr = H // H_KV
    in_one: tl.constexpr = H_KV * QUERY_BLOCKS
    num_items = tl.load(blocks_ptr) * in_one
    # What is next is read a turn before: nobody waits for it then.
    item, known = _turn(0, num_items)
    first_row, num_rows, block, slot, last_position = _block(blocks_ptr, known // in_one)
    begin(PDL)
    for turn in range(tl.cdiv(num_items, tl.num_programs(0))):
        next_item, known = _turn(turn + 1, num_items)
        next_first_row, next_num_rows, next_block, next_slot, next_last_position = _block(
            blocks_ptr, known // in_one
        )
        num_chunks = last_position // CHUNK + 1
        first_chunk = 0
        if window > 0:
            first_chunk = tl.maximum(last_position - num_rows - window + 2, 0) // CHUNK
        first_block = first_chunk // BLOCK
        if (item < num_items) & (block >= first_block):
            kv_head = item % H_KV
            q = item // H_KV % QUERY_BLOCKS * QUERIES + tl.arange(0, QUERIES)
            is_query = q < num_rows * G
            row = first_row + q // G
            head = (q % G) * H_KV + kv_head
            query = tl.load(
                query_ptr + (row * H + head)[:, None] * D + tl.arange(0, D)[None, :],
                mask=is_query[:, None], other=0.0,
            )
            sums, highest, weight = _attended_chunks(
                query, keys_ptr, values_ptr, pages_ptr, slot, pages_stride,
                tl.maximum(block * BLOCK, first_chunk),
                tl.minimum((block + 1) * BLOCK, num_chunks), kv_head,
                last_position - num_rows + 1 + q // G, last_position, window, scale,
                H_KV, D, PAGE, CHUNK, STAGES, QUERIES,
            )
            stop_block = tl.cdiv(num_chunks, BLOCK)
            if stop_block - first_block == 1:
                _write(
                    out_ptr, out_gain_ptr, sums, weight, row, q, kv_head, is_query, out_scale,
                    H, H_KV, D, HEADS_BY_KV, HAS_GAIN, NEXT, query_ptr.dtype.element_ty,
                )
            else:
                parts = (row * H + head) * max_parts
                _keep_part(sums_ptr, states_ptr, parts + block, sums, highest, weight, is_query, D)
                counter = arrivals_ptr + first_row * in_one + item % in_one
                arrived = tl.atomic_add(counter, 1, sem="acq_rel")
                if arrived == stop_block - first_block - 1:
                    tl.store(counter, 0)
                    sums, highest, weight = _joined_parts(
                        sums_ptr, states_ptr, parts, first_block, stop_block, is_query,
                        QUERIES, D, UNROLL,
                    )
                    _write(
                        out_ptr, out_gain_ptr, sums, weight, row, q, kv_head, is_query, out_scale,
                        H, H_KV, D, HEADS_BY_KV, HAS_GAIN, NEXT, query_ptr.dtype.element_ty,
                    )
        item, first_row, num_rows = next_item, next_first_row, next_num_rows
        block, slot, last_position = next_block, next_slot, next_last_position
