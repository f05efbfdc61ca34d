"""One side against another on the same prompts: the ratio of their rates, and what it says."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from specpipe.errors import RuntimeUnavailable
from specpipe.evaluate.bench.metrics import CountTokens, time_answer
from specpipe.evaluate.endpoints.base import TimedAnswer
from specpipe.machine.libraries import with_extras

ComparisonOutcome = Literal["gain", "loss", "no difference"]

Rates = np.ndarray[Any, np.dtype[np.float64]]

CONFIDENCE = 0.95
_NUM_RESAMPLES = 9999  # scipy's own default


@dataclass(frozen=True, kw_only=True)
class RateComparison:
    """One concurrency: rate of a side / rate of the baseline, with the interval of the ratio.

    low, high              None with less than two prompts
    round_ratios           that of each round by itself; the interval holds them all
    num_prompts            those with complete answers only, and at least one token, on both sides
    num_differing_prompts  those whose text was not the same on both sides
    """

    concurrency: int
    ratio: float
    low: float | None
    high: float | None
    round_ratios: tuple[float, ...] = ()
    num_prompts: int
    num_differing_prompts: int

    @property
    def outcome(self) -> ComparisonOutcome:
        """A gain or a loss only where the whole interval says so."""
        if self.low is not None and self.low > 1.0:
            return "gain"
        if self.high is not None and self.high < 1.0:
            return "loss"
        return "no difference"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "confidence": CONFIDENCE, "outcome": self.outcome}


def compare(
    baseline: Mapping[str, Sequence[TimedAnswer]],
    side: Mapping[str, Sequence[TimedAnswer]],
    *,
    concurrency: int,
    count_tokens: CountTokens | None = None,
    seed: int = 0,
) -> RateComparison | None:
    """Returns the comparison of the answers to each prompt, by its name; None if there is none.

    A prompt has one answer for each round, on both sides. The ratio is that of tokens per second of
    a stream, over all prompts. Its interval is found by drawing prompts, each with all its rounds
    on both sides: what a prompt is like, and what it shared a round with, is then no noise. What
    else a machine does for the time of a round hits many prompts at once, and no draw of prompts
    shows it: so the interval is widened to hold the ratio of each round.
    """
    spent = {
        name: np.concatenate([before, after])
        for name in baseline
        if (before := _spent(baseline[name], count_tokens)) is not None
        and (after := _spent(side.get(name, ()), count_tokens)) is not None
    }
    if not spent:
        return None
    table = np.array(list(spent.values()))  # [prompts, 4, rounds]
    by_round = tuple(float(_ratio(*one_round)) for one_round in table.transpose(2, 1, 0))
    low, high = None, None
    if len(spent) > 1:
        drawn_low, drawn_high = _interval(table.sum(axis=2).T, seed)
        low, high = min(drawn_low, *by_round), max(drawn_high, *by_round)
    return RateComparison(
        concurrency=concurrency,
        ratio=float(_ratio(*table.sum(axis=2).T)),
        low=low,
        high=high,
        round_ratios=by_round,
        num_prompts=len(spent),
        num_differing_prompts=sum(
            len({answer.text for answer in (*baseline[name], *side[name])}) > 1 for name in spent
        ),
    )


def verdict(comparisons: Sequence[RateComparison], *, side: str, baseline: str) -> str:
    """Returns where one side gains, where it loses, and where that turns, in words."""
    subject, than = _begun(side), f" than {baseline}"
    if not comparisons:
        return f"{subject} could not be compared with {baseline}: no prompt was answered by both."
    ordered = sorted(comparisons, key=lambda comparison: comparison.concurrency)
    sentences = []
    for outcome, words, aside in (
        ("gain", "faster", ""),
        ("loss", "slower", ""),
        ("no difference", "neither faster nor slower", ", as far as this run can tell,"),
    ):
        figures = [_figure(comparison) for comparison in ordered if comparison.outcome == outcome]
        if figures:
            where = f"at concurrency {_listed(figures)}"
            sentences.append(f"{subject} is {words}{than}{aside} {where}.")
            subject, than = "It", ""
    return " ".join([*sentences, *_turning_points(ordered)])


def _begun(name: str) -> str:
    """Returns a name as a sentence begins with it; a URL stays as it is."""
    return name if "://" in name else name[:1].upper() + name[1:]


def _turning_points(ordered: Sequence[RateComparison]) -> list[str]:
    decided = [comparison for comparison in ordered if comparison.outcome != "no difference"]
    sentences = []
    for earlier, later in zip(decided, decided[1:], strict=False):
        if earlier.outcome != later.outcome:
            sentences.append(
                f"The {earlier.outcome} turns into a {later.outcome} between concurrency "
                f"{earlier.concurrency} and {later.concurrency}."
            )
    return sentences


def _figure(comparison: RateComparison) -> str:
    if comparison.low is None or comparison.high is None:
        return f"{comparison.concurrency} ({comparison.ratio:.2f} times its rate)"
    return (
        f"{comparison.concurrency} ({comparison.ratio:.2f} times its rate, "
        f"{100 * CONFIDENCE:.0f} % interval {comparison.low:.2f} to {comparison.high:.2f})"
    )


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _spent(answers: Sequence[TimedAnswer], count_tokens: CountTokens | None) -> Rates | None:
    """Returns the tokens and the seconds of each answer, [2, rounds].

    None for a prompt that says nothing of speed: an answer is not complete, or its tokens were not
    counted, or there were none.
    """
    if not answers or not all(answer.is_complete for answer in answers):
        return None
    counts = [time_answer(answer, count_tokens).num_output_tokens for answer in answers]
    seconds = [answer.ended_s - answer.started_s for answer in answers]
    if not all(counts) or not all(seconds):
        return None
    return np.array([counts, seconds], dtype=np.float64)


def _ratio(
    baseline_tokens: Any, baseline_s: Any, side_tokens: Any, side_s: Any, axis: int = -1
) -> Any:
    sums = (np.sum(a, axis=axis) for a in (side_tokens, side_s, baseline_tokens, baseline_s))
    tokens, seconds, tokens_before, seconds_before = sums
    return (tokens / seconds) / (tokens_before / seconds_before)


def require_scipy() -> None:
    """Raises RuntimeUnavailable where two sides could not be compared: better before they ran."""
    if importlib.util.find_spec("scipy") is None:
        raise RuntimeUnavailable(f"comparing two sides needs 'scipy': {with_extras('evaluate')}")


def _interval(table: Rates, seed: int) -> tuple[float, float]:
    """Returns the bias-corrected and accelerated bootstrap interval (Efron 1987) of the ratio.

    Widened by what a bootstrap of few is too narrow: the spread of n draws is that of a mean with
    n for n - 1, and the normal distribution's quantile stands for Student's (Hesterberg 2015).
    """
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
        interval = stats.bootstrap(
            tuple(table), method="BCa", rng=np.random.default_rng(seed), **drawn
        ).confidence_interval
    if not (np.isfinite(interval.low) and np.isfinite(interval.high)):
        interval = stats.bootstrap(
            tuple(table), method="percentile", rng=np.random.default_rng(seed), **drawn
        ).confidence_interval
    quantile, num_prompts = (1 + CONFIDENCE) / 2, table.shape[1]
    widened = stats.t.ppf(quantile, num_prompts - 1) / stats.norm.ppf(quantile)
    widened *= math.sqrt(num_prompts / (num_prompts - 1))
    ratio = float(_ratio(*table))
    return ratio * (interval.low / ratio) ** widened, ratio * (interval.high / ratio) ** widened
