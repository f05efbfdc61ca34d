"""Where top-k and top-p cut rows, in Triton's language.

Nothing is sorted. What stays of a row are the tokens before which, in the order of their gaps,
there are fewer than top_k others, with less than top_p of the mass. `narrow` finds the widest gap
among them: it counts and weighs tokens in bins of the gap, and the last bin that begins before the
cut is divided again by the next level. With one token left in it, there is nothing to divide. Top-p
of what top-k leaves is found by a second search, when the first has told what that weighs.

Letters are those of sampling.py, and:
levels  LEVELS of a search, of BITS bits of a key each
mass    an integer here, in units of 2^-44: whoever adds them, in whatever order, finds the same
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.asked import (
    NO_LIMIT,
    UNSPECIALIZED,
    asked,
    at,
    gaps_of,
    is_finite,
)
from specpipe.runtimes.torch.fused.programs import begin

_BITS: tl.constexpr = tl.constexpr(5)
BINS: tl.constexpr = tl.constexpr(32)
LEVELS: tl.constexpr = tl.constexpr(7)
ALL_LEVELS: tl.constexpr = tl.constexpr(13)
"""Of both searches: the first level is the same."""
_KEY_BITS: tl.constexpr = tl.constexpr(35)
_MASSES_PER_UNIT: tl.constexpr = tl.constexpr(2.0**44)

STATE: tl.constexpr = tl.constexpr(8)
"""Numbers that say how far the search in a row has come: `narrowed`."""


@triton.jit
def narrowed(states_ptr, counts_ptr, masses_ptr, top_k, most_mass, place):
    """The bin that has the cut, of those that a level has counted and weighed for a row.

    place                      that of the level and row
    lowest, bits               it is of the keys from lowest on that differ in the last bits only
    count, mass                of the tokens in it; of one it is known that it is the last to stay
    count_before, mass_before  of those with lower keys
    """
    states_ptr += place * STATE
    lowest = tl.load(states_ptr)
    bits = tl.load(states_ptr + 1)
    count = tl.load(states_ptr + 2)
    mass = tl.load(states_ptr + 3)
    count_before = tl.load(states_ptr + 4)
    mass_before = tl.load(states_ptr + 5)
    if count > 1:
        bin = tl.arange(0, BINS)
        counts = tl.load(counts_ptr + place * BINS + bin)
        masses = tl.load(masses_ptr + place * BINS + bin)
        counts_before = count_before + (tl.cumsum(counts, axis=0) - counts)
        masses_before = mass_before + (tl.cumsum(masses, axis=0) - masses)
        is_before_cut = (counts > 0) & (counts_before < top_k) & (masses_before < most_mass)
        chosen = tl.max(tl.where(is_before_cut, bin, 0), axis=0)
        is_chosen = bin == chosen
        count = tl.sum(tl.where(is_chosen, counts, 0), axis=0)
        mass = tl.sum(tl.where(is_chosen, masses, 0), axis=0)
        count_before = tl.sum(tl.where(is_chosen, counts_before, 0), axis=0)
        mass_before = tl.sum(tl.where(is_chosen, masses_before, 0), axis=0)
        bits -= _BITS
        lowest += chosen.to(tl.int64) << bits
    return lowest, bits, count, mass, count_before, mass_before


@triton.jit
def num_kept(count, mass, count_before, mass_before, top_k, most_mass):
    """How many of the tokens of the last bin stay, whose keys are all equal if there are more."""
    mass_of_each = mass.to(tl.float64) / count.to(tl.float64)
    within_mass = tl.ceil((most_mass - mass_before).to(tl.float64) / mass_of_each)
    within_mass = tl.where(mass > 0, within_mass, count.to(tl.float64))
    within_mass = tl.minimum(within_mass, count.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(within_mass, top_k - count_before), 1)


@triton.jit
def _mass_of_top_k(states_ptr, counts_ptr, masses_ptr, top_k, place):
    """What top-k leaves weighs, where the last level of its search is at a place."""
    no_limit = tl.full([], NO_LIMIT, tl.int64)
    _, _, count, mass, count_before, mass_before = narrowed(
        states_ptr, counts_ptr, masses_ptr, top_k, no_limit, place
    )
    kept = num_kept(count, mass, count_before, mass_before, top_k, no_limit)
    # Those of a bin that is cut have one key: whatever they weigh, they weigh the same.
    return mass_before + tl.where(kept < count, mass // count * kept, mass)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def narrow(
    logits_ptr, is_unused_ptr, streams_ptr, num_draft_ptr, is_copied_ptr, settings_ptr, peaks_ptr,
    states_ptr, counts_ptr, masses_ptr,
    first, group, step, level, num_rows, size, num_columns, logits_stride,
    DRAFTS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):
    """Counts and weighs the tokens of each bin of a level: program (part, number of a row).

    A part has `size` columns; who has which changes nothing. Where most tokens are to be counted,
    CHUNK of them are looked at together, one a thread, against all bins; else TILE.

    states          int64 [ALL_LEVELS, R, STATE]: the bin that a level divides, and the mass before
                    which its search looks for a cut
    counts, masses  int64 [ALL_LEVELS, R, BINS]
    """
    begin(PDL)
    number = tl.program_id(1)
    stream, index, is_there = at(
        streams_ptr, num_draft_ptr, is_copied_ptr, number, group, step, DRAFTS
    )
    kind, temperature, top_k, top_p, log_min_p, seed = asked(settings_ptr, stream)
    row = first + number
    has_top_k = top_k < NO_LIMIT
    has_top_p = top_p < 1.0
    if level < LEVELS:
        is_there &= has_top_k | has_top_p
    else:
        is_there &= has_top_k & has_top_p
    if is_there & is_finite(tl.load(peaks_ptr + row)):
        part = tl.program_id(0)
        lowest = tl.full([], 0, tl.int64)
        bits = tl.full([], _KEY_BITS, tl.int64)
        count = num_columns.to(tl.int64)
        mass = tl.full([], 0, tl.int64)
        count_before = tl.full([], 0, tl.int64)
        mass_before = tl.full([], 0, tl.int64)
        most_mass = tl.full([], NO_LIMIT, tl.int64)
        if level > 0:
            before = tl.where(level == LEVELS, 0, level - 1) * num_rows + row
            if (level == LEVELS) | ((level == 1) & has_top_p & (top_k == NO_LIMIT)):
                if level == 1:
                    total = tl.sum(tl.load(masses_ptr + row * BINS + tl.arange(0, BINS)), axis=0)
                else:
                    of_top_k = (LEVELS - 1) * num_rows + row
                    total = _mass_of_top_k(states_ptr, counts_ptr, masses_ptr, top_k, of_top_k)
                # The least that is no longer below this part of it.
                most_mass = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
            elif level > 1:
                most_mass = tl.load(states_ptr + before * STATE + 6)
            lowest, bits, count, mass, count_before, mass_before = narrowed(
                states_ptr, counts_ptr, masses_ptr, top_k, most_mass, before
            )
        place = level * num_rows + row
        if part == 0:
            states = states_ptr + place * STATE
            tl.store(states, lowest)
            tl.store(states + 1, bits)
            tl.store(states + 2, count)
            tl.store(states + 3, mass)
            tl.store(states + 4, count_before)
            tl.store(states + 5, mass_before)
            tl.store(states + 6, most_mass)
        if count > 1:
            logits_ptr += row.to(tl.int64) * logits_stride
            peak = tl.load(peaks_ptr + row)
            end = tl.minimum((part + 1) * size, num_columns)
            if count * 4 > num_columns:
                bin = tl.arange(0, BINS)
                counts = tl.zeros([BINS, CHUNK], tl.int32)
                masses = tl.zeros([BINS, CHUNK], tl.int64)
                for start in range(part * size, end, CHUNK):
                    column = start + tl.arange(0, CHUNK)
                    logits, gap, key = gaps_of(
                        logits_ptr, is_unused_ptr, temperature, peak, column, column < end
                    )
                    digit, mass_of_each = _counted(gap, key, lowest, bits)
                    is_hit = digit[None, :] == bin[:, None]
                    counts += is_hit.to(tl.int32)
                    masses += tl.where(is_hit, mass_of_each[None, :], 0)
                found = tl.sum(counts, axis=1).to(tl.int64)
                found_mass = tl.sum(masses, axis=1)
                bins = place * BINS + bin
                tl.atomic_add(counts_ptr + bins, found, mask=found > 0, sem="relaxed")
                tl.atomic_add(masses_ptr + bins, found_mass, mask=found > 0, sem="relaxed")
            else:
                for start in range(part * size, end, TILE):
                    some = start + tl.arange(0, TILE)
                    some_logits, some_gaps, some_keys = gaps_of(
                        logits_ptr, is_unused_ptr, temperature, peak, some, some < end
                    )
                    is_inside = (some_keys >= lowest) & (((some_keys - lowest) >> bits) == 0)
                    if tl.max(is_inside.to(tl.int32), axis=0) > 0:
                        some_digits, some_masses = _counted(some_gaps, some_keys, lowest, bits)
                        some_bins = place * BINS + some_digits
                        one = tl.full([TILE], 1, tl.int64)
                        tl.atomic_add(counts_ptr + some_bins, one, mask=is_inside, sem="relaxed")
                        tl.atomic_add(
                            masses_ptr + some_bins, some_masses, mask=is_inside, sem="relaxed"
                        )


@triton.jit
def _counted(gap, key, lowest, bits):
    """The bin of each token, BINS if it is in none, and its integer mass."""
    digit = tl.minimum((key - lowest) >> (bits - _BITS), BINS)
    digit = tl.where(key >= lowest, digit, BINS).to(tl.int32)
    return digit, (tl.exp(-gap) * _MASSES_PER_UNIT + 0.5).to(tl.int64)
