"""What rounds make of scores where tokens are drawn, in Triton's language.

It does what `runtimes/pair/torch_sampler.py` does, for requests whose scores depend on the model
alone. Scores and probabilities are float64 here too, so that a choice differs from that sampler's
only where it would be a tie. Each row has the settings of its own stream, and what comes of it
depends on nothing else.

| kernel | does |
|---|---|
| peak | the best logit of each row; a greedy one is done |
| cuts.narrow | finds where top-k or top-p cut a row, a digit of the gap at a time |
| draw | cuts, and finds the best score under noise of each block of columns |
| propose_drawn | the draft tokens of a step |

The accept test is in rejection.py.

Letters are those of kernels.py, and:
blocks  of BLOCK columns of a row; what programs find is joined by the programs of the next kernel
gap     of a token: the row's best score less its own
key     the gap as an integer, in units of 2^-30; gaps of 32 and more have one key
mass    exp(-gap); 0 of what is cut away

Rows are numbered as those of the decoder's logits. A launch takes some of them: asked.at.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.asked import (
    GREEDY,
    MATCHED,
    NO_KEY,
    NO_LIMIT,
    REJECTING,
    UNSPECIALIZED,
    asked,
    at,
    gaps_of,
    is_finite,
)
from specpipe.runtimes.torch.fused.cuts import (
    ALL_LEVELS,
    BINS,
    LEVELS,
    STATE,
    narrowed,
    num_kept,
)
from specpipe.runtimes.torch.fused.programs import begin
from specpipe.speculative.noise import Purpose

NO_ID: tl.constexpr = tl.constexpr(2147483647)

_TOKEN: tl.constexpr = tl.constexpr(int(Purpose.TOKEN))
_DRAFT: tl.constexpr = tl.constexpr(int(Purpose.DRAFT))
_RECOVERED: tl.constexpr = tl.constexpr(int(Purpose.RECOVERED))


@triton.jit
def _noise_bits(seed, position, purpose, token_ids):
    """The bits of speculative/noise.py, uint32."""
    block = (token_ids // 4).to(tl.uint32)
    zero = block * 0
    first, second, third, fourth = tl.philox(
        seed, block, zero + position.to(tl.uint32), zero, (zero + purpose).to(tl.uint32)
    )
    word = token_ids % 4
    return tl.where(word < 2, tl.where(word == 0, first, second),
                    tl.where(word == 2, third, fourth))


@triton.jit
def _gumbel_of(bits):
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def uniform(seed, position, purpose, token_ids):
    """Uniform numbers between 0 and 1 in float64."""
    bits = _noise_bits(seed, position, purpose, token_ids)
    return (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def gumbel(seed, position, purpose, token_ids):
    """Standard Gumbel noise in float64."""
    return _gumbel_of(_noise_bits(seed, position, purpose, token_ids))


@triton.jit
def _purpose(kind, DRAFTS: tl.constexpr):
    """What a row draws for: with a seed the same whoever does, so that draft and target agree."""
    return tl.where(kind == MATCHED, _TOKEN, _DRAFT if DRAFTS else _RECOVERED)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def peak(
    best_ptr, best_ids_ptr, streams_ptr, num_draft_ptr, is_copied_ptr, last_ptr, settings_ptr,
    peaks_ptr, noises_ptr, counts_ptr, masses_ptr, drawn_ptr, drawn_ids_ptr,
    first, group, step, width, num_bests, num_rows, num_blocks,
    DRAFTS: tl.constexpr, BESTS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):
    """The best logit of each row: program (number of a row).

    best    of the rows scored last, each width of them
    peaks   float64 [R]: the best logit; not finite: there is no usable one
    noises  float64 [R]: that of its token
    counts  and masses: of the bins of a row that is cut; empty
    drawn   of a greedy row, which is done
    """
    begin(PDL)
    number = tl.program_id(0)
    stream, index, is_there = at(
        streams_ptr, num_draft_ptr, is_copied_ptr, number, group, step, DRAFTS
    )
    if is_there:
        kind, temperature, top_k, top_p, log_min_p, seed = asked(settings_ptr, stream)
        row = first + number
        block = tl.arange(0, BESTS)
        place = block * width + number
        best = tl.load(best_ptr + place, mask=block < num_bests, other=-float("inf"))
        has_nan = tl.max((best != best).to(tl.int32), axis=0) > 0
        best = tl.where(best == best, best, -float("inf"))
        top = tl.max(best, axis=0)
        tl.store(peaks_ptr + row, tl.where(has_nan, float("nan"), top).to(tl.float64))
        ids = tl.load(best_ids_ptr + place, mask=block < num_bests, other=NO_ID)
        top_id = tl.min(tl.where(best == top, ids, NO_ID), axis=0)
        if kind == GREEDY:
            of_row = tl.arange(0, BLOCKS)
            is_block = of_row < num_blocks
            drawn = row * num_blocks + of_row
            tl.store(drawn_ptr + drawn, tl.where(of_row == 0, 0.0, -float("inf")), mask=is_block)
            tl.store(drawn_ids_ptr + drawn, top_id + of_row * 0, mask=is_block)
        else:
            position = tl.load(last_ptr + stream) + index + 1
            tl.store(noises_ptr + row, gumbel(seed, position, _purpose(kind, DRAFTS), top_id))
        if (top_k < NO_LIMIT) | (top_p < 1.0):
            bin = tl.arange(0, BINS)
            for level in tl.static_range(ALL_LEVELS):
                bins = (level * num_rows + row) * BINS + bin
                tl.store(counts_ptr + bins, tl.zeros([BINS], tl.int64))
                tl.store(masses_ptr + bins, tl.zeros([BINS], tl.int64))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def draw(
    logits_ptr, is_unused_ptr, streams_ptr, num_draft_ptr, is_copied_ptr, last_ptr, settings_ptr,
    peaks_ptr, noises_ptr, states_ptr, counts_ptr, masses_ptr, limits_ptr, last_ids_ptr, drawn_ptr,
    drawn_ids_ptr, kept_masses_ptr,
    first, group, step, num_rows, num_columns, num_blocks, logits_stride,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """The best score under noise of each block of a row: program (block, number of a row).

    A block of which no token can be that of the row has none.

    limits, last_ids  int64 and int32 [R]: tokens with a lower key stay, and of those with that key
                      the ids up to last_id
    drawn, drawn_ids  float64 and int32 [R, blocks]: the best, and its lowest id
    kept_masses       float64 [R, blocks]: of what stays, where the accept test asks for it
    """
    begin(PDL)
    block = tl.program_id(0)
    number = tl.program_id(1)
    stream, index, is_there = at(
        streams_ptr, num_draft_ptr, is_copied_ptr, number, group, step, DRAFTS
    )
    kind, temperature, top_k, top_p, log_min_p, seed = asked(settings_ptr, stream)
    row = first + number
    peak = tl.load(peaks_ptr + row)
    if is_there & (kind != GREEDY) & is_finite(peak):
        logits_ptr += row.to(tl.int64) * logits_stride
        column = block * BLOCK + tl.arange(0, BLOCK)
        logits, gap, key = gaps_of(
            logits_ptr, is_unused_ptr, temperature, peak, column, column < num_columns
        )
        limit = tl.full([], NO_KEY, tl.int64)
        has_ties = tl.full([], 0, tl.int1)
        is_kept = key < NO_KEY
        if (top_k < NO_LIMIT) | (top_p < 1.0):
            is_cut_twice = (top_k < NO_LIMIT) & (top_p < 1.0)
            level = tl.where(is_cut_twice, ALL_LEVELS - 1, LEVELS - 1)
            place = level * num_rows + row
            most_mass = tl.load(states_ptr + place * STATE + 6)
            lowest, bits, count, mass, count_before, mass_before = narrowed(
                states_ptr, counts_ptr, masses_ptr, top_k, most_mass, place
            )
            kept = num_kept(count, mass, count_before, mass_before, top_k, most_mass)
            has_ties = kept < count
            limit = tl.where(has_ties, lowest, lowest + (tl.full([], 1, tl.int64) << bits))
            is_kept = key < limit
            if has_ties:
                # Equal scores at the cut: the lower ids stay.
                num_tied = tl.zeros([BLOCK], tl.int32)
                for start in range(0, block * BLOCK, BLOCK):
                    logits_before, gap_before, keys_before = gaps_of(
                        logits_ptr, is_unused_ptr, temperature, peak, start + tl.arange(0, BLOCK),
                        column >= 0,
                    )
                    num_tied += (keys_before == lowest).to(tl.int32)
                is_tied = key == lowest
                rank = tl.cumsum(is_tied.to(tl.int32), axis=0) + (tl.sum(num_tied, axis=0) - 1)
                is_kept |= is_tied & (rank < kept)
                is_last = is_tied & (rank == kept - 1)
                tl.store(last_ids_ptr + row + column * 0, column, mask=is_last)
        if block == 0:
            tl.store(limits_ptr + row, limit)
            if not has_ties:
                tl.store(last_ids_ptr + row, -1)
        if log_min_p > -float("inf"):
            is_kept &= logits / temperature >= peak / temperature + log_min_p
        position = tl.load(last_ptr + stream) + index + 1
        words = _noise_bits(seed, position, _purpose(kind, DRAFTS), column)
        # To come before the best token under that one's noise, -log(-log(u)) must be this lead at
        # least, for which 1 - u may be exp(-lead) at most: few are that near to 1.
        lead = (gap + tl.load(noises_ptr + row)).to(tl.float32)
        rest = (0xFFFFFFFF - words).to(tl.float32) * 2.3283064365386963e-10
        may_win = is_kept & (rest <= 1.001 * tl.exp(-lead))
        best = tl.full([], -float("inf"), tl.float64)
        best_id = tl.full([], NO_ID, tl.int32)
        if tl.max(may_win.to(tl.int32), axis=0) > 0:
            drawn = tl.where(is_kept, logits / temperature + _gumbel_of(words), -float("inf"))
            best = tl.max(drawn, axis=0)
            best_id = tl.min(tl.where(is_kept & (drawn == best), column, NO_ID), axis=0)
        found = row * num_blocks + block
        tl.store(drawn_ptr + found, best)
        tl.store(drawn_ids_ptr + found, best_id)
        if kind == REJECTING:
            mass_kept = tl.sum(tl.where(is_kept, tl.exp(-gap), 0.0), axis=0)
            tl.store(kept_masses_ptr + found, mass_kept)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def propose_drawn(
    drawn_ptr, drawn_ids_ptr, peaks_ptr, streams_ptr, num_draft_ptr, is_copied_ptr, last_ptr,
    history_ptr,
    first, group, step, num_blocks, history_stride,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):
    """Writes what the draft has drawn in a step behind its texts: program (number of a row)."""
    begin(PDL)
    number = tl.program_id(0)
    stream, index, is_there = at(
        streams_ptr, num_draft_ptr, is_copied_ptr, number, group, step, True
    )
    if is_there:
        row = first + number
        _, best_id = best_drawn(
            drawn_ptr + row * num_blocks, drawn_ids_ptr + row * num_blocks, num_blocks, BLOCKS
        )
        best_id = tl.where(is_finite(tl.load(peaks_ptr + row)), best_id, 0)
        place = stream.to(tl.int64) * history_stride + tl.load(last_ptr + stream) + index + 1
        tl.store(history_ptr + place, best_id)


@triton.jit
def best_drawn(drawn_ptr, drawn_ids_ptr, num_blocks, BLOCKS: tl.constexpr):
    """The best of the blocks of one row, and its id."""
    block = tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    best = tl.load(drawn_ptr + block, mask=is_block, other=-float("inf"))
    ids = tl.load(drawn_ids_ptr + block, mask=is_block, other=NO_ID)
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, ids, NO_ID), axis=0)
