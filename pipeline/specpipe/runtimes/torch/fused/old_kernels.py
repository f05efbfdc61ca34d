"""Kernels of rounds of one stream: until nobody has those."""

# fmt: off

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.programs import begin
from specpipe.speculative import lookup

_LONGEST = tl.constexpr(lookup.LONGEST)
_SHORTEST = tl.constexpr(lookup.SHORTEST)


@triton.jit
def _best_of_blocks(
    best_ptr, best_ids_ptr, num_blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr
):
    """The best token id of each row, [ROWS], and whether there is one: its logit is finite."""
    row = tl.arange(0, ROWS)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    best_id = tl.full([ROWS], 2147483647, tl.int32)
    has_nan = tl.zeros([ROWS], tl.int32)
    for start in range(0, num_blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        mask = (block < num_blocks)[:, None]
        place = block[:, None] * ROWS + row[None, :]
        value = tl.load(best_ptr + place, mask=mask, other=-float("inf"))
        ids = tl.load(best_ids_ptr + place, mask=mask, other=2147483647)
        has_nan |= tl.max((value != value).to(tl.int32), axis=0)
        value = tl.where(value == value, value, -float("inf"))
        top = tl.max(value, axis=0)
        top_id = tl.min(tl.where(value == top[None, :], ids, 2147483647), axis=0)
        # Blocks come in the order of ids, so an equal one later never wins.
        best_id = tl.where(top > best, top_id, best_id)
        best = tl.maximum(best, top)
    is_usable = (has_nan == 0) & (best > -float("inf")) & (best < float("inf"))
    return tl.where(is_usable, best_id, 0), is_usable


@triton.jit
def propose(
    best_ptr, best_ids_ptr, history_ptr, position_ptr, num_blocks,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):
    """Writes the draft's best token of its first scored row to the position after *position."""
    begin(PDL)
    best_id, _ = _best_of_blocks(best_ptr, best_ids_ptr, num_blocks, ROWS, BLOCKS)
    row = tl.arange(0, ROWS)
    place = history_ptr + tl.load(position_ptr) + 1
    tl.store(place + row, best_id, mask=row == 0)


@triton.jit
def accept(
    best_ptr, best_ids_ptr, history_ptr, positions_ptr,
    result_ptr, num_blocks,
    NUM_DRAFT: tl.constexpr, FIRST: tl.constexpr, NUM_POSITIONS: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):
    """Accepts draft tokens as long as they are what the target would have chosen, and moves on.

    positions  [NUM_POSITIONS]: rising by 1, that of the first row verified stands at FIRST; moved
               by what is emitted
    history    the tokens by position; gets the target's own token behind the last accepted one
    result     [2 + ROWS]: how many tokens are emitted (0: the first row is unusable), how many
               draft tokens were judged, and the tokens
    """
    begin(PDL)
    row = tl.arange(0, ROWS)
    best_id, is_usable = _best_of_blocks(best_ptr, best_ids_ptr, num_blocks, ROWS, BLOCKS)
    num_usable = tl.min(tl.where(is_usable | (row > NUM_DRAFT), NUM_DRAFT + 1, row), axis=0)
    first = tl.load(positions_ptr + FIRST)
    tokens = history_ptr + first + 1
    drafted = tl.load(tokens + row, mask=row < NUM_DRAFT, other=-1)
    is_wrong = (drafted != best_id) | (row >= num_usable - 1)
    num_accepted = tl.min(tl.where(is_wrong, row, ROWS), axis=0)
    num_emitted = tl.where(num_usable > 0, num_accepted + 1, 0)
    move_on(
        result_ptr, history_ptr, positions_ptr, first, best_id, num_emitted,
        tl.maximum(num_usable - 1, 0), NUM_DRAFT, FIRST, NUM_POSITIONS, ROWS,
    )


@triton.jit
def move_on(
    result_ptr, history_ptr, positions_ptr, first, token_ids, num_emitted, num_judged,
    num_draft, FIRST: tl.constexpr, NUM_POSITIONS: tl.constexpr, ROWS: tl.constexpr,
):
    """Ends a round that emits the first of token_ids [ROWS], of which draft tokens are in history.

    What is written: see accept.
    """
    row = tl.arange(0, ROWS)
    tl.debug_barrier()  # all warps have read what is written now
    tl.store(result_ptr, num_emitted)
    tl.store(result_ptr + 1, num_judged)
    tl.store(result_ptr + 2 + row, token_ids, mask=row <= num_draft)
    tl.store(history_ptr + first + 1 + row, token_ids, mask=row == num_emitted - 1)
    n = tl.arange(0, NUM_POSITIONS)
    tl.store(positions_ptr + n, first - FIRST + num_emitted + n)


@triton.jit(do_not_specialize=("num_draft",))
def copy_draft(
    history_ptr, positions_ptr, num_draft,
    FIRST: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    """Writes num_draft tokens behind the text: those that follow where it last ended as it does.

    history    the tokens by position
    positions  that of the last token of the text stands at FIRST
    """
    begin(PDL)
    last = tl.load(positions_ptr + FIRST)
    best = tl.zeros([1], tl.int64)  # tokens that match, and the place, where enough of them do
    for start in range(0, last, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_same = place < last
        matched = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(_LONGEST):
            # Not only where the token after it was the same: so that no load waits for another.
            is_there = (place >= back) & (place < last)
            token = tl.load(history_ptr + place - back, mask=is_there, other=-1)
            wanted = tl.load(history_ptr + last - back, mask=last >= back, other=-2)
            is_same = is_same & (token == wanted)
            matched += is_same.to(tl.int32)
        found = (matched.to(tl.int64) << 32) + place
        found = tl.where(matched >= _SHORTEST, found, 0)
        best = tl.maximum(best, tl.max(found, axis=0))
    found_at = (best & 0xFFFFFFFF).to(tl.int32)
    distance = tl.where(best > 0, last - found_at, 1)
    row = tl.arange(0, ROWS)
    tokens = tl.load(history_ptr + last + 1 - distance + row % distance)
    tl.store(history_ptr + last + 1 + row, tokens, mask=row < num_draft)
