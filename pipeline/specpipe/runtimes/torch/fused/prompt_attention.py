"""Attention of prompts over the pages of their sequences, in Triton's language.

Rows come in tiles of one sequence each; a program takes a tile's queries of one key-value head
through all positions that they see, a page at a time. Pages lie at fixed positions and are added
one after the other, so that what a row computes follows from its own position alone. How far a
tile looks stands in memory, and one recorded launch serves every text.

Letters are those of kernels.py.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.products import as_input
from specpipe.runtimes.torch.fused.programs import begin

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def prompt_attention(
    query_ptr, keys_ptr, values_ptr, pages_ptr, positions_ptr, slots_ptr, out_gain_ptr, out_ptr,
    pages_stride, window, scale, out_scale,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, STAGES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HEADS_BY_KV: tl.constexpr, HAS_GAIN: tl.constexpr, NEXT: tl.constexpr, PDL: tl.constexpr,
):
    """What queries [R, H · D] attend to, [R, H · D]: program (ROWS rows, key-value head).

    Rows of a tile are of one sequence, positions rising; behind them there may be nobody's, which
    have position -1. Of QUERIES queries the first ROWS · G are of the tile.

    window  positions that a row sees if HAS_WINDOW, its own included
    """
    begin(PDL)
    # The last tile of a text sees most, and goes first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    first_position = tl.load(positions_ptr + first_row)
    if first_position < 0:
        return
    kv_head = tl.program_id(1)
    G: tl.constexpr = H // H_KV
    q = tl.arange(0, QUERIES)
    row = first_row + q // G
    head = q % G * H_KV + kv_head
    position = tl.load(positions_ptr + row, mask=q < ROWS * G, other=-1)
    last_position = tl.max(position, axis=0)
    channel = tl.arange(0, D)
    place = (row * H + head)[:, None] * D + channel[None, :]
    query = tl.load(query_ptr + place, mask=(position >= 0)[:, None], other=0.0)
    pages_ptr += tl.load(slots_ptr + first_row) * pages_stride
    sums = tl.zeros([QUERIES, D], tl.float32)
    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    scale *= _LOG2_E
    first = 0
    whole = (first_position + 1) // PAGE  # pages that all rows see whole
    if HAS_WINDOW:
        first = tl.maximum(first_position - window + 1, 0) // PAGE
        whole = first
    for page in tl.range(first, whole, num_stages=STAGES):
        sums, highest, weight = _with_page(
            query, sums, highest, weight, keys_ptr, values_ptr, pages_ptr, page, kv_head, position,
            last_position, window, scale, H_KV, D, PAGE, HAS_WINDOW, False,
        )
    for page in tl.range(whole, last_position // PAGE + 1, num_stages=STAGES):
        sums, highest, weight = _with_page(
            query, sums, highest, weight, keys_ptr, values_ptr, pages_ptr, page, kv_head, position,
            last_position, window, scale, H_KV, D, PAGE, HAS_WINDOW, True,
        )
    if HEADS_BY_KV:
        head = kv_head * G + q % G
    place = head[:, None] * D + channel[None, :]
    gain = out_scale
    if HAS_GAIN:
        gain = tl.load(out_gain_ptr + place)
    out = as_input(
        sums / weight[:, None], gain, out_scale, query_ptr.dtype.element_ty, HAS_GAIN, NEXT
    )
    tl.store(out_ptr + (row * (H * D))[:, None] + place, out, mask=(position >= 0)[:, None])


@triton.jit
def _with_page(
    query, sums, highest, weight, keys_ptr, values_ptr, pages_ptr, page, kv_head, position,
    last_position, window, scale,
    H_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """What queries see of a page, joined to what they saw before: sums, highest scores, weights.

    The bits of a row are the same if masked or not, and whatever else its tile sees. So what could
    be one instruction is: whether a compiler makes it one must not depend on what is around.

    scale  times the binary logarithm of e
    """
    i = tl.arange(0, PAGE)
    first = (tl.cast(tl.load(pages_ptr + page), tl.int64) * H_KV + kv_head) * PAGE
    place = (first + i)[:, None] * D + tl.arange(0, D)[None, :]
    if IS_MASKED:
        seen = page * PAGE + i
        is_there = (seen <= last_position)[:, None]  # what is behind may be no numbers
        keys = tl.load(keys_ptr + place, mask=is_there, other=0.0)
        values = tl.load(values_ptr + place, mask=is_there, other=0.0)
    else:
        keys = tl.load(keys_ptr + place)
        values = tl.load(values_ptr + place)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if IS_MASKED:
        is_seen = seen[None, :] <= position[:, None]
        if HAS_WINDOW:
            is_seen &= seen[None, :] > position[:, None] - window
        scores = tl.where(is_seen, scores, -float("inf"))
    higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    shift = higher
    if HAS_WINDOW:  # so far a row may have seen nothing
        shift = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
    old = tl.exp2(highest - shift)
    sums = tl.dot(
        weights.to(values.dtype), values, sums * old[:, None], input_precision="ieee"
    )
    return sums, higher, tl.fma(weight, old, tl.sum(weights, axis=1))
