"""The rows of a round's launches, made on the GPU of who takes part in it, in Triton's language.

Members and Streams are those of streams.py; nobody's rows have the position -1 and are of text 0.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.programs import begin


@triton.jit(do_not_specialize=("most",))
def plan_round(
    streams_ptr, num_draft_ptr, is_copied_ptr, last_ptr, draft_slots_ptr, history_ptr,
    positions_ptr, texts_ptr, draft_positions_ptr, draft_texts_ptr, draft_row_slots_ptr, most,
    history_stride, mask_token_id,
    ROWS: tl.constexpr, IS_PARALLEL: tl.constexpr, PDL: tl.constexpr,
):
    """Positions and texts of all launches of a round; one program a place. A text is its stream.

    target  [places, most + 1]: of each place the last token of its text, and its draft tokens; or
            what is read of a text
    draft   [most + 1, places], the first two of which lie as [places, 2]: the draft's first step
            reads the last token but one and the last, and each further step one more. Who copies
            draft tokens, or drafts fewer, has nobody's rows
            [places, 2 most] if IS_PARALLEL: the last most + 1 tokens, and a mask token for each
            further draft token, which is put where that will stand in the text
    """
    begin(PDL)
    place = tl.program_id(0)
    num_places = tl.num_programs(0)
    stream = tl.load(streams_ptr + place)
    is_there = stream >= 0
    is_more = stream < -1  # what is read, or more draft tokens of the place before
    text = tl.where(is_more, -2 - stream, tl.maximum(stream, 0))
    last = tl.load(last_ptr + text)
    draft_slot = tl.load(draft_slots_ptr + text)
    num_draft = tl.load(num_draft_ptr + place)
    is_copied = tl.load(is_copied_ptr + place)
    is_drafting = is_there & (num_draft > 0) & (is_copied == 0)
    i = tl.arange(0, ROWS)
    row = place * (most + 1) + i
    first = tl.where(is_more, tl.where(is_copied < 0, last - is_copied, is_copied), last)
    position = tl.where((is_there | is_more) & (i <= num_draft), first + i, -1)
    tl.store(positions_ptr + row, position, mask=i <= most)
    tl.store(texts_ptr + row, text + i * 0, mask=i <= most)
    if IS_PARALLEL:
        i = tl.arange(0, 2 * ROWS)
        row = 2 * most * place + i
        position = last - most + i
        is_drafted = is_drafting & (i < most + num_draft) & (position >= 0)
        is_row = i < 2 * most
        masked_ptr = history_ptr + text.to(tl.int64) * history_stride + position
        tl.store(masked_ptr, mask_token_id + i * 0, mask=is_drafted & is_row & (i > most))
    else:
        row = tl.where(i < 2, 2 * place + i, num_places * i + place)
        position = last - 1 + i
        is_drafted = is_drafting & (i <= num_draft)
        is_row = (i <= most) & (most > 0)
    tl.store(draft_positions_ptr + row, tl.where(is_drafted, position, -1), mask=is_row)
    tl.store(draft_texts_ptr + row, text + i * 0, mask=is_row)
    tl.store(draft_row_slots_ptr + row, tl.where(is_drafted, draft_slot, 0), mask=is_row)


@triton.jit
def plan_catch_up(
    streams_ptr, ages_ptr, last_ptr, draft_slots_ptr, positions_ptr, texts_ptr, row_slots_ptr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):
    """Positions, texts and slots of stretches of ROWS tokens, one a program.

    ages  by how many positions the first of a stretch comes before the last token of its text
    """
    begin(PDL)
    stretch = tl.program_id(0)
    stream = tl.load(streams_ptr + stretch)
    text = tl.maximum(stream, 0)
    i = tl.arange(0, ROWS)
    row = stretch * ROWS + i
    age = tl.load(ages_ptr + stretch) - i
    is_read = (stream >= 0) & (age >= 0)
    position = tl.load(last_ptr + text) - age
    tl.store(positions_ptr + row, tl.where(is_read, position, -1))
    tl.store(texts_ptr + row, text + i * 0)
    tl.store(row_slots_ptr + row, tl.load(draft_slots_ptr + text) + i * 0)
