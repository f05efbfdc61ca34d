"""What a draft length should gain: the published model, and the same with what was measured.

K draft tokens a step, α the probability that a draft token is accepted, c the time of a draft step
relative to a plain target step. Leviathan et al. 2023, arXiv:2211.17192, take every draft token to
be accepted with one α, independently, and verification to cost no more than a plain step: a step
then emits (1 - α^(K+1)) / (1 - α) tokens (eq. 1) in the time of K c + 1 plain ones (theorem 3.8).

Both simplifications can be measured instead: acceptance differs by position, and verifying more
rows costs more. A forward that is bound by memory reads the weights once, whatever it computes, and
adds a little for each row: a + b·rows.

A draft that proposes all tokens in one pass takes c for them together, and not K c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specpipe.speculative.adaptive import expected_tokens

if TYPE_CHECKING:
    from specpipe.evaluate.tune.costs import LoadCosts


def published_speed_up(alpha: float, cost_ratio: float, num_draft_tokens: int) -> float:
    """Returns the speed with K draft tokens over that of the target alone, by theorem 3.8."""
    return expected_tokens(alpha, num_draft_tokens) / (num_draft_tokens * cost_ratio + 1.0)


def measured_tokens(rates: Sequence[float], num_draft_tokens: int) -> float:
    """Returns the tokens of a step that accepts position i at rates[i - 1], given those before it.

    1 + r1 + r1 r2 + ...: the target's own token, and each draft token that all before it reached.
    """
    return 1.0 + float(np.cumprod(rates[:num_draft_tokens]).sum())


@dataclass(frozen=True)
class LinearFit:
    """y = intercept + slope · x, and how far the worst measurement is from it, in parts of it."""

    intercept: float
    slope: float
    max_relative_error: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def fit_line(points: Sequence[tuple[float, float]]) -> LinearFit:
    """Returns the line of least squares through (x, y); with a single x it is flat."""
    x, y = np.array(points, dtype=np.float64).T
    columns = [np.ones_like(x)] if np.ptp(x) == 0 else [np.ones_like(x), x]
    line = [*np.linalg.lstsq(np.stack(columns, axis=1), y, rcond=None)[0].tolist(), 0.0]
    intercept, slope = line[:2]
    errors = np.abs(intercept + slope * x - y) / y
    return LinearFit(intercept, slope, float(errors.max()))


@dataclass(frozen=True)
class MemoryBound:
    """Seconds of both models' forwards by rows, and of the rest of a step by its draft tokens.

    draft        over B rows, one for each request, or B (K + 1) where one pass gives all tokens
    target       over B (K + 1) rows
    is_parallel  one pass of the draft gives all tokens
    """

    draft: LinearFit
    target: LinearFit
    is_parallel: bool = False

    @classmethod
    def fit(cls, costs: Sequence[LoadCosts]) -> MemoryBound:
        passes = [
            (load.batch_size * (length + 1), seconds)
            for load in costs
            for length, seconds in (load.pass_s or {}).items()
        ]
        return cls(
            fit_line(passes or [(load.batch_size, load.draft_s) for load in costs]),
            fit_line(
                [
                    (load.batch_size * (length + 1), seconds)
                    for load in costs
                    for length, seconds in load.verify_s.items()
                ]
            ),
            is_parallel=bool(passes),
        )

    def speed_up(self, tokens: float, batch_size: int, num_draft_tokens: int) -> float:
        """Returns the speed-up by forwards alone: this model knows nothing else of a step."""
        plain, num_rows = self.target.at(batch_size), batch_size * (num_draft_tokens + 1)
        drafting = num_draft_tokens * self.draft.at(batch_size)
        if self.is_parallel:
            drafting = self.draft.at(num_rows)
        return tokens * plain / (drafting + self.target.at(num_rows))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What K draft tokens should gain at one load, as factors of the target alone.

    published     one α, one cost ratio c: Leviathan et al.
    memory_bound  acceptance by position, forwards of a + b·rows
    speed_up      acceptance by position, every cost as it was measured at this load
    """

    concurrency: int
    num_draft_tokens: int
    expected_tokens: float
    published: float
    memory_bound: float
    speed_up: float


def predict(
    alpha: float, rates: Sequence[float], costs: Sequence[LoadCosts], max_draft_len: int
) -> list[Prediction]:
    """Returns a prediction of every draft length at every load.

    Both models are of decoding; neither says anything of reading the prompt.
    """
    memory_bound = MemoryBound.fit(costs)
    predictions = []
    for load in costs:
        for length in range(1, max_draft_len + 1):
            tokens = measured_tokens(rates, length)
            cost_ratio = load.drafting(length) / length / load.verify(0)
            predictions.append(
                Prediction(
                    concurrency=load.batch_size,
                    num_draft_tokens=length,
                    expected_tokens=tokens,
                    published=published_speed_up(alpha, cost_ratio, length),
                    memory_bound=memory_bound.speed_up(tokens, load.batch_size, length),
                    speed_up=tokens * load.step_s(0) / load.step_s(length),
                )
            )
    return predictions
