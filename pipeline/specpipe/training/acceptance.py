"""How much of what a draft proposes would stand, measured on texts that the target wrote.

A tokens of an answer, K draft tokens of a step, G groups. The draft reads the text itself, which is
what it would have read as long as its tokens stand, so one pass tells every step that decoding
could take. On a greedy answer that is exact: a draft token stands where it is the text's. On a
sampled one a draft token stands with the chance Σ min(p, q) at temperature 1 (Leviathan et al.
2023, arXiv:2211.17192, Corollary 3.6), whichever token the text has there: an estimate, since what
is accepted more often may also be followed by easier places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Chances = npt.NDArray[np.float64]

_NUM_RESAMPLES = 10_000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Counts:
    """What was counted over texts; steps are expected ones where texts are sampled.

    num_tokens    of the answers
    num_steps     that decoding takes for them
    drafted       of each position of a step, how often all before it stood, [K]
    accepted      how often it stood too, [K]
    num_rows      places at which the draft proposed one token
    num_agreeing  of them, where the most likely ids of draft and target are one
    sum_overlap   Σ min(p, q) at temperature 1 over them
    """

    num_tokens: float
    num_steps: float
    drafted: Chances
    accepted: Chances
    num_rows: float
    num_agreeing: float
    sum_overlap: float

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in _FIELDS))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a step."""
        return self.num_tokens / self.num_steps

    @property
    def by_position(self) -> list[float]:
        """Of each position of a step, the share that stood where all before it did, [K]."""
        return [
            float(a / d) if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "acceptance_length": round(self.acceptance_length, 4),
            "agreement": round(self.num_agreeing / self.num_rows, 4),
            "overlap": round(self.sum_overlap / self.num_rows, 4),
            "acceptance_by_position": [round(share, 4) for share in self.by_position],
            "num_tokens": int(self.num_tokens),
        }


_FIELDS = tuple(Counts.__dataclass_fields__)


@dataclass(frozen=True)
class Measured:
    """The counts of held-out answers by group, of greedy and of sampled ones; either may lack."""

    greedy: Mapping[str, Counts]
    sampled: Mapping[str, Counts]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a step over all answers."""
        return total([*self.greedy.values(), *self.sampled.values()]).acceptance_length

    def kinds(self) -> dict[str, Mapping[str, Counts]]:
        """Returns the counts by group of each kind of answer that there is."""
        both = {"greedy": self.greedy, "sampled": self.sampled}
        return {kind: counts for kind, counts in both.items() if counts}

    def to_json(self) -> dict[str, Any]:
        return {kind: total(list(c.values())).to_json() for kind, c in self.kinds().items()}


def count_text(chances: Chances, *, num_agreeing: int, sum_overlap: float) -> Counts:
    """Returns the counts of one answer.

    chances  that the draft token stands which a step proposes for place n + j, where the step
             begins at place n and all its tokens before that stand, at [n, j], [A, K]; what would
             lie beyond the text is not read

    The step emits those tokens and one of the target's, so each place is the beginning of a step
    with a chance that follows from those of the places before it. Chances of 0 and 1 make it the
    walk of greedy decoding.
    """
    num_tokens, most = chances.shape
    begins = np.zeros(num_tokens + most + 1)
    begins[0] = 1.0
    drafted, accepted = np.zeros(most), np.zeros(most)
    for place in range(num_tokens):
        if not begins[place]:
            continue
        # The last token of the text is the target's whatever is proposed for it.
        length = min(most, num_tokens - place)
        stands = begins[place] * np.cumprod(chances[place, :length])
        reached = np.concatenate(([begins[place]], stands))
        drafted[:length] += reached[:-1]
        accepted[:length] += stands
        begins[place + 1 : place + 1 + length] += reached[:-1] - stands
        begins[place + 1 + length] += stands[-1]
    return Counts(
        num_tokens,
        float(begins[:num_tokens].sum()),
        drafted,
        accepted,
        num_tokens,
        num_agreeing,
        sum_overlap,
    )


def autoregressive(values: Chances, num_draft_tokens: int) -> Chances:
    """Returns the chances [A, K] of a draft that reads its own tokens, from those of places [A].

    As long as its tokens stand, they are the text's.
    """
    padded = np.concatenate((values, np.zeros(num_draft_tokens)))
    return np.lib.stride_tricks.sliding_window_view(padded, num_draft_tokens)[: len(values)]


def total(counts: Sequence[Counts]) -> Counts:
    """Returns the sum of counts, of which there is one at least."""
    result = counts[0]
    for more in counts[1:]:
        result += more
    return result


@dataclass(frozen=True)
class Gain:
    """How much longer the steps of a new draft are; low and high bound 95 % of resamples."""

    old: float
    new: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        return self.new - self.old

    def __str__(self) -> str:
        return (
            f"{self.old:.3f} → {self.new:.3f} tokens a step "
            f"({self.difference:+.3f}, 95 % interval {self.low:+.3f} to {self.high:+.3f}; "
            f"{100 * (self.new / self.old - 1):+.1f} %)"
        )


def compare(old: Mapping[str, Counts], new: Mapping[str, Counts]) -> Gain:
    """Returns the paired difference of the acceptance length on the same groups of texts.

    The interval is the bootstrap's percentiles (Efron 1979), drawing groups: texts of one file are
    alike.
    """
    assert old.keys() == new.keys(), "the drafts were measured on other groups"
    names = sorted(old)
    tokens = np.array([old[name].num_tokens for name in names])
    steps = np.array([[side[name].num_steps for name in names] for side in (old, new)])
    drawn = np.random.default_rng(0).integers(len(names), size=(_NUM_RESAMPLES, len(names)))
    lengths = tokens[drawn].sum(-1) / steps[:, drawn].sum(-1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(lengths[1] - lengths[0], [tail, 1 - tail])
    before, after = tokens.sum() / steps.sum(-1)
    return Gain(float(before), float(after), float(low), float(high))
