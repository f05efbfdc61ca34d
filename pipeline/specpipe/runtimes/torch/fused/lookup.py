"""Prompt lookup on the GPU, in Triton's language: draft tokens copied from the text.

It finds what specpipe.speculative.lookup does.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.programs import begin
from specpipe.speculative import lookup

_LONGEST = tl.constexpr(lookup.LONGEST)
_SHORTEST = tl.constexpr(lookup.SHORTEST)


@triton.jit
def copy_draft(
    streams_ptr, num_draft_ptr, is_copied_ptr, history_ptr, last_ptr, history_stride,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    """Writes draft tokens behind texts: those that follow where each last ended as it does.

    There is a program for each place of Members; it does so where draft tokens are to be copied.
    """
    begin(PDL)
    member = tl.program_id(0)
    stream = tl.load(streams_ptr + member)
    if (stream < 0) | (tl.load(is_copied_ptr + member) == 0):
        return
    num_draft = tl.load(num_draft_ptr + member)
    history_ptr += stream * history_stride
    last = tl.load(last_ptr + stream)
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
