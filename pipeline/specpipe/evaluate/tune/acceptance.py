"""How often the target accepts the draft token at each position of a step, on given prompts.

K draft tokens, P prompts. A position is judged only in steps that accepted all before it, so its
rate is conditional. What a step drafts first does not depend on how much it drafts, so the steps at
the largest K hold for every smaller one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specpipe.errors import ServerError
from specpipe.evaluate.tune.model import measured_tokens
from specpipe.progress import count
from specpipe.runtimes.pair.pair import Pair
from specpipe.speculative.request import Request

RoundCounts = Mapping[tuple[int, int], int]
"""Number of steps by draft tokens that were judged and those of them accepted."""

_NUM_RESAMPLES = 2000  # 50 of them lie beyond each percentile
_PERCENTILES = (2.5, 97.5)  # of a 95% interval


@dataclass(frozen=True, kw_only=True)
class Position:
    """One position, from 1. low and high are None with fewer than two prompts.

    num_judged  steps whose draft tokens before it were accepted, and that drafted this far
    rate        None where no step came this far
    """

    position: int
    num_judged: int
    num_accepted: int
    rate: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Tokens that a step of K draft tokens emits on average."""

    num_draft_tokens: int
    tokens: float
    low: float | None = None
    high: float | None = None

    @property
    def most(self) -> float:
        """The upper bound, or with a single prompt the average itself."""
        return max(self.tokens, self.high or 0.0)


@dataclass(frozen=True, kw_only=True)
class AcceptanceEstimate:
    """Acceptance over some prompts. Intervals hold 95%, drawing prompts: steps of one are alike.

    alpha  accepted over judged at all positions, the α of the published model; None where nothing
           was drafted
    """

    num_prompts: int
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    alpha: float | None
    positions: tuple[Position, ...]
    expected: tuple[Expected, ...]

    @classmethod
    def of(cls, rounds: Sequence[RoundCounts], max_draft_len: int) -> AcceptanceEstimate:
        """Returns the sum over the steps of each prompt."""
        judged, accepted = (
            np.array([position_counts(r, max_draft_len)[which] for r in rounds], dtype=np.float64)
            for which in (0, 1)
        )
        total_judged, total_accepted = judged.sum(axis=0), accepted.sum(axis=0)
        rates = [a / j if j else None for a, j in zip(total_accepted, total_judged, strict=True)]
        drawn_rates = _draw_rates(judged, accepted)
        drawn_tokens = 1.0 + np.nan_to_num(drawn_rates).cumprod(axis=1).cumsum(axis=1)
        return cls(
            num_prompts=len(rounds),
            num_steps=sum(sum(r.values()) for r in rounds),
            num_draft_tokens=sum(k * count for r in rounds for (k, _), count in r.items()),
            num_accepted_tokens=int(total_accepted.sum()),
            alpha=float(total_accepted.sum() / total_judged.sum()) if total_judged.any() else None,
            positions=tuple(
                Position(
                    position=index + 1,
                    num_judged=int(total_judged[index]),
                    num_accepted=int(total_accepted[index]),
                    rate=None if rate is None else float(rate),
                    **_interval(drawn_rates[:, index]),
                )
                for index, rate in enumerate(rates)
            ),
            expected=tuple(
                Expected(
                    num_draft_tokens=length,
                    tokens=measured_tokens([rate or 0.0 for rate in rates], length),
                    **_interval(drawn_tokens[:, length - 1]),
                )
                for length in range(1, max_draft_len + 1)
            ),
        )

    @property
    def rates(self) -> tuple[float, ...]:
        """Rates by position; one that no step reached counts as never accepted."""
        return tuple(position.rate or 0.0 for position in self.positions)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def position_counts(rounds: RoundCounts, max_draft_len: int) -> tuple[list[int], list[int]]:
    """Returns how many steps judged and accepted each position."""
    positions = range(1, max_draft_len + 1)
    judged = [
        sum(count for (k, n), count in rounds.items() if k >= i and n >= i - 1) for i in positions
    ]
    accepted = [sum(count for (_, n), count in rounds.items() if n >= i) for i in positions]
    return judged, accepted


def _draw_rates(judged: Any, accepted: Any) -> Any:
    """Returns rates [resamples, K] of prompts drawn with replacement; NaN: none got there."""
    num_prompts = len(judged)
    if num_prompts < 2:
        return np.full((1, judged.shape[1]), np.nan)
    drawn = np.random.default_rng(0).integers(num_prompts, size=(_NUM_RESAMPLES, num_prompts))
    with np.errstate(invalid="ignore"):
        return accepted[drawn].sum(axis=1) / judged[drawn].sum(axis=1)


def _interval(drawn: Any) -> dict[str, float]:
    """Returns the bounds; {} where one prompt is all there is, or none got there."""
    drawn = drawn[~np.isnan(drawn)]
    if drawn.size < 2:
        return {}
    low, high = np.percentile(drawn, _PERCENTILES)
    return {"low": float(low), "high": float(high)}


def run_requests(
    pair: Pair, requests: Sequence[Request], *, at_once: int
) -> dict[str, RoundCounts]:
    """Runs requests, up to at_once of them together; returns the steps of each by its id."""
    rounds: dict[str, RoundCounts] = {}
    waiting = deque(requests)
    num_running = 0
    with count(len(requests), "answers") as answered:
        while waiting or num_running:
            while waiting and num_running < at_once:
                pair.submit(waiting.popleft())
                num_running += 1
            for chunk in pair.step():
                if chunk.finish_reason is None:
                    continue
                num_running -= 1
                if chunk.finish_reason == "error":
                    raise ServerError(f"prompt {chunk.request_id} failed: {chunk.error}")
                assert chunk.counts is not None
                rounds[chunk.request_id] = chunk.counts.steps
                answered.advance()
    return rounds
