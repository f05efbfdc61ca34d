"""The head, and what a draft-verify round makes of its scores, in Triton's language.

Letters are those of kernels.py.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.products import (
    column_scales,
    normed,
    prefetch_block,
    product,
    unnormed,
)
from specpipe.runtimes.torch.fused.programs import UNSPECIALIZED, begin, rows_of_program
from specpipe.runtimes.torch.fused_sizes import RESULT

_RESULT = tl.constexpr(RESULT)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def score(
    scaled_ptr, squares_ptr, row_scales_ptr, weight_ptr, scale_ptr, is_unused_ptr, logits_ptr,
    best_ptr, best_ids_ptr, first_out, num_rows, group, last, num_parts, num_columns, epsilon,
    V: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
    PICKS: tl.constexpr, PREFETCH: tl.constexpr, HAS_UNUSED: tl.constexpr,
    WRITES_LOGITS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):
    """Logits float32 [R, V] of the normalized x, and the best of each block of columns.

    Of a launch of WIDTH rows num_rows are scored: all, or if PICKS the last ones of each group, one
    behind the other.

    first_out       the row of logits that the first of them gets
    best, best_ids  [blocks, OUT_WIDTH]: the highest logit of the first num_columns that are used,
                    NaN where one of them is, and its lowest id
    """
    block = tl.program_id(0)
    # The last block overlaps the one before it rather than end early: both find the same logits.
    first_column = tl.minimum(block * BLOCK_N, V - BLOCK_N)
    of_program, num_rows = rows_of_program(num_rows, ROWS)
    row = tl.arange(0, ROWS)
    ahead = of_program  # by how much a row of the launch comes before that of the program
    if PICKS:
        number = of_program + row
        ahead = number // last * group + (group - last) + number % last - row
    prefetch_block(weight_ptr, first_column, 0, C, BLOCK_N, PREFETCH, KIND, PDL)
    scales = column_scales(scale_ptr, first_column, BLOCK_N, GROUP, KIND)
    begin(PDL)
    norms = unnormed(
        squares_ptr + ahead, row_scales_ptr + ahead, num_rows, num_parts, PARTS, ROWS, WIDTH, KIND,
    )
    logits = product(
        scaled_ptr + ahead * C, weight_ptr, scale_ptr, first_column, 0, C, num_rows,
        V, C, BLOCK_N, BLOCK_C, ROWS, GROUP, KIND,
    )
    logits = normed(logits, norms, epsilon, C, WIDTH, KIND) * scales
    n = first_column + tl.arange(0, BLOCK_N)
    if WRITES_LOGITS:
        out = logits_ptr + (first_out + of_program + row)[None, :] * V + n[:, None]
        tl.store(out, logits, mask=row[None, :] < num_rows)
    is_usable = n < num_columns
    if HAS_UNUSED:
        is_usable &= tl.load(is_unused_ptr + n) == 0
    is_nan = tl.max(((logits != logits) & is_usable[:, None]).to(tl.int32), axis=0) > 0
    usable = tl.where(is_usable[:, None] & (logits == logits), logits, -float("inf"))
    best = tl.max(usable, axis=0)
    ids = tl.where(usable == best[None, :], n[:, None], V)
    best_id = tl.min(ids, axis=0)
    place = block * OUT_WIDTH + of_program + row
    tl.store(best_ptr + place, tl.where(is_nan, float("nan"), best))
    tl.store(best_ids_ptr + place, best_id)


@triton.jit
def _best_of_rows(
    best_ptr, best_ids_ptr, num_rows, num_blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):
    """The best token id of each row, [ROWS], and whether there is one: its logit is finite."""
    row = tl.arange(0, ROWS)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    best_id = tl.full([ROWS], 2147483647, tl.int32)
    has_nan = tl.zeros([ROWS], tl.int32)
    for start in range(0, num_blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        mask = (block < num_blocks)[:, None] & (row < num_rows)[None, :]
        place = block[:, None] * WIDTH + row[None, :]
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


@triton.jit(do_not_specialize=UNSPECIALIZED)
def propose(
    best_ptr, best_ids_ptr, positions_ptr, texts_ptr, history_ptr,
    group, num_blocks, history_stride,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):
    """Writes the best tokens of the rows scored behind their positions: program (place, row).

    They are the last of the group of rows that each place has in the launch, of which positions and
    texts are.
    """
    begin(PDL)
    place = tl.program_id(0)
    last = tl.num_programs(1)
    row = place * group + (group - last) + tl.program_id(1)
    position = tl.load(positions_ptr + row)
    if position < 0:
        return
    scored = place * last + tl.program_id(1)
    best_id, _ = _best_of_rows(
        best_ptr + scored, best_ids_ptr + scored, 1, num_blocks, 1, WIDTH, BLOCKS
    )
    behind = tl.load(texts_ptr + row) * history_stride + position + 1
    tl.store(history_ptr + behind + tl.arange(0, 1), best_id)


@triton.jit(do_not_specialize=("most",))
def accept(
    best_ptr, best_ids_ptr, streams_ptr, num_draft_ptr, history_ptr, last_ptr, result_ptr,
    most, num_blocks, history_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):
    """Accepts draft tokens as long as they are what the target would have chosen, and moves on.

    There is a program for each place of Members, whose rows are the next most + 1 of the launch
    scored. A place without a stream tells nothing.
    """
    begin(PDL)
    place = tl.program_id(0)
    stream = tl.load(streams_ptr + place)
    if stream < 0:
        return
    num_draft = tl.load(num_draft_ptr + place)
    history_ptr += stream * history_stride
    row = tl.arange(0, ROWS)
    first_row = place * (most + 1)
    best_id, is_usable = _best_of_rows(
        best_ptr + first_row, best_ids_ptr + first_row, num_draft + 1, num_blocks,
        ROWS, WIDTH, BLOCKS,
    )
    num_usable = tl.min(tl.where(is_usable | (row > num_draft), num_draft + 1, row), axis=0)
    last = tl.load(last_ptr + stream)
    drafted = tl.load(history_ptr + last + 1 + row, mask=row < num_draft, other=-1)
    is_wrong = (drafted != best_id) | (row >= num_usable - 1)
    num_accepted = tl.min(tl.where(is_wrong, row, ROWS), axis=0)
    num_emitted = tl.where(num_usable > 0, num_accepted + 1, 0)
    move_on(
        result_ptr, history_ptr, last_ptr + stream, place, last, best_id, num_emitted,
        tl.maximum(num_usable - 1, 0), num_draft, ROWS,
    )


@triton.jit
def move_on(
    result_ptr, history_ptr, last_ptr, place, last, token_ids, num_emitted, num_judged, num_draft,
    ROWS: tl.constexpr,
):
    """Ends the round of a place, which emits the first of token_ids [ROWS].

    history  the tokens of its stream by position, draft tokens behind the last one; gets the
             target's own token behind the last accepted one
    last     the position of the last token of its stream; moved by what is emitted
    result   [places, RESULT]: how many tokens are emitted (0: the first row is unusable), how
             many draft tokens were judged, and the tokens
    """
    row = tl.arange(0, ROWS)
    result_ptr += place * _RESULT
    tl.debug_barrier()  # all warps have read what is written now
    tl.store(result_ptr, num_emitted)
    tl.store(result_ptr + 1, num_judged)
    tl.store(result_ptr + 2 + row, token_ids, mask=row <= num_draft)
    tl.store(history_ptr + last + 1 + row, token_ids, mask=row == num_emitted - 1)
    tl.store(last_ptr, last + num_emitted)
