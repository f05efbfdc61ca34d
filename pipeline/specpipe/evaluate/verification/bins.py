"""A partition of answers by how they begin, each part of it likely enough to be counted.

C is the number of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from specpipe.speculative.noise import Floats

MAX_NUM_BINS = 25
"""Parts of a partition at most; a test of more parts needs more samples. A guess."""

MIN_EXPECTED = 10.0
"""Times that a part is expected in a sample, at least; chi-squared is inexact for rare parts. Twice
the 5 of the usual rule."""

Beginning = tuple[int, ...]
"""The first tokens of an answer; END where an end id came, OTHER for the pooled rest."""

END, OTHER = -1, -2


@dataclass(frozen=True)
class Bins:
    """A partition of all answers by their beginnings, and the probability of each part.

    probs [C] sums to 1; index holds the bin of a beginning; those of `split` are not in it, but
    what may follow them is, OTHER among it.
    """

    probs: Floats
    index: Mapping[Beginning, int]
    split: frozenset[Beginning]

    def place(self, beginning: Beginning) -> int:
        """Returns the bin of an answer's beginning."""
        prefix: Beginning = ()
        for token_id in beginning:
            following = (*prefix, token_id)
            if following in self.index:
                return self.index[following]
            if following not in self.split:
                break
            prefix = following
        rest: Beginning = (*prefix, OTHER)
        return self.index[rest]


def make_bins(
    next_probs: Callable[[Beginning], dict[int, float]], *, num_tokens: int, num_samples: int
) -> Bins:
    """Partitions the beginnings of num_tokens tokens so that each part is expected MIN_EXPECTED
    times.

    next_probs gives the tokens that may follow a beginning, END among them, with their
    probabilities.
    """
    smallest = MIN_EXPECTED / num_samples
    parts: list[tuple[float, list[Beginning]]] = []
    rare: list[tuple[float, Beginning]] = []
    prefixes = []

    def split(prefix: Beginning, prob: float) -> None:
        prefixes.append(prefix)
        rest = prob
        following = sorted(next_probs(prefix).items(), key=lambda item: -item[1])
        for token_id, conditional in following:
            joint = prob * conditional
            if joint < smallest:
                break
            rest -= joint
            beginning = (*prefix, token_id)
            if len(beginning) == num_tokens or token_id == END:
                parts.append((joint, [beginning]))
            else:
                split(beginning, joint)
        rare.append((max(rest, 0.0), (*prefix, OTHER)))

    split((), 1.0)
    parts.sort(key=lambda part: -part[0])
    pooled = sum(prob for prob, _ in rare)
    members = [beginning for _, beginning in rare]
    while parts and (len(parts) >= MAX_NUM_BINS or pooled < smallest):
        prob, beginnings = parts.pop()
        pooled += prob
        members += beginnings
    parts.append((pooled, members))
    probs = np.array([prob for prob, _ in parts])
    index = {
        beginning: place for place, (_, beginnings) in enumerate(parts) for beginning in beginnings
    }
    return Bins(probs / probs.sum(), index, frozenset(prefixes))
