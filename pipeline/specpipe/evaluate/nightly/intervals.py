"""Rates over prompts and their ratios, with intervals for other prompts of the same kind.

a_i of d_i draft tokens of prompt i are accepted; the rate R is the sum of all a over that of all d.
Greedy answers are the same every time: what is left to chance is which prompts were taken, so that
they, not tokens, are the sample. The error of R follows from the residuals a_i - R d_i (Cochran
1977, Sampling Techniques, 6.3), and the interval takes Student's t for the number of prompts. A few
prompts are no sample: of them the interval says whether these themselves differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Counts = Sequence[tuple[int, int]]
"""Accepted tokens and those that they are accepted of, a pair for each prompt."""

Array = np.ndarray[Any, np.dtype[np.float64]]

_FEWEST_PROMPTS = 8
"""Fewer say little of prompts in general: of them alone is spoken, and their tokens are the sample.
A guess."""
_FEWEST_TOKENS = 10
"""Accepted tokens that are to be expected at least, as for the normal approximation of a count."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and its interval; without ends where there is too little to tell."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def rate(counts: Counts, confidence: float) -> Estimate | None:
    """Returns the rate; None where nothing was drafted."""
    table = np.array(counts, dtype=np.float64).reshape(-1, 2)
    table = table[table[:, 1] > 0]
    if not len(table):
        return None
    value, residuals = _residuals(table)
    half = _quantile(len(table), confidence) * math.sqrt(float(residuals @ residuals))
    return Estimate(value=value, low=max(value - half, 0.0), high=min(value + half, 1.0))


def ratio(now: Counts, before: Counts, confidence: float) -> Estimate | None:
    """Returns the ratio of two rates over the same prompts, in their order; None by a rate of 0.

    Drawing prompts draws both of their answers, so that what makes one easy is no noise. The
    interval is Fieller's (1954): all m for which R - m R_before may be 0. It has no ends where too
    few tokens stand against chance, or where the rate before may itself be 0.
    """
    table = np.array([(*a, *b) for a, b in zip(now, before, strict=True)], dtype=np.float64)
    table = table.reshape(-1, 4)
    table = table[(table[:, 1] > 0) & (table[:, 3] > 0)]
    if not len(table) or not table[:, 2].any():
        return None
    (rate_now, x), (rate_before, y) = _residuals(table[:, :2]), _residuals(table[:, 2:])
    value = rate_now / rate_before
    if rate_before * table[:, 1].sum() < _FEWEST_TOKENS:
        return Estimate(value=value)
    covariance = float(x @ y) if len(table) >= _FEWEST_PROMPTS else 0.0
    t2 = _quantile(len(table), confidence) ** 2
    # (rate_now - m rate_before)² <= t² var(rate_now - m rate_before), a quadratic in m.
    a = rate_before**2 - t2 * float(y @ y)
    b = rate_now * rate_before - t2 * covariance
    c = rate_now**2 - t2 * float(x @ x)
    if a <= 0:
        return Estimate(value=value)
    root = math.sqrt(max(b * b - a * c, 0.0))
    return Estimate(value=value, low=max((b - root) / a, 0.0), high=(b + root) / a)


def _residuals(table: Array) -> tuple[float, Array]:
    """Returns the rate, and errors whose squares add up to its variance: one of each prompt.

    Of few prompts it is one of all tokens, with one more of either kind than there are, so that a
    rate of 0 has an error too.
    """
    accepted, judged = table[:, 0], table[:, 1]
    num_prompts, total = len(table), float(judged.sum())
    value = float(accepted.sum()) / total
    if num_prompts < _FEWEST_PROMPTS:
        likely = (float(accepted.sum()) + 1.0) / (total + 2.0)
        return value, np.array([math.sqrt(likely * (1.0 - likely) / total)])
    scale = math.sqrt(num_prompts / (num_prompts - 1)) / total
    return value, scale * (accepted - value * judged)


def _quantile(num_prompts: int, confidence: float) -> float:
    from scipy import stats

    upper = (1.0 + confidence) / 2.0
    if num_prompts < _FEWEST_PROMPTS:
        return float(stats.norm.ppf(upper))
    return float(stats.t.ppf(upper, num_prompts - 1))
