"""What rounds make of scores where tokens are drawn, in Triton's language.

It does what `runtimes/pair/torch_sampler.py` does, for requests whose scores depend on the model
alone. Scores and probabilities are float64 here too, so that a choice differs from that sampler's
only where it would be a tie. Each row has the settings of its own stream, and what comes of it
depends on nothing else.

| kernel | does |
|---|---|
| peak | the best logit of each row; a greedy one is done |
| narrow | finds where top-k or top-p cut a row, a digit of the gap at a time |
| draw | cuts, and finds the best score under noise of each block of columns |
| propose_drawn | the draft tokens of a step |

The accept test is in rejection.py.

Nothing is sorted. What stays of a row are the tokens before which, in the order of their gaps,
there are fewer than top_k others, with less than top_p of the mass. `narrow` finds the widest gap
among them: it counts and weighs tokens in bins of the gap, and the last bin that begins before the
cut is divided again by the next level. With one token left in it, there is nothing to divide. Top-p
of what top-k leaves is found by a second search, when the first has told what that weighs.

Letters are those of kernels.py, and:
blocks  of BLOCK columns of a row; what programs find is joined by the programs of the next kernel
gap     of a token: the row's best score less its own
key     the gap as an integer, in units of 2^-30; gaps of 32 and more have one key
mass    exp(-gap); 0 of what is cut away. Where masses are bins' they are integers, in units of
        2^-44: whoever adds them, in whatever order, finds the same
levels  LEVELS of a search, of BITS bits of a key each

Rows are numbered as those of the decoder's logits. A launch takes some of them: `at`.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

from specpipe.runtimes.torch.fused.programs import begin
from specpipe.speculative.noise import Purpose

# A stream's settings, int64 [FIELDS]: the first three are float64.
FIELDS: tl.constexpr = tl.constexpr(6)
_TEMPERATURE: tl.constexpr = tl.constexpr(0)
_TOP_P: tl.constexpr = tl.constexpr(1)
_LOG_MIN_P: tl.constexpr = tl.constexpr(2)
_TOP_K: tl.constexpr = tl.constexpr(3)
_SEED: tl.constexpr = tl.constexpr(4)
_KIND: tl.constexpr = tl.constexpr(5)

GREEDY: tl.constexpr = tl.constexpr(0)
MATCHED: tl.constexpr = tl.constexpr(1)
"""Seeded: draft tokens stand as long as the target draws the same, by the same noise."""
REJECTING: tl.constexpr = tl.constexpr(2)
"""Unseeded: draft tokens are accepted by rejection sampling."""

NO_LIMIT: tl.constexpr = tl.constexpr((1 << 63) - 1)
"""Of a count or a mass."""

_BITS: tl.constexpr = tl.constexpr(5)
BINS: tl.constexpr = tl.constexpr(32)
LEVELS: tl.constexpr = tl.constexpr(7)
ALL_LEVELS: tl.constexpr = tl.constexpr(13)
"""Of both searches: the first level is the same."""
_KEY_BITS: tl.constexpr = tl.constexpr(35)
_WIDEST: tl.constexpr = tl.constexpr(32.0)  # a mass below 2e-14
_KEYS_PER_UNIT: tl.constexpr = tl.constexpr(2.0**30)
_LAST_KEY: tl.constexpr = tl.constexpr((1 << 35) - 1)
_MASSES_PER_UNIT: tl.constexpr = tl.constexpr(2.0**44)
NO_KEY: tl.constexpr = tl.constexpr(1 << 60)
NO_ID: tl.constexpr = tl.constexpr(2147483647)

STATE: tl.constexpr = tl.constexpr(8)
"""Numbers that say how far the search in a row has come: `_narrowed`."""

_TOKEN: tl.constexpr = tl.constexpr(int(Purpose.TOKEN))
_DRAFT: tl.constexpr = tl.constexpr(int(Purpose.DRAFT))
_RECOVERED: tl.constexpr = tl.constexpr(int(Purpose.RECOVERED))

UNSPECIALIZED = (
    "first", "stride", "scored", "group", "step", "num_places", "level", "width", "num_bests",
    "num_rows", "size",
)  # fmt: skip
"""What the machine code must not depend on."""


@triton.jit
def uniform(seed, position, purpose, token_ids):
    """Uniform numbers between 0 and 1 in float64, with the bits of speculative/noise.py."""
    block = (token_ids // 4).to(tl.uint32)
    zero = block * 0
    first, second, third, fourth = tl.philox(
        seed, block, zero + position.to(tl.uint32), zero, (zero + purpose).to(tl.uint32)
    )
    word = token_ids % 4
    bits = tl.where(word < 2, tl.where(word == 0, first, second),
                    tl.where(word == 2, third, fourth))
    return (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def gumbel(seed, position, purpose, token_ids):
    return -tl.log(-tl.log(uniform(seed, position, purpose, token_ids)))


@triton.jit
def is_finite(x):
    return (x > -float("inf")) & (x < float("inf"))


@triton.jit
def asked(settings_ptr, stream):
    """The settings of a stream: kind, temperature, top_k, top_p, log(min_p), seed."""
    settings_ptr += stream * FIELDS
    temperature = tl.load(settings_ptr + _TEMPERATURE).to(tl.float64, bitcast=True)
    top_p = tl.load(settings_ptr + _TOP_P).to(tl.float64, bitcast=True)
    log_min_p = tl.load(settings_ptr + _LOG_MIN_P).to(tl.float64, bitcast=True)
    top_k = tl.load(settings_ptr + _TOP_K)
    seed = tl.load(settings_ptr + _SEED)
    return tl.load(settings_ptr + _KIND), temperature, top_k, top_p, log_min_p, seed


@triton.jit
def at(streams_ptr, num_draft_ptr, is_copied_ptr, number, group, step, DRAFTS: tl.constexpr):
    """Of a row of a launch: its stream, which draft position it is, and whether it is anybody's.

    DRAFTS  it is the draft's, which has a row of each place in a step; the target has group of them
    """
    place = number // group
    index = step + number % group
    stream = tl.load(streams_ptr + place)
    num_draft = tl.load(num_draft_ptr + place)
    if DRAFTS:
        is_there = (index < num_draft) & (tl.load(is_copied_ptr + place) == 0)
    else:
        is_there = index <= num_draft
    return tl.maximum(stream, 0), index, is_there & (stream >= 0)


@triton.jit
def scores_of(logits_ptr, is_unused_ptr, temperature, peak, column, is_column):
    """Scores of some columns of a row, the gaps to that of the peak, and their keys.

    peak  the best logit. What is not in use has its score, and NO_KEY
    """
    logits = tl.load(logits_ptr + column, mask=is_column, other=-float("inf"))
    is_unused = tl.load(is_unused_ptr + column, mask=is_column, other=1)
    is_usable = (logits > -float("inf")) & (is_unused == 0)
    logits = tl.where(is_usable, logits.to(tl.float64), peak)
    scores = logits / temperature
    gap = (peak - logits) * (1.0 / temperature)  # no division: `narrow` needs no more than this
    key = (tl.minimum(gap, _WIDEST) * _KEYS_PER_UNIT).to(tl.int64)
    return scores, gap, tl.where(is_usable, tl.minimum(key, _LAST_KEY), NO_KEY)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def peak(
    best_ptr, best_ids_ptr, streams_ptr, num_draft_ptr, is_copied_ptr, settings_ptr, peaks_ptr,
    counts_ptr, masses_ptr, drawn_ptr, drawn_ids_ptr,
    first, stride, scored, group, step, width, num_bests, num_rows, num_blocks,
    DRAFTS: tl.constexpr, BESTS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):
    """The best logit of each row: program (number of a row).

    best    of the rows scored last, each width of them: number's is scored + stride * number
    peaks   float64 [R]: the best logit; not finite: there is no usable one
    counts, masses  of the bins of a row that is cut; empty
    drawn   of a greedy row, which is done
    """
    begin(PDL)
    number = tl.program_id(0)
    stream, index, is_there = at(
        streams_ptr, num_draft_ptr, is_copied_ptr, number, group, step, DRAFTS
    )
    if is_there:
        kind, temperature, top_k, top_p, log_min_p, seed = asked(settings_ptr, stream)
        row = first + stride * number
        block = tl.arange(0, BESTS)
        place = block * width + scored + stride * number
        best = tl.load(best_ptr + place, mask=block < num_bests, other=-float("inf"))
        has_nan = tl.max((best != best).to(tl.int32), axis=0) > 0
        best = tl.where(best == best, best, -float("inf"))
        top = tl.max(best, axis=0)
        tl.store(peaks_ptr + row, tl.where(has_nan, float("nan"), top).to(tl.float64))
        if kind == GREEDY:
            ids = tl.load(best_ids_ptr + place, mask=block < num_bests, other=NO_ID)
            top_id = tl.min(tl.where(best == top, ids, NO_ID), axis=0)
            of_row = tl.arange(0, BLOCKS)
            is_block = of_row < num_blocks
            drawn = row * num_blocks + of_row
            tl.store(drawn_ptr + drawn, tl.where(of_row == 0, 0.0, -float("inf")), mask=is_block)
            tl.store(drawn_ids_ptr + drawn, top_id + of_row * 0, mask=is_block)
        if (top_k < NO_LIMIT) | (top_p < 1.0):
            bin = tl.arange(0, BINS)
            for level in tl.static_range(ALL_LEVELS):
                bins = (level * num_rows + row) * BINS + bin
                tl.store(counts_ptr + bins, tl.zeros([BINS], tl.int64))
                tl.store(masses_ptr + bins, tl.zeros([BINS], tl.int64))


@triton.jit
def _narrowed(states_ptr, counts_ptr, masses_ptr, top_k, most_mass, place):
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
def _num_kept(count, mass, count_before, mass_before, top_k, most_mass):
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
    _, _, count, mass, count_before, mass_before = _narrowed(
        states_ptr, counts_ptr, masses_ptr, top_k, no_limit, place
    )
    kept = _num_kept(count, mass, count_before, mass_before, top_k, no_limit)
    # Those of a bin that is cut have one key: whatever they weigh, they weigh the same.
    return mass_before + tl.where(kept < count, mass // count * kept, mass)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def narrow(
    logits_ptr, is_unused_ptr, streams_ptr, num_draft_ptr, is_copied_ptr, settings_ptr, peaks_ptr,
    states_ptr, counts_ptr, masses_ptr,
    first, stride, group, step, level, num_rows, size, num_columns, logits_stride,
    DRAFTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):
    """Counts and weighs the tokens of each bin of a level: program (part, number of a row).

    A part has `size` columns; who has which changes nothing.

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
    row = first + stride * number
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
        count = tl.full([], 2, tl.int64)  # or more: all there are
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
            lowest, bits, count, mass, count_before, mass_before = _narrowed(
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
            # A thread has a column of these, or several: nothing is computed twice.
            bin = tl.arange(0, BINS)
            counts = tl.zeros([BINS, CHUNK], tl.int32)
            masses = tl.zeros([BINS, CHUNK], tl.int64)
            for start in range(part * size, tl.minimum((part + 1) * size, num_columns), CHUNK):
                column = start + tl.arange(0, CHUNK)
                scores, gap, key = scores_of(
                    logits_ptr, is_unused_ptr, temperature, peak, column, column < num_columns
                )
                digit = (key - lowest) >> (bits - _BITS)
                is_inside = (digit >= 0) & (digit < BINS)
                if tl.max(is_inside.to(tl.int32), axis=0) > 0:
                    mass_of_each = (tl.exp(-gap) * _MASSES_PER_UNIT + 0.5).to(tl.int64)
                    is_hit = tl.where(is_inside, digit, BINS).to(tl.int32)[None, :] == bin[:, None]
                    counts += is_hit.to(tl.int32)
                    masses += tl.where(is_hit, mass_of_each[None, :], 0)
            found = tl.sum(counts, axis=1).to(tl.int64)
            found_mass = tl.sum(masses, axis=1)
            bins = place * BINS + bin
            tl.atomic_add(counts_ptr + bins, found, mask=found > 0, sem="relaxed")
            tl.atomic_add(masses_ptr + bins, found_mass, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def draw(
    logits_ptr, is_unused_ptr, streams_ptr, num_draft_ptr, is_copied_ptr, last_ptr, settings_ptr,
    peaks_ptr, states_ptr, counts_ptr, masses_ptr, limits_ptr, last_ids_ptr, drawn_ptr,
    drawn_ids_ptr, kept_masses_ptr,
    first, stride, group, step, num_rows, num_columns, num_blocks, logits_stride,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """The best score under noise of each block of a row: program (block, number of a row).

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
    row = first + stride * number
    peak = tl.load(peaks_ptr + row)
    if is_there & (kind != GREEDY) & is_finite(peak):
        logits_ptr += row.to(tl.int64) * logits_stride
        column = block * BLOCK + tl.arange(0, BLOCK)
        scores, gap, key = scores_of(
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
            lowest, bits, count, mass, count_before, mass_before = _narrowed(
                states_ptr, counts_ptr, masses_ptr, top_k, most_mass, place
            )
            num_kept = _num_kept(count, mass, count_before, mass_before, top_k, most_mass)
            has_ties = num_kept < count
            limit = tl.where(has_ties, lowest, lowest + (tl.full([], 1, tl.int64) << bits))
            is_kept = key < limit
            if has_ties:
                # Equal scores at the cut: the lower ids stay.
                num_tied = tl.zeros([BLOCK], tl.int32)
                for start in range(0, block * BLOCK, BLOCK):
                    scores_before, gap_before, keys_before = scores_of(
                        logits_ptr, is_unused_ptr, temperature, peak, start + tl.arange(0, BLOCK),
                        column >= 0,
                    )
                    num_tied += (keys_before == lowest).to(tl.int32)
                is_tied = key == lowest
                rank = tl.cumsum(is_tied.to(tl.int32), axis=0) + (tl.sum(num_tied, axis=0) - 1)
                is_kept |= is_tied & (rank < num_kept)
                is_last = is_tied & (rank == num_kept - 1)
                tl.store(last_ids_ptr + row + column * 0, column, mask=is_last)
        if block == 0:
            tl.store(limits_ptr + row, limit)
            if not has_ties:
                tl.store(last_ids_ptr + row, -1)
        is_kept &= scores >= peak / temperature + log_min_p
        best = tl.full([], -float("inf"), tl.float64)
        best_id = tl.full([], NO_ID, tl.int32)
        if tl.max(is_kept.to(tl.int32), axis=0) > 0:
            purpose = tl.where(kind == MATCHED, _TOKEN, _DRAFT if DRAFTS else _RECOVERED)
            position = tl.load(last_ptr + stream) + index + 1
            noise = gumbel(seed, position, purpose, column)
            drawn = tl.where(is_kept, scores + noise, -float("inf"))
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
    first, stride, step, num_blocks, history_stride,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):
    """Writes what the draft has drawn in a step behind its texts: program (place)."""
    begin(PDL)
    number = tl.program_id(0)
    stream, index, is_there = at(streams_ptr, num_draft_ptr, is_copied_ptr, number, 1, step, True)
    if is_there:
        row = first + stride * number
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
