"""What a draft-verify round makes of scores where tokens are drawn, in Triton's language.

It does what `runtimes/pair/torch_sampler.py` does, for requests whose scores depend on the model
alone. Scores and probabilities are float64 here too, so that a choice differs from that sampler's
only where it would be a tie.

| kernel | does |
|---|---|
| weigh | the gap of each token to its row's best, and its mass |
| narrow | finds where top-k or top-p cut a row, a digit of the gap at a time |
| draw | cuts, and finds the best score under noise of each block of columns |
| propose_drawn | a draft token |
| recover | where the accept test fails, the best of what is left, by blocks |
| accept_drawn | the accept test; moves on |

Nothing is sorted. What stays of a row are the tokens before which, in the order of their gaps,
there are fewer than top_k others, with less than top_p of the mass. `narrow` finds the widest gap
among them: it counts and weighs tokens in bins of the gap, and the last bin that begins before the
cut is divided again by the next level. With one token left in it, there is nothing to divide.

Letters are those of kernels.py, and:
blocks  of BLOCK columns of a row; what programs find is joined by the programs of the next kernel
key     of a token: the gap as an integer, in units of 2^-37; gaps of 32 and more have one key
mass    exp(-gap); 0 of what is cut away
levels  NUM_LEVELS, of BITS bits of a key each
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.old_kernels import move_on
from specpipe.runtimes.torch.fused.programs import begin
from specpipe.speculative.noise import Purpose

BITS: tl.constexpr = tl.constexpr(6)
BINS: tl.constexpr = tl.constexpr(64)
NUM_LEVELS: tl.constexpr = tl.constexpr(7)
_KEY_BITS: tl.constexpr = tl.constexpr(42)
_WIDEST: tl.constexpr = tl.constexpr(32.0)  # a mass below 2e-14
_KEYS_PER_UNIT: tl.constexpr = tl.constexpr(2.0**37)
_LAST_KEY: tl.constexpr = tl.constexpr((1 << 42) - 1)
_NO_KEY: tl.constexpr = tl.constexpr(1 << 60)
_NO_ID: tl.constexpr = tl.constexpr(2147483647)

# Of `narrow`: which cut is looked for.
FIRST_LEVEL: tl.constexpr = tl.constexpr(0)
"""Any: nothing is known before the first level."""
NEXT_LEVEL: tl.constexpr = tl.constexpr(1)
"""The one that the level before looked for."""
TOP_P: tl.constexpr = tl.constexpr(2)
"""From the second level on that of top-p; the first level is the same for all."""
TOP_P_OF_TOP_K: tl.constexpr = tl.constexpr(3)
"""The same, when all levels have found the cut of top-k: top-p is of the mass before that."""

STATE: tl.constexpr = tl.constexpr(8)
"""Numbers that say how far the search in a row has come: `_narrowed`."""

_ACCEPT: tl.constexpr = tl.constexpr(int(Purpose.ACCEPT))
_RECOVERED: tl.constexpr = tl.constexpr(int(Purpose.RECOVERED))

_UNSPECIALIZED = ("first_row", "level", "purpose", "num_rows", "num_draft")


@triton.jit
def _uniform(seed_ptr, positions, purpose, token_ids):
    """Uniform numbers between 0 and 1 in float64, with the bits of speculative/noise.py."""
    block = (token_ids // 4).to(tl.uint32)
    zero = block * 0
    first, second, third, fourth = tl.philox(
        tl.load(seed_ptr), block, zero + positions.to(tl.uint32), zero, zero + purpose
    )
    word = token_ids % 4
    bits = tl.where(word < 2, tl.where(word == 0, first, second),
                    tl.where(word == 2, third, fourth))
    return (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def _gumbel(seed_ptr, position, purpose, token_ids):
    return -tl.log(-tl.log(_uniform(seed_ptr, position, purpose, token_ids)))


@triton.jit
def _is_finite(x):
    return (x > -float("inf")) & (x < float("inf"))


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def weigh(
    logits_ptr, best_ptr, is_unused_ptr, settings_ptr, keys_ptr, masses_ptr, peaks_ptr,
    first_row, num_columns, num_bests, logits_stride,
    ROWS: tl.constexpr, BESTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Keys int64 and masses float64 [R, V] of logits: program (block, row).

    logits, best  of the rows that `score` has scored last, the first of which is first_row here
    settings      float64 [4]: temperature, top_k (inf: off), top_p and log(min_p)
    peaks         float64 [R]: the best score of a row; not finite: there is no usable one
    """
    begin(PDL)
    block = tl.program_id(0)
    scored = tl.program_id(1)
    row = first_row + scored
    temperature = tl.load(settings_ptr)
    place = tl.arange(0, BESTS)
    best = tl.load(best_ptr + place * ROWS + scored, mask=place < num_bests, other=-float("inf"))
    has_nan = tl.max((best != best).to(tl.int32), axis=0) > 0
    best = tl.max(tl.where(best == best, best, -float("inf")), axis=0)
    peak = tl.where(has_nan, float("nan"), best).to(tl.float64) / temperature
    if block == 0:
        tl.store(peaks_ptr + row, peak)
    column = block * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    logits = tl.load(logits_ptr + scored * logits_stride + column, mask=is_column, other=0.0)
    is_unused = tl.load(is_unused_ptr + column, mask=is_column, other=1)
    is_usable = (logits > -float("inf")) & (is_unused == 0)
    gap = tl.where(is_usable, peak - logits.to(tl.float64) / temperature, 0.0)
    key = (tl.minimum(gap, _WIDEST) * _KEYS_PER_UNIT).to(tl.int64)
    key = tl.minimum(key, _LAST_KEY)
    place = row.to(tl.int64) * num_columns + column
    tl.store(keys_ptr + place, tl.where(is_usable, key, _NO_KEY), mask=is_column)
    tl.store(masses_ptr + place, tl.where(is_usable, tl.exp(-gap), 0.0), mask=is_column)


@triton.jit
def _state(states_ptr):
    """What `_narrowed` returns, as an earlier kernel has left it."""
    lowest = tl.load(states_ptr).to(tl.int64)
    bits = tl.load(states_ptr + 1).to(tl.int32)
    count = tl.load(states_ptr + 2)
    mass = tl.load(states_ptr + 3)
    count_before = tl.load(states_ptr + 4)
    mass_before = tl.load(states_ptr + 5)
    return lowest, bits, count, mass, count_before, mass_before


@triton.jit
def _narrowed(
    states_ptr, counts_ptr, masses_ptr, top_k, most_mass, num_blocks, BLOCKS: tl.constexpr
):
    """The bin that has the cut, of those that a level has counted and weighed.

    lowest, bits               it is of the keys from lowest on that differ in the last bits only
    count, mass                of the tokens in it; of one it is known that it is the last to stay
    count_before, mass_before  of those with lower keys
    """
    lowest, bits, count, mass, count_before, mass_before = _state(states_ptr)
    if count > 1:
        bin = tl.arange(0, BINS)
        block = tl.arange(0, BLOCKS)
        place = block[:, None] * BINS + bin[None, :]
        is_block = (block < num_blocks)[:, None]
        counts = tl.sum(tl.load(counts_ptr + place, mask=is_block, other=0), axis=0)
        counts = counts.to(tl.float64)
        masses = tl.sum(tl.load(masses_ptr + place, mask=is_block, other=0.0), axis=0)
        counts_before = count_before + (tl.cumsum(counts, axis=0) - counts)
        masses_before = mass_before + (tl.cumsum(masses, axis=0) - masses)
        is_before_cut = (counts > 0) & (counts_before < top_k) & (masses_before < most_mass)
        chosen = tl.max(tl.where(is_before_cut, bin, 0), axis=0)
        is_chosen = bin == chosen
        count = tl.sum(tl.where(is_chosen, counts, 0.0), axis=0)
        mass = tl.sum(tl.where(is_chosen, masses, 0.0), axis=0)
        count_before = tl.sum(tl.where(is_chosen, counts_before, 0.0), axis=0)
        mass_before = tl.sum(tl.where(is_chosen, masses_before, 0.0), axis=0)
        bits -= BITS
        lowest += chosen.to(tl.int64) << bits
    return lowest, bits, count, mass, count_before, mass_before


@triton.jit
def _sum(ptr, size, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    return tl.sum(tl.load(ptr + place, mask=place < size, other=0.0), axis=0)


@triton.jit
def _num_kept(count, mass, count_before, mass_before, top_k, most_mass):
    """How many of the tokens of the last bin stay, whose keys are all equal if there are more."""
    within_mass = tl.ceil((most_mass - mass_before) * (count / mass))
    within_mass = tl.where(mass > 0, within_mass, count)
    return tl.maximum(tl.minimum(tl.minimum(count, top_k - count_before), within_mass), 1.0)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def narrow(
    keys_ptr, masses_ptr, settings_ptr, states_ptr, bin_counts_ptr, bin_masses_ptr,
    first_row, level, num_rows, num_columns, num_blocks,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Counts and weighs the tokens of each bin of a level: program (block, row).

    states                  float64 [NUM_LEVELS, R, STATE]: the bin that a level divides, and the
                            mass before which top-p cuts
    bin_counts, bin_masses  int32 and float64 [NUM_LEVELS, R, blocks, BINS]
    """
    begin(PDL)
    block = tl.program_id(0)
    row = first_row + tl.program_id(1)
    lowest = tl.full([], 0, tl.int64)
    bits = tl.full([], _KEY_BITS, tl.int32)
    count = num_columns.to(tl.float64) + 1.0
    mass = tl.full([], 0.0, tl.float64)
    count_before = tl.full([], 0.0, tl.float64)
    mass_before = tl.full([], 0.0, tl.float64)
    most_mass = tl.full([], float("inf"), tl.float64)
    if STEP != FIRST_LEVEL:
        top_k = tl.load(settings_ptr + 1)
        place = (level - 1) * num_rows + row
        states = states_ptr + place * STATE
        bins = place * num_blocks * BINS
        if STEP == NEXT_LEVEL:
            most_mass = tl.load(states + 6)
        else:
            most_mass = tl.load(settings_ptr + 2)
            if STEP == TOP_P_OF_TOP_K:
                last = (NUM_LEVELS - 1) * num_rows + row
                _, _, count, mass, count_before, mass_before = _narrowed(
                    states_ptr + last * STATE, bin_counts_ptr + last * num_blocks * BINS,
                    bin_masses_ptr + last * num_blocks * BINS, top_k, float("inf"), num_blocks,
                    BLOCKS,
                )
                kept = _num_kept(count, mass, count_before, mass_before, top_k, float("inf"))
                most_mass *= mass_before + mass * (kept / count)
            else:
                most_mass *= _sum(bin_masses_ptr + bins, num_blocks * BINS, BLOCKS * BINS)
        lowest, bits, count, mass, count_before, mass_before = _narrowed(
            states, bin_counts_ptr + bins, bin_masses_ptr + bins, top_k, most_mass, num_blocks,
            BLOCKS,
        )
    place = level * num_rows + row
    if block == 0:
        states = states_ptr + place * STATE
        tl.store(states, lowest.to(tl.float64))
        tl.store(states + 1, bits.to(tl.float64))
        tl.store(states + 2, count)
        tl.store(states + 3, mass)
        tl.store(states + 4, count_before)
        tl.store(states + 5, mass_before)
        tl.store(states + 6, most_mass)
    if count > 1:
        bin = tl.arange(0, BINS)
        counts = tl.zeros([CHUNK, BINS], tl.int32)
        masses = tl.zeros([CHUNK, BINS], tl.float64)
        start = row.to(tl.int64) * num_columns
        column = block * BLOCK + tl.arange(0, BLOCK)
        key = tl.load(keys_ptr + start + column, mask=column < num_columns, other=_NO_KEY)
        is_inside = (key >= lowest) & (((key - lowest) >> bits) == 0)
        if tl.max(is_inside.to(tl.int32), axis=0) > 0:
            for chunk in range(0, BLOCK, CHUNK):
                some = block * BLOCK + chunk + tl.arange(0, CHUNK)
                some_keys = tl.load(keys_ptr + start + some, mask=some < num_columns, other=_NO_KEY)
                some_masses = tl.load(masses_ptr + start + some, mask=some < num_columns, other=0.0)
                digit = tl.where(some_keys >= lowest, (some_keys - lowest) >> (bits - BITS), BINS)
                is_hit = digit[:, None] == bin[None, :]
                counts += is_hit.to(tl.int32)
                masses += tl.where(is_hit, some_masses[:, None], 0.0)
        found = (place * num_blocks + block) * BINS + bin
        tl.store(bin_counts_ptr + found, tl.sum(counts, axis=0))
        tl.store(bin_masses_ptr + found, tl.sum(masses, axis=0))


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def draw(
    logits_ptr, keys_ptr, masses_ptr, peaks_ptr, settings_ptr, seed_ptr, positions_ptr,
    states_ptr, bin_counts_ptr, bin_masses_ptr, best_ptr, best_ids_ptr, kept_masses_ptr,
    first_row, purpose, num_rows, num_columns, num_blocks, logits_stride,
    FIRST: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, IS_CUT: tl.constexpr,
    REJECTS: tl.constexpr, PDL: tl.constexpr,
):
    """The best score under noise of each block and row, float64 [R, blocks], and its lowest id.

    positions    those behind which rows draw stand from FIRST on
    kept_masses  float64 [R, blocks]: of what is left, if REJECTS; then masses are cut as well
    """
    begin(PDL)
    block = tl.program_id(0)
    scored = tl.program_id(1)
    row = first_row + scored
    position = tl.load(positions_ptr + FIRST + row) + 1
    peak = tl.load(peaks_ptr + row)
    column = block * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    place = row.to(tl.int64) * num_columns + column
    key = tl.load(keys_ptr + place, mask=is_column, other=_NO_KEY)
    is_kept = key < _NO_KEY
    if IS_CUT:
        top_k = tl.load(settings_ptr + 1)
        last = (NUM_LEVELS - 1) * num_rows + row
        most_mass = tl.load(states_ptr + last * STATE + 6)
        counts_ptr = bin_counts_ptr + last * num_blocks * BINS
        lowest, bits, count, mass, count_before, mass_before = _narrowed(
            states_ptr + last * STATE, counts_ptr, bin_masses_ptr + last * num_blocks * BINS,
            top_k, most_mass, num_blocks, BLOCKS,
        )
        num_kept = _num_kept(count, mass, count_before, mass_before, top_k, most_mass)
        if num_kept < count:
            # Equal scores at the cut: the lower ids stay.
            is_tied = key == lowest
            earlier = tl.arange(0, BLOCKS)
            bin = lowest % BINS
            tied = tl.load(counts_ptr + earlier * BINS + bin, mask=earlier < block, other=0)
            tied_before = tl.cumsum(is_tied.to(tl.int32), axis=0) + (tl.sum(tied, axis=0) - 1)
            is_kept &= (key < lowest) | (is_tied & (tied_before < num_kept))
        else:
            is_kept &= (key < lowest) | (((key - lowest) >> bits) == 0)
    logits = tl.load(logits_ptr + scored * logits_stride + column, mask=is_column, other=0.0)
    scores = logits.to(tl.float64) / tl.load(settings_ptr)
    is_kept &= scores >= peak + tl.load(settings_ptr + 3)
    noise = _gumbel(seed_ptr, position, purpose, column)
    drawn = tl.where(is_kept, scores + noise, -float("inf"))
    best = tl.max(drawn, axis=0)
    best_id = tl.min(tl.where(is_kept & (drawn == best), column, _NO_ID), axis=0)
    found = row * num_blocks + block
    tl.store(best_ptr + found, best)
    tl.store(best_ids_ptr + found, best_id)
    if REJECTS:
        mass_of_each = tl.load(masses_ptr + place, mask=is_column, other=0.0)
        mass_of_each = tl.where(is_kept, mass_of_each, 0.0)
        tl.store(masses_ptr + place, mass_of_each, mask=is_column)
        tl.store(kept_masses_ptr + found, tl.sum(mass_of_each, axis=0))


@triton.jit
def _best(best_ptr, best_ids_ptr, num_blocks, BLOCKS: tl.constexpr):
    """The best of the blocks of one row, and its id."""
    block = tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    best = tl.load(best_ptr + block, mask=is_block, other=-float("inf"))
    ids = tl.load(best_ids_ptr + block, mask=is_block, other=_NO_ID)
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, ids, _NO_ID), axis=0)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def propose_drawn(
    best_ptr, best_ids_ptr, peaks_ptr, history_ptr, positions_ptr, first_row, num_blocks,
    FIRST: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):
    """Writes the token that the draft has drawn in row first_row behind the row's position."""
    begin(PDL)
    start = first_row * num_blocks
    _, best_id = _best(best_ptr + start, best_ids_ptr + start, num_blocks, BLOCKS)
    best_id = tl.where(_is_finite(tl.load(peaks_ptr + first_row)), best_id, 0)
    tl.store(history_ptr + tl.load(positions_ptr + FIRST + first_row) + 1, best_id)


@triton.jit
def _num_usable(peaks_ptr, num_rows, ROWS: tl.constexpr):
    """How many of some rows come before the first one without a usable score."""
    row = tl.arange(0, ROWS)
    peaks = tl.load(peaks_ptr + row, mask=row < num_rows, other=float("nan"))
    return tl.min(tl.where(_is_finite(peaks), num_rows, tl.minimum(row, num_rows)), axis=0)


@triton.jit
def _totals(kept_masses_ptr, num_rows, num_blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """The mass of each row, [ROWS]."""
    row = tl.arange(0, ROWS)
    block = tl.arange(0, BLOCKS)
    is_there = (row < num_rows)[:, None] & (block < num_blocks)[None, :]
    place = row[:, None] * num_blocks + block[None, :]
    return tl.sum(tl.load(kept_masses_ptr + place, mask=is_there, other=0.0), axis=1)


@triton.jit
def _judged(
    masses_ptr, totals, draft_masses_ptr, draft_totals, seed_ptr, drafted, first_position,
    num_drafted, num_columns, ROWS: tl.constexpr,
):
    """How many draft tokens [ROWS] the accept test takes, of the first num_drafted."""
    row = tl.arange(0, ROWS)
    is_drafted = row < num_drafted
    place = row.to(tl.int64) * num_columns + drafted
    target_prob = tl.load(masses_ptr + place, mask=is_drafted, other=0.0) / totals
    draft_prob = tl.load(draft_masses_ptr + place, mask=is_drafted, other=0.0) / draft_totals
    uniform = _uniform(seed_ptr, first_position + 1 + row, _ACCEPT, row * 0)
    is_accepted = is_drafted & (uniform * draft_prob < target_prob)
    return tl.min(tl.where(is_accepted, ROWS, row), axis=0)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def recover(
    masses_ptr, kept_masses_ptr, peaks_ptr, draft_masses_ptr, draft_kept_masses_ptr,
    draft_peaks_ptr, seed_ptr, history_ptr, positions_ptr, recovered_ptr, recovered_ids_ptr,
    num_draft, num_columns, num_blocks,
    FIRST: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best of what the target would draw more often than the draft, float64 [blocks].

    It is of the row whose draft token is the first not to be accepted; -inf if there is nothing.
    """
    begin(PDL)
    row = tl.arange(0, ROWS)
    first_position = tl.load(positions_ptr + FIRST)
    drafted = tl.load(history_ptr + first_position + 1 + row, mask=row < num_draft, other=0)
    totals = _totals(kept_masses_ptr, num_draft + 1, num_blocks, ROWS, BLOCKS)
    draft_totals = _totals(draft_kept_masses_ptr, num_draft, num_blocks, ROWS, BLOCKS)
    num_drafted = tl.minimum(
        _num_usable(peaks_ptr, num_draft + 1, ROWS) - 1,
        _num_usable(draft_peaks_ptr, num_draft, ROWS),
    )
    rejected = _judged(
        masses_ptr, totals, draft_masses_ptr, draft_totals, seed_ptr, drafted, first_position,
        num_drafted, num_columns, ROWS,
    )
    is_rejected = row == rejected
    total = tl.sum(tl.where(is_rejected, totals, 0.0), axis=0)
    draft_total = tl.sum(tl.where(is_rejected, draft_totals, 0.0), axis=0)
    block = tl.program_id(0)
    column = block * BLOCK + tl.arange(0, BLOCK)
    is_column = (column < num_columns) & (rejected < num_drafted)
    place = rejected.to(tl.int64) * num_columns + column
    target_probs = tl.load(masses_ptr + place, mask=is_column, other=0.0) / total
    draft_probs = tl.load(draft_masses_ptr + place, mask=is_column, other=0.0) / draft_total
    left = target_probs - draft_probs
    noise = _gumbel(seed_ptr, first_position + 1 + rejected, _RECOVERED, column)
    drawn = tl.where(left > 0, tl.log(tl.where(left > 0, left, 1.0)) + noise, -float("inf"))
    best = tl.max(drawn, axis=0)
    best_id = tl.min(tl.where((left > 0) & (drawn == best), column, _NO_ID), axis=0)
    tl.store(recovered_ptr + block, best)
    tl.store(recovered_ids_ptr + block, best_id)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def accept_drawn(
    best_ptr, best_ids_ptr, masses_ptr, kept_masses_ptr, peaks_ptr, draft_masses_ptr,
    draft_kept_masses_ptr, draft_peaks_ptr, recovered_ptr, recovered_ids_ptr, seed_ptr,
    history_ptr, positions_ptr, result_ptr, num_draft, num_columns, num_blocks,
    FIRST: tl.constexpr, NUM_POSITIONS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    REJECTS: tl.constexpr, PDL: tl.constexpr,
):
    """Accepts draft tokens, by the accept test if REJECTS and else by matching, and moves on.

    A row of the draft without a usable score ends what was drafted. Else as scoring.accept.
    """
    begin(PDL)
    row = tl.arange(0, ROWS)
    first_position = tl.load(positions_ptr + FIRST)
    drafted = tl.load(history_ptr + first_position + 1 + row, mask=row < num_draft, other=-1)
    num_usable = _num_usable(peaks_ptr, num_draft + 1, ROWS)
    num_drafted = tl.minimum(num_usable - 1, _num_usable(draft_peaks_ptr, num_draft, ROWS))
    block = tl.arange(0, BLOCKS)
    is_there = (row <= num_draft)[:, None] & (block < num_blocks)[None, :]
    place = row[:, None] * num_blocks + block[None, :]
    best = tl.load(best_ptr + place, mask=is_there, other=-float("inf"))
    ids = tl.load(best_ids_ptr + place, mask=is_there, other=_NO_ID)
    best_id = tl.min(tl.where(best == tl.max(best, axis=1)[:, None], ids, _NO_ID), axis=1)
    token_ids = best_id
    if REJECTS:
        num_accepted = _judged(
            masses_ptr, _totals(kept_masses_ptr, num_draft + 1, num_blocks, ROWS, BLOCKS),
            draft_masses_ptr, _totals(draft_kept_masses_ptr, num_draft, num_blocks, ROWS, BLOCKS),
            seed_ptr, tl.maximum(drafted, 0), first_position, num_drafted, num_columns, ROWS,
        )
        recovered, recovered_id = _best(recovered_ptr, recovered_ids_ptr, num_blocks, BLOCKS)
        # Equal rows, up to rounding, leave nothing: then the target's own draw is the right one.
        is_recovered = (num_accepted < num_drafted) & (recovered > -float("inf"))
        token_ids = tl.where(is_recovered, recovered_id, best_id)
        token_ids = tl.where(row < num_accepted, drafted, token_ids)
    else:
        is_wrong = (drafted != best_id) | (row >= num_drafted)
        num_accepted = tl.min(tl.where(is_wrong, row, ROWS), axis=0)
    num_emitted = tl.where(num_usable > 0, num_accepted + 1, 0)
    move_on(
        result_ptr, history_ptr, positions_ptr, first_position, token_ids, num_emitted,
        tl.maximum(num_drafted, 0), num_draft, FIRST, NUM_POSITIONS, ROWS,
    )
