"""One side against another on the same prompts: the ratio of their rates, and what it says."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from specpipe.bench.metrics import CountTokens, time_answer
from specpipe.endpoints.base import Answer
from specpipe.errors import RuntimeUnavailable

Outcome = Literal["gain", "loss", "no difference"]

CONFIDENCE = 0.95
_NUM_RESAMPLES = 9999


@dataclass(frozen=True)
class Spent:
    """What one side needed for one prompt, over all rounds."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One concurrency: rate of a side / rate of the baseline, with the interval of the ratio.

    low, high              None with less than two prompts
    num_prompts            those with complete answers only, and at least one token, on both sides
    num_differing_prompts  those whose text was not the same on both sides
    """

    concurrency: int
    ratio: float
    low: float | None
    high: float | None
    num_prompts: int
    num_differing_prompts: int

    @property
    def outcome(self) -> Outcome:
        """A gain or a loss only where the whole interval says so."""
        if self.low is not None and self.low > 1.0:
            return "gain"
        if self.high is not None and self.high < 1.0:
            return "loss"
        return "no difference"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "confidence": CONFIDENCE, "outcome": self.outcome}


def compare(
    baseline: Mapping[str, Sequence[Answer]],
    side: Mapping[str, Sequence[Answer]],
    *,
    concurrency: int,
    count_tokens: CountTokens | None = None,
    seed: int = 0,
) -> Comparison | None:
    """Compares the answers to each prompt, by its name; None when no prompt can be compared.

    The ratio is that of tokens per second of a stream, over all prompts. Its interval is found by
    drawing prompts, each with all its rounds on both sides: what a prompt is like, and what it
    shared a round with, is then no noise.
    """
    spent = {
        name: (before, after)
        for name in baseline
        if (before := _spent(baseline[name], count_tokens))
        and (after := _spent(side.get(name, ()), count_tokens))
    }
    if not spent:
        return None
    table = np.array(
        [(b.num_tokens, b.seconds, s.num_tokens, s.seconds) for b, s in spent.values()],
        dtype=np.float64,
    ).T
    low, high = _interval(table, seed) if len(spent) > 1 else (None, None)
    return Comparison(
        concurrency=concurrency,
        ratio=float(_ratio(*table)),
        low=low,
        high=high,
        num_prompts=len(spent),
        num_differing_prompts=sum(
            len({answer.text for answer in (*baseline[name], *side[name])}) > 1 for name in spent
        ),
    )


def verdict(comparisons: Sequence[Comparison], *, side: str, baseline: str) -> str:
    """Says in words where one side gains and loses, and between which concurrencies it turns."""
    if not comparisons:
        return f"{side} could not be compared with {baseline}: no prompt was answered by both."
    ordered = sorted(comparisons, key=lambda found: found.concurrency)
    sentences = [
        f"{side} is {words} {baseline} at concurrency "
        f"{_listed([_figure(found) for found in ordered if found.outcome == outcome])}."
        for outcome, words in (
            ("gain", "faster than"),
            ("loss", "slower than"),
            ("no difference", "neither faster nor slower, as far as this run can tell, than"),
        )
        if any(found.outcome == outcome for found in ordered)
    ]
    return " ".join([*sentences, *_turning_points(ordered)])


def _turning_points(ordered: Sequence[Comparison]) -> list[str]:
    decided = [found for found in ordered if found.outcome != "no difference"]
    sentences = []
    for earlier, later in zip(decided, decided[1:], strict=False):
        if earlier.outcome != later.outcome:
            sentences.append(
                f"The {earlier.outcome} turns into a {later.outcome} between concurrency "
                f"{earlier.concurrency} and {later.concurrency}."
            )
    return sentences


def _figure(found: Comparison) -> str:
    if found.low is None or found.high is None:
        return f"{found.concurrency} ({found.ratio:.2f} times its rate)"
    return (
        f"{found.concurrency} ({found.ratio:.2f} times its rate, "
        f"{CONFIDENCE:.0%} interval {found.low:.2f} to {found.high:.2f})"
    )


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _spent(answers: Sequence[Answer], count_tokens: CountTokens | None) -> Spent | None:
    """None for a prompt that says nothing of speed: an answer is not complete, or nobody counted
    its tokens, or there were none.
    """
    if not answers or not all(answer.is_complete for answer in answers):
        return None
    counts = [time_answer(answer, count_tokens).num_output_tokens for answer in answers]
    seconds = sum(answer.ended_s - answer.started_s for answer in answers)
    num_tokens = sum(count for count in counts if count is not None)
    if None in counts or not num_tokens or not seconds:
        return None
    return Spent(num_tokens, seconds)


def _ratio(
    baseline_tokens: Any, baseline_s: Any, side_tokens: Any, side_s: Any, axis: int = -1
) -> Any:
    sums = (np.sum(a, axis=axis) for a in (side_tokens, side_s, baseline_tokens, baseline_s))
    tokens, seconds, tokens_before, seconds_before = sums
    return (tokens / seconds) / (tokens_before / seconds_before)


def require_scipy() -> None:
    """Raises RuntimeUnavailable where two sides could not be compared: better before they ran."""
    if importlib.util.find_spec("scipy") is None:
        raise RuntimeUnavailable(
            "comparing two sides needs 'scipy': pip install 'specpipe[evaluate]'"
        )


def _interval(table: np.ndarray[Any, Any], seed: int) -> tuple[float, float]:
    """The bias-corrected and accelerated bootstrap interval (Efron 1987) of the ratio."""
    from scipy import stats

    drawn = {
        "statistic": _ratio,
        "paired": True,
        "vectorized": True,
        "confidence_level": CONFIDENCE,
        "n_resamples": _NUM_RESAMPLES,
    }
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        # Where all resamples are alike, as with prompts that all gain the same, BCa is not defined.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        found = stats.bootstrap(
            tuple(table), method="BCa", rng=np.random.default_rng(seed), **drawn
        ).confidence_interval
    if np.isfinite(found.low) and np.isfinite(found.high):
        return float(found.low), float(found.high)
    found = stats.bootstrap(
        tuple(table), method="percentile", rng=np.random.default_rng(seed), **drawn
    ).confidence_interval
    return float(found.low), float(found.high)
