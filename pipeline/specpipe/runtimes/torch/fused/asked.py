"""What is asked of a row whose token is drawn, and how its logits are looked at, in Triton's
language.

Letters are those of sampling.py.
"""

# fmt: off
# With one argument a line, signatures and calls would be most of the file.

from __future__ import annotations

import triton
import triton.language as tl

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

_WIDEST: tl.constexpr = tl.constexpr(32.0)  # a mass below 2e-14
_KEYS_PER_UNIT: tl.constexpr = tl.constexpr(2.0**30)
_LAST_KEY: tl.constexpr = tl.constexpr((1 << 35) - 1)
NO_KEY: tl.constexpr = tl.constexpr(1 << 60)

UNSPECIALIZED = (
    "first", "group", "step", "num_places", "level", "width", "num_bests", "num_rows", "size",
)  # fmt: skip
"""What the machine code must not depend on."""


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

    group   rows of each place: the target's, or all that a draft has drawn of in a step
    DRAFTS  it is the draft's
    """
    place = number // group
    index = step + number % group
    stream = tl.load(streams_ptr + place)
    num_draft = tl.load(num_draft_ptr + place)
    is_copied = tl.load(is_copied_ptr + place)
    is_there = stream >= 0
    if DRAFTS:
        is_there &= (index < num_draft) & (is_copied == 0)
    else:
        is_there &= index <= num_draft
        is_more = (stream < -1) & (is_copied < 0)
        is_there |= is_more & (index <= num_draft)
        index = tl.where(is_more, index - is_copied, index)
        stream = tl.where(is_more, -2 - stream, stream)
    return tl.maximum(stream, 0), index, is_there


@triton.jit
def gaps_of(logits_ptr, is_unused_ptr, temperature, peak, column, is_column):
    """Logits of some columns of a row, their gaps to its peak, and keys.

    peak  the best logit. What is not in use has it, too, but NO_KEY
    """
    logits = tl.load(logits_ptr + column, mask=is_column, other=-float("inf"))
    is_unused = tl.load(is_unused_ptr + column, mask=is_column, other=1)
    is_usable = (logits > -float("inf")) & (is_unused == 0)
    logits = tl.where(is_usable, logits.to(tl.float64), peak)
    gap = (peak - logits) * (1.0 / temperature)  # a division of each would be half of `narrow`
    key = (tl.minimum(gap, _WIDEST) * _KEYS_PER_UNIT).to(tl.int64)
    return logits, gap, tl.where(is_usable, tl.minimum(key, _LAST_KEY), NO_KEY)
