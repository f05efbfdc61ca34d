"""Attention of a few rows over the pages of their sequences, in Triton's language.

Letters are those of kernels.py.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.products import FP8_PER_TOKEN, as_input
from specpipe.runtimes.torch.fused.programs import UNSPECIALIZED, begin

CHUNK = 128
"""Positions of one part of attention."""

MAX_QUERIES = 32
"""Of one program of attention: more would be another matrix instruction, with other rounding."""


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention(
    query_ptr, keys_ptr, values_ptr, pages_ptr, positions_ptr,
    slots_ptr, out_gain_ptr, out_ptr, peaks_ptr, sums_ptr, states_ptr, arrivals_ptr,
    pages_stride, max_chunks, window, scale, group, num_rows, out_scale,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, QUERIES: tl.constexpr, QUERY_BLOCKS: tl.constexpr,
    UNROLL: tl.constexpr, HEADS_BY_KV: tl.constexpr, HAS_GAIN: tl.constexpr, NEXT: tl.constexpr,
    PDL: tl.constexpr,
):
    """What queries [R, H · D] attend to, [R, H · D]: program (queries, key-value head, chunk).

    `group` rows are of one sequence, positions rising; the queries of a group and head are taken
    in QUERY_BLOCKS blocks of QUERIES. Each program takes CHUNK positions; the last of its queries
    to arrive joins the parts, always in the same order.

    sums    float32 [R, H, max_chunks, D]: of values, by chunk
    states  float32 [R, H, max_chunks, 2]: the highest score, and the sum of weights below it
    peaks   float32 [H, ROWS]: the greatest numbers of out, by head
    window  positions that a row sees, its own included; 0: all

    out is ready for a linear of kind NEXT, which may want heads in the order (H_kv, G).
    """
    first_row = tl.program_id(0) // QUERY_BLOCKS * group
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    # Positions and pages are older than the kernel before: see rotary_linear.
    first_position = tl.load(positions_ptr + first_row)
    last_position = tl.load(positions_ptr + first_row + group - 1)
    num_chunks = last_position // CHUNK + 1
    first_chunk = 0
    if window > 0:
        first_chunk = tl.maximum(first_position - window + 1, 0) // CHUNK
    if (last_position < 0) | (chunk >= num_chunks) | (chunk < first_chunk):
        begin(PDL)
        return
    G: tl.constexpr = H // H_KV
    q = tl.program_id(0) % QUERY_BLOCKS * QUERIES + tl.arange(0, QUERIES)
    is_query = q < group * G
    row = first_row + q // G
    head = (q % G) * H_KV + kv_head
    position = tl.load(positions_ptr + row, mask=is_query, other=0)
    slot = tl.load(slots_ptr + first_row)
    channel = tl.arange(0, D)
    seen = chunk * CHUNK + tl.arange(0, CHUNK)
    page = tl.load(
        pages_ptr + slot * pages_stride + seen // PAGE, mask=seen <= last_position, other=0
    )
    place = (tl.cast(page, tl.int64) * H_KV + kv_head) * PAGE + seen % PAGE
    place = place[:, None] * D + channel[None, :]
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
    query = tl.load(
        query_ptr + (row * H + head)[:, None] * D + channel[None, :],
        mask=is_query[:, None], other=0.0,
    )
    keys = tl.where(is_old, old_keys, tl.load(keys_ptr + place, mask=is_new, other=0.0))
    values = tl.where(is_old, old_values, tl.load(values_ptr + place, mask=is_new, other=0.0))
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale  # [QUERIES, CHUNK]
    is_seen = seen[None, :] <= position[:, None]
    if window > 0:
        is_seen &= seen[None, :] > position[:, None] - window
    scores = tl.where(is_seen, scores, -float("inf"))
    highest = tl.max(scores, axis=1)
    weights = tl.where(is_seen, tl.exp(scores - highest[:, None]), 0.0)
    sums = tl.dot(weights.to(values.dtype), values, input_precision="ieee")  # [QUERIES, D]
    part = (row * H + head) * max_chunks + chunk
    tl.store(sums_ptr + part[:, None] * D + channel[None, :], sums, mask=is_query[:, None])
    tl.store(states_ptr + 2 * part, highest, mask=is_query)
    tl.store(states_ptr + 2 * part + 1, tl.sum(weights, axis=1), mask=is_query)
    tl.debug_barrier()
    counter = arrivals_ptr + tl.program_id(0) * H_KV + kv_head
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    if arrived < num_chunks - first_chunk - 1:
        return
    tl.store(counter, 0)
    total = tl.zeros([QUERIES, D], tl.float32)
    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    first_part = (row * H + head) * max_chunks
    for start in range(first_chunk, num_chunks, UNROLL):
        for step in tl.static_range(UNROLL):  # their loads are under way together
            part = first_part + start + step
            is_part = is_query & (start + step < num_chunks)
            top = tl.load(
                states_ptr + 2 * part, mask=is_part, other=-float("inf"), cache_modifier=".cg"
            )
            more = tl.load(states_ptr + 2 * part + 1, mask=is_part, other=0.0, cache_modifier=".cg")
            sums = tl.load(
                sums_ptr + part[:, None] * D + channel[None, :], mask=is_part[:, None], other=0.0,
                cache_modifier=".cg",
            )
            higher = tl.maximum(highest, top)
            # A chunk that a row sees nothing of has the score -inf and the weight 0.
            old = tl.where(highest == -float("inf"), 0.0, tl.exp(highest - higher))
            new = tl.where(top == -float("inf"), 0.0, tl.exp(top - higher))
            total = total * old[:, None] + sums * new[:, None]
            weight = weight * old + more * new
            highest = higher
    if HEADS_BY_KV:
        head = kv_head * G + q % G
    place = head[:, None] * D + channel[None, :]
    gain = out_scale
    if HAS_GAIN:
        gain = tl.load(out_gain_ptr + place)
    is_kept = is_query & (position >= 0)
    out = as_input(
        total / weight[:, None], gain, out_scale, query_ptr.dtype.element_ty, HAS_GAIN, NEXT
    )
    if NEXT == FP8_PER_TOKEN:
        tl.store(peaks_ptr + head * ROWS + row, tl.max(tl.abs(out), axis=1), mask=is_kept)
    tl.store(out_ptr + (row * (H * D))[:, None] + place, out, mask=is_kept[:, None])
