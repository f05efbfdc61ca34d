"""The accept test of rounds where tokens are drawn, in Triton's language.

It does what `runtimes/pair/torch_sampler.py` does, by place, with the draft tokens that each place
has. Letters, and how rows are numbered, are those of sampling.py.

| kernel | does |
|---|---|
| recover | where the accept test fails, the best of what is left, by blocks |
| accept_drawn | the accept test; moves on |

A copied token is what a draft would have drawn that is certain of it: it is accepted with the
target's probability of it, and else the target draws among all others.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.asked import (
    REJECTING,
    UNSPECIALIZED,
    asked,
    gaps_of,
    is_finite,
)
from specpipe.runtimes.torch.fused.programs import begin
from specpipe.runtimes.torch.fused.sampling import NO_ID, best_drawn, gumbel, uniform
from specpipe.runtimes.torch.fused.scoring import move_on
from specpipe.speculative.noise import Purpose

_ACCEPT: tl.constexpr = tl.constexpr(int(Purpose.ACCEPT))
_RECOVERED: tl.constexpr = tl.constexpr(int(Purpose.RECOVERED))


@triton.jit
def _draft_row(place, index, num_places, group, IS_PARALLEL: tl.constexpr):
    """Where the draft's row of a draft token is: step by step, or of a parallel draft by place."""
    return place * (group - 1) + index if IS_PARALLEL else index * num_places + place


@triton.jit
def _num_usable(peaks_ptr, rows, num_rows, ROWS: tl.constexpr):
    """How many of some rows come before the first one without a usable score."""
    index = tl.arange(0, ROWS)
    peaks = tl.load(peaks_ptr + rows, mask=index < num_rows, other=float("nan"))
    return tl.min(tl.where(is_finite(peaks), num_rows, tl.minimum(index, num_rows)), axis=0)


@triton.jit
def _probs(
    logits_ptr, is_unused_ptr, temperature, log_min_p, peak, limit, last_id, kept_masses, column,
    is_column,
):
    """The probabilities of some columns of rows, of which `draw` has left limit and last_id."""
    logits, gap, key = gaps_of(
        logits_ptr, is_unused_ptr, temperature, peak, column, is_column
    )
    is_kept = (key < limit) | ((key == limit) & (column <= last_id))
    is_kept &= logits / temperature >= peak / temperature + log_min_p
    return tl.where(is_kept, tl.exp(-gap), 0.0) / kept_masses


@triton.jit
def _probs_of_drafted(
    logits_ptr, is_unused_ptr, temperature, log_min_p, peaks_ptr, limits_ptr, last_ids_ptr,
    kept_masses_ptr, rows, drafted, is_there, num_blocks, logits_stride, BLOCKS: tl.constexpr,
):
    """The probability of one token in each of some rows."""
    block = tl.arange(0, BLOCKS)
    place = rows[:, None] * num_blocks + block[None, :]
    is_block = is_there[:, None] & (block < num_blocks)[None, :]
    return _probs(
        logits_ptr + rows.to(tl.int64) * logits_stride, is_unused_ptr, temperature, log_min_p,
        tl.load(peaks_ptr + rows, mask=is_there, other=0.0),
        tl.load(limits_ptr + rows, mask=is_there, other=0),
        tl.load(last_ids_ptr + rows, mask=is_there, other=-1),
        tl.sum(tl.load(kept_masses_ptr + place, mask=is_block, other=0.0), axis=1), drafted,
        is_there,
    )


@triton.jit
def _probs_of_row(
    logits_ptr, is_unused_ptr, temperature, log_min_p, peaks_ptr, limits_ptr, last_ids_ptr,
    kept_masses_ptr, row, column, is_column, num_blocks, logits_stride, BLOCKS: tl.constexpr,
):
    """The probabilities of some columns of a row."""
    block = tl.arange(0, BLOCKS)
    kept = tl.load(kept_masses_ptr + row * num_blocks + block, mask=block < num_blocks, other=0.0)
    return _probs(
        logits_ptr + row.to(tl.int64) * logits_stride, is_unused_ptr, temperature, log_min_p,
        tl.load(peaks_ptr + row), tl.load(limits_ptr + row), tl.load(last_ids_ptr + row),
        tl.sum(kept, axis=0), column, is_column,
    )


@triton.jit
def _num_accepted(
    logits_ptr, peaks_ptr, limits_ptr, last_ids_ptr, kept_masses_ptr,
    draft_logits_ptr, draft_peaks_ptr, draft_limits_ptr, draft_last_ids_ptr, draft_masses_ptr,
    is_unused_ptr, draft_is_unused_ptr, temperature, log_min_p, seed, drafted, first_position,
    place, num_places, group, num_drafted, is_copied, num_blocks, logits_stride,
    draft_logits_stride,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, IS_PARALLEL: tl.constexpr,
):
    """How many of the first num_drafted draft tokens [ROWS] the accept test takes."""
    index = tl.arange(0, ROWS)
    is_drafted = index < num_drafted
    target_probs = _probs_of_drafted(
        logits_ptr, is_unused_ptr, temperature, log_min_p, peaks_ptr, limits_ptr, last_ids_ptr,
        kept_masses_ptr, place * group + index, drafted, is_drafted, num_blocks, logits_stride,
        BLOCKS,
    )
    is_of_draft = is_drafted & (is_copied == 0)
    draft_probs = _probs_of_drafted(
        draft_logits_ptr, draft_is_unused_ptr, temperature, log_min_p, draft_peaks_ptr,
        draft_limits_ptr, draft_last_ids_ptr, draft_masses_ptr,
        _draft_row(place, index, num_places, group, IS_PARALLEL), drafted, is_of_draft, num_blocks,
        draft_logits_stride, BLOCKS,
    )
    draft_probs = tl.where(is_of_draft, draft_probs, 1.0)
    accept = uniform(seed, first_position + 1 + index, _ACCEPT, index * 0)
    is_accepted = is_drafted & (accept * draft_probs < target_probs)
    return tl.min(tl.where(is_accepted, ROWS, index), axis=0)


@triton.jit
def _num_judged(peaks_ptr, draft_peaks_ptr, place, num_places, group, num_draft, is_copied,
                ROWS: tl.constexpr, IS_PARALLEL: tl.constexpr):
    """How many draft tokens have usable rows, and how many rows of the target are usable."""
    index = tl.arange(0, ROWS)
    num_usable = _num_usable(peaks_ptr, place * group + index, num_draft + 1, ROWS)
    rows = _draft_row(place, index, num_places, group, IS_PARALLEL)
    num_of_draft = tl.where(is_copied == 0, num_draft, 0)
    num_drafted = tl.where(
        is_copied == 0, _num_usable(draft_peaks_ptr, rows, num_of_draft, ROWS), num_draft
    )
    return tl.maximum(tl.minimum(num_usable - 1, num_drafted), 0), num_usable


@triton.jit(do_not_specialize=UNSPECIALIZED)
def recover(
    logits_ptr, peaks_ptr, limits_ptr, last_ids_ptr, kept_masses_ptr,
    draft_logits_ptr, draft_peaks_ptr, draft_limits_ptr, draft_last_ids_ptr, draft_masses_ptr,
    is_unused_ptr, draft_is_unused_ptr, streams_ptr, num_draft_ptr, is_copied_ptr, last_ptr,
    history_ptr, settings_ptr, recovered_ptr, recovered_ids_ptr,
    num_places, group, num_columns, num_blocks, history_stride, logits_stride, draft_logits_stride,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, IS_PARALLEL: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best of what the target would draw more often than the draft: program (block, place).

    It is of the row whose draft token is the first not to be accepted.

    recovered, recovered_ids  float64 and int32 [places, blocks]; -inf if there is nothing
    """
    begin(PDL)
    block = tl.program_id(0)
    place = tl.program_id(1)
    stream = tl.load(streams_ptr + place)
    num_draft = tl.load(num_draft_ptr + place)
    kind, temperature, top_k, top_p, log_min_p, seed = asked(settings_ptr, tl.maximum(stream, 0))
    if (stream >= 0) & (num_draft > 0) & (kind == REJECTING):
        is_copied = tl.load(is_copied_ptr + place)
        num_drafted, _ = _num_judged(
            peaks_ptr, draft_peaks_ptr, place, num_places, group, num_draft, is_copied, ROWS,
            IS_PARALLEL,
        )
        index = tl.arange(0, ROWS)
        first_position = tl.load(last_ptr + stream)
        tokens_ptr = history_ptr + stream.to(tl.int64) * history_stride + first_position + 1
        drafted = tl.load(tokens_ptr + index, mask=index < num_draft, other=0)
        rejected = _num_accepted(
            logits_ptr, peaks_ptr, limits_ptr, last_ids_ptr, kept_masses_ptr, draft_logits_ptr,
            draft_peaks_ptr, draft_limits_ptr, draft_last_ids_ptr, draft_masses_ptr, is_unused_ptr,
            draft_is_unused_ptr, temperature, log_min_p, seed, drafted, first_position, place,
            num_places, group, num_drafted, is_copied, num_blocks, logits_stride,
            draft_logits_stride, ROWS, BLOCKS, IS_PARALLEL,
        )
        if rejected < num_drafted:
            column = block * BLOCK + tl.arange(0, BLOCK)
            is_column = column < num_columns
            target_probs = _probs_of_row(
                logits_ptr, is_unused_ptr, temperature, log_min_p, peaks_ptr, limits_ptr,
                last_ids_ptr, kept_masses_ptr, place * group + rejected, column, is_column,
                num_blocks, logits_stride, BLOCKS,
            )
            token_id = tl.sum(tl.where(index == rejected, drafted, 0), axis=0)
            draft_probs = (column == token_id).to(tl.float64)
            if is_copied == 0:
                draft_probs = _probs_of_row(
                    draft_logits_ptr, draft_is_unused_ptr, temperature, log_min_p, draft_peaks_ptr,
                    draft_limits_ptr, draft_last_ids_ptr, draft_masses_ptr,
                    _draft_row(place, rejected, num_places, group, IS_PARALLEL), column, is_column,
                    num_blocks, draft_logits_stride, BLOCKS,
                )
            left = target_probs - draft_probs
            position = first_position + 1 + rejected
            noise = gumbel(seed, position, _RECOVERED, column)
            scores = tl.log(tl.where(left > 0, left, 1.0)) + noise
            drawn = tl.where(left > 0, scores, -float("inf"))
            best = tl.max(drawn, axis=0)
            best_id = tl.min(tl.where((left > 0) & (drawn == best), column, NO_ID), axis=0)
            tl.store(recovered_ptr + place * num_blocks + block, best)
            tl.store(recovered_ids_ptr + place * num_blocks + block, best_id)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def accept_drawn(
    logits_ptr, peaks_ptr, limits_ptr, last_ids_ptr, kept_masses_ptr, drawn_ptr, drawn_ids_ptr,
    draft_logits_ptr, draft_peaks_ptr, draft_limits_ptr, draft_last_ids_ptr, draft_masses_ptr,
    is_unused_ptr, draft_is_unused_ptr, streams_ptr, num_draft_ptr, is_copied_ptr, last_ptr,
    history_ptr, settings_ptr, recovered_ptr, recovered_ids_ptr, result_ptr,
    num_places, group, num_blocks, history_stride, logits_stride, draft_logits_stride,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, IS_PARALLEL: tl.constexpr, PDL: tl.constexpr,
):
    """Accepts draft tokens, by the accept test or by matching, and moves on: program (place).

    A row of the draft without a usable score ends what was drafted. Else as scoring.accept.
    A place without a stream tells nothing.
    """
    begin(PDL)
    place = tl.program_id(0)
    stream = tl.load(streams_ptr + place)
    if stream >= 0:
        kind, temperature, top_k, top_p, log_min_p, seed = asked(settings_ptr, stream)
        history_ptr += stream.to(tl.int64) * history_stride
        last_ptr += stream
        num_draft = tl.load(num_draft_ptr + place)
        is_copied = tl.load(is_copied_ptr + place)
        num_drafted, num_usable = _num_judged(
            peaks_ptr, draft_peaks_ptr, place, num_places, group, num_draft, is_copied, ROWS,
            IS_PARALLEL,
        )
        index = tl.arange(0, ROWS)
        first_position = tl.load(last_ptr)
        drafted = tl.load(
            history_ptr + first_position + 1 + index, mask=index < num_draft, other=-1
        )
        block = tl.arange(0, BLOCKS)
        is_there = (index <= num_draft)[:, None] & (block < num_blocks)[None, :]
        found = (place * group + index)[:, None] * num_blocks + block[None, :]
        best = tl.load(drawn_ptr + found, mask=is_there, other=-float("inf"))
        ids = tl.load(drawn_ids_ptr + found, mask=is_there, other=NO_ID)
        best_id = tl.min(tl.where(best == tl.max(best, axis=1)[:, None], ids, NO_ID), axis=1)
        token_ids = best_id
        if kind == REJECTING:
            num_accepted = _num_accepted(
                logits_ptr, peaks_ptr, limits_ptr, last_ids_ptr, kept_masses_ptr, draft_logits_ptr,
                draft_peaks_ptr, draft_limits_ptr, draft_last_ids_ptr, draft_masses_ptr,
                is_unused_ptr, draft_is_unused_ptr, temperature, log_min_p, seed,
                tl.maximum(drafted, 0), first_position, place, num_places, group, num_drafted,
                is_copied, num_blocks, logits_stride, draft_logits_stride, ROWS, BLOCKS,
                IS_PARALLEL,
            )
            if num_accepted < num_drafted:
                recovered, recovered_id = best_drawn(
                    recovered_ptr + place * num_blocks, recovered_ids_ptr + place * num_blocks,
                    num_blocks, BLOCKS,
                )
                # Equal rows, up to rounding, leave nothing: then the target's own draw is right.
                token_ids = tl.where(recovered > -float("inf"), recovered_id, token_ids)
            token_ids = tl.where(index < num_accepted, drafted, token_ids)
        else:
            is_wrong = (drafted != best_id) | (index >= num_drafted)
            num_accepted = tl.min(tl.where(is_wrong, index, ROWS), axis=0)
        num_emitted = tl.where(num_usable > 0, num_accepted + 1, 0)
        move_on(
            result_ptr, history_ptr, last_ptr, place, first_position, token_ids, num_emitted,
            num_drafted, num_draft, ROWS,
        )
