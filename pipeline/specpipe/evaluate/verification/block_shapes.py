"""How the target's own logits, and what it chooses by them, move with the shape of a forward.

V is the vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specpipe.evaluate.verification.scorer import ScoredText, Scorer, rows_of
from specpipe.speculative.noise import Floats

_NUM_COMPETING = 100
"""How many of the best tokens are compared between block shapes: no other one can win."""

_QUANTILE = 0.999
"""The quantile of differences that a tie may reach: the largest would depend on one outlier."""


@dataclass(frozen=True)
class BlockDifference:
    """The 99.9th percentile of what logit differences move by, and over how many it was taken."""

    value: float
    num_compared: int


def measure_block_difference(
    scorer: Scorer, texts: Sequence[ScoredText], block_sizes: Sequence[int]
) -> BlockDifference:
    """Returns how reading texts in blocks, or together, differs from doing so token by token.

    What is compared are the distances of the best tokens' logits to the best one.
    """
    texts = [text for text in texts if text.output]
    plain = [rows_of(scorer, text) for text in texts]
    shapes = [(texts[i : i + 1], size, i) for size in block_sizes for i in range(len(texts))]
    at_once = scorer.max_batch_size
    shapes += [(texts[i : i + at_once], 1, i) for i in range(0, len(texts), at_once)]
    moves = [
        _moves(plain[index], rows)
        for batch, block_size, first in shapes
        for index, rows in enumerate(scorer.read(batch, block_size), first)
    ]
    if not moves:
        return BlockDifference(0.0, 0)
    differences = np.concatenate(moves)
    return BlockDifference(
        float(np.quantile(differences, _QUANTILE, method="higher")), differences.size
    )


@dataclass(frozen=True)
class Agreement:
    """How often the target chooses the same token whatever the shape of the forward."""

    num_same: int
    num_compared: int

    @property
    def rate(self) -> float:
        return self.num_same / self.num_compared if self.num_compared else 1.0

    @property
    def least_rate(self) -> float:
        """The rate less what chance makes of it."""
        return less_chance(self.rate, self.num_compared)


def less_chance(rate: float, num_trials: float) -> float:
    """Returns the least rate from which chance makes one that was found in so many trials.

    It is three of its standard errors below the one that was found: the lower end of Wilson's
    interval (1927, 10.1080/01621459.1927.10502953). The standard error of what was found would be
    0 where all trials came out alike, however few they are.
    """
    if num_trials <= 0:
        return 0.0
    z2 = 3.0**2
    spread = math.sqrt(z2 * rate * (1.0 - rate) / num_trials + (z2 / (2.0 * num_trials)) ** 2)
    return max((rate + z2 / (2.0 * num_trials) - spread) / (1.0 + z2 / num_trials), 0.0)


def measure_agreement(
    scorer: Scorer,
    texts: Sequence[ScoredText],
    block_size: int,
    choose: Callable[[int, Floats], Sequence[int]],
) -> Agreement:
    """Reads texts one token at a time and in blocks; `choose` gives what is chosen of the rows of
    the text with that index.
    """
    num_same = num_compared = 0
    for index, text in enumerate(texts):
        single, block = (choose(index, scorer.read([text], size)[0]) for size in (1, block_size))
        num_same += sum(a == b for a, b in zip(single, block, strict=True))
        num_compared += len(single)
    return Agreement(num_same, num_compared)


def _moves(plain: Floats, other: Floats) -> Floats:
    """Returns how far the best tokens' distances to the best one are apart in two sets [N, V]."""
    num_competing = min(_NUM_COMPETING, plain.shape[1])
    best = np.argpartition(-plain, num_competing - 1, axis=1)[:, :num_competing]
    first = plain.argmax(axis=1)[:, None]
    distances = [
        np.take_along_axis(rows, best, 1) - np.take_along_axis(rows, first, 1)
        for rows in (plain, other)
    ]
    with np.errstate(invalid="ignore"):  # ids that are not used, where few are
        moves = np.abs(distances[0] - distances[1])
    # The best token's distance to itself is no evidence.
    evidence: Floats = moves[np.isfinite(moves) & (best != first)]
    return evidence
