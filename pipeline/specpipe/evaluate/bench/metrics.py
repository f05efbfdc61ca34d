"""What answers under load come to: rates, times, acceptance. Only complete answers have times.

Failed and cut answers are counted, and the time that their streams spent on them is no one
else's; nothing else of them enters a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from specpipe.evaluate.bench.load import Load
from specpipe.evaluate.endpoints.base import TimedAnswer, Usage

CountTokens = Callable[[str], int]

_MAX_NUM_ERRORS = 5  # different ones that a result lists, the most frequent first


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of one complete answer.

    latency_s         from the question to the last output
    first_output_s    from the question to the first output; None for an answer without any
    num_first_tokens  tokens that came with the first output
    gaps_s            between outputs
    """

    num_output_tokens: int | None
    latency_s: float
    first_output_s: float | None = None
    num_first_tokens: int | None = None
    gaps_s: tuple[float, ...] = ()

    @property
    def decode_s(self) -> float:
        """Seconds from the first output to the last."""
        return self.latency_s - (self.first_output_s or 0.0)

    @property
    def num_decoded_tokens(self) -> int | None:
        """Tokens that came after the first output, in `decode_s`.

        A server that does not report how many came first is taken to have sent one.
        """
        if self.num_output_tokens is None:
            return None
        num_first = 1 if self.num_first_tokens is None else self.num_first_tokens
        return max(self.num_output_tokens - num_first, 0)

    @property
    def output_token_s(self) -> float | None:
        """Seconds per output token after the first output; None when none came after it."""
        return self.decode_s / self.num_decoded_tokens if self.num_decoded_tokens else None


def time_answer(answer: TimedAnswer, count_tokens: CountTokens | None = None) -> Timing:
    """Returns the times of a complete answer.

    Tokens are as the server counts them; where it does not, `count_tokens` counts them.
    """
    assert answer.is_complete
    outputs = [
        (piece, arrival_s - answer.started_s)
        for piece, arrival_s in zip(answer.pieces, answer.arrivals_s, strict=True)
        if piece.has_output
    ]
    num_output_tokens = answer.num_output_tokens
    if num_output_tokens is None and count_tokens is not None:
        num_output_tokens = count_tokens(answer.text)
    if not outputs:
        return Timing(
            num_output_tokens=num_output_tokens, latency_s=answer.ended_s - answer.started_s
        )
    first, first_output_s = outputs[0]
    num_first_tokens = first.num_tokens
    if num_first_tokens is None and count_tokens is not None:
        num_first_tokens = count_tokens(first.text)
    times_s = [time_s for _, time_s in outputs]
    return Timing(
        num_output_tokens=num_output_tokens,
        latency_s=times_s[-1],
        first_output_s=first_output_s,
        num_first_tokens=num_first_tokens,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(times_s)),
    )


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Some numbers in short; percentiles between two of them are interpolated."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float], *, mean: float | None = None) -> Distribution | None:
        """Returns the distribution of values, None for no values; `mean` replaces the plain one."""
        array = np.array(list(values), dtype=np.float64)
        if not array.size:
            return None
        p50, p90, p99 = (float(percentile) for percentile in np.percentile(array, (50, 90, 99)))
        return cls(
            mean=float(array.mean()) if mean is None else mean,
            p50=p50,
            p90=p90,
            p99=p99,
            max=float(array.max()),
        )


@dataclass(frozen=True, kw_only=True)
class AcceptanceTotals:
    """Drafted and accepted tokens, added up over answers.

    num_steps  None where a server does not report it; each server counts its own way whether steps
               without a draft token are among them (ours: they are)
    histogram  steps with a draft token by accepted tokens: 0, 1, …; None where it is not told
    """

    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int | None = None
    histogram: tuple[int, ...] | None = None

    @classmethod
    def of(cls, usages: Sequence[Usage | None]) -> AcceptanceTotals | None:
        """Returns the sum over answers; None unless each reports what was drafted and accepted."""
        reported = [usage for usage in usages if usage is not None]
        drafted = [usage.total_draft_tokens for usage in reported]
        accepted = [usage.total_accepted_draft_tokens for usage in reported]
        if not reported or len(reported) < len(usages) or None in drafted or None in accepted:
            return None
        steps = [usage.num_steps for usage in reported]
        histograms = [usage.acceptance_histogram for usage in reported]
        return cls(
            num_draft_tokens=_sum(drafted),
            num_accepted_tokens=_sum(accepted),
            num_steps=None if None in steps else _sum(steps),
            histogram=None if None in histograms else _sum_histograms(histograms),
        )

    @property
    def rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def length(self) -> float | None:
        """Mean tokens that a step emits, its bonus or recovered token included."""
        return 1 + self.num_accepted_tokens / self.num_steps if self.num_steps else None

    @property
    def per_position(self) -> tuple[float, ...] | None:
        """The share of drafted steps that accepted the token, for each position of a draft."""
        if self.histogram is None or not (num_drafted := sum(self.histogram)):
            return None
        return tuple(sum(self.histogram[n:]) / num_drafted for n in range(1, len(self.histogram)))

    def to_json(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "length": self.length,
            "per_position": self.per_position,
            "histogram": self.histogram,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_steps": self.num_steps,
        }


@dataclass(frozen=True, kw_only=True)
class LatencyLimits:
    """What an answer must keep to be good; None: no limit."""

    first_output_s: float | None = None
    output_token_s: float | None = None

    def are_kept(self, timing: Timing) -> bool:
        for limit, value in (
            (self.first_output_s, timing.first_output_s),
            (self.output_token_s, timing.output_token_s),
        ):
            if limit is not None and value is not None and value > limit:
                return False
        return True


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One side at one concurrency, over all its loads.

    Rates are those of all streams together: concurrency × what was done / seconds that the streams
    spent on it. As every stream is busy all the time, that is the rate of the server (Little's
    law), without a ramp and a tail in it.
    """

    concurrency: int
    num_answers: int
    num_failed: int
    num_cut: int
    errors: dict[str, int]
    num_output_tokens: int | None
    mean_input_tokens: float | None
    output_tokens_per_s: float | None
    answers_per_s: float
    good_answers_per_s: float
    first_output_s: Distribution | None
    output_token_s: Distribution | None
    gap_s: Distribution | None
    latency_s: Distribution | None
    acceptance: AcceptanceTotals | None
    tokens_counted_by: str

    @property
    def num_complete(self) -> int:
        return self.num_answers - self.num_failed - self.num_cut

    def to_json(self) -> dict[str, Any]:
        """Returns the times in milliseconds; what is not known is None."""
        return {
            "concurrency": self.concurrency,
            "num_answers": self.num_answers,
            "num_complete": self.num_complete,
            "num_failed": self.num_failed,
            "num_cut": self.num_cut,
            "errors": self.errors,
            "num_output_tokens": self.num_output_tokens,
            "tokens_counted_by": self.tokens_counted_by,
            "mean_input_tokens": self.mean_input_tokens,
            "output_tokens_per_s": self.output_tokens_per_s,
            "answers_per_s": self.answers_per_s,
            "good_answers_per_s": self.good_answers_per_s,
            "first_output_ms": _in_ms(self.first_output_s),
            "output_token_ms": _in_ms(self.output_token_s),
            "gap_ms": _in_ms(self.gap_s),
            "latency_ms": _in_ms(self.latency_s),
            "acceptance": None if self.acceptance is None else self.acceptance.to_json(),
        }


def summarize(
    loads: Sequence[Load],
    *,
    limits: LatencyLimits | None = None,
    count_tokens: CountTokens | None = None,
) -> Summary:
    """Returns the sum of loads of one side at one concurrency."""
    (concurrency,) = {load.concurrency for load in loads}
    answers = [answer for load in loads for answer in load.answers]
    complete = [answer for answer in answers if answer.is_complete]
    timings = [time_answer(answer, count_tokens) for answer in complete]
    stream_s = sum(answer.ended_s - answer.started_s for answer in answers)
    num_good = sum((limits or LatencyLimits()).are_kept(timing) for timing in timings)
    counts = [timing.num_output_tokens for timing in timings]
    num_output_tokens = None if None in counts else _sum(counts)
    input_counts = [answer.usage.num_input_tokens for answer in complete if answer.usage]
    known_inputs = [count for count in input_counts if count is not None]

    def rate(number: float) -> float:
        return concurrency * number / stream_s if stream_s else 0.0

    return Summary(
        concurrency=concurrency,
        num_answers=len(answers),
        num_failed=sum(answer.ending == "failed" for answer in answers),
        num_cut=sum(answer.ending == "cut" for answer in answers),
        errors=dict(Counter(a.error for a in answers if a.error).most_common(_MAX_NUM_ERRORS)),
        num_output_tokens=num_output_tokens,
        mean_input_tokens=float(np.mean(known_inputs)) if known_inputs else None,
        output_tokens_per_s=None if num_output_tokens is None else rate(num_output_tokens),
        answers_per_s=rate(len(complete)),
        good_answers_per_s=rate(num_good),
        first_output_s=Distribution.of(
            t.first_output_s for t in timings if t.first_output_s is not None
        ),
        output_token_s=_output_token_times(timings),
        gap_s=Distribution.of(gap for timing in timings for gap in timing.gaps_s),
        latency_s=Distribution.of(timing.latency_s for timing in timings),
        acceptance=AcceptanceTotals.of([answer.usage for answer in complete]),
        tokens_counted_by=_counted_by(complete, count_tokens),
    )


def _output_token_times(timings: Sequence[Timing]) -> Distribution | None:
    """Returns seconds per output token: their mean is over tokens, the rest over answers."""
    counted = [timing for timing in timings if timing.num_decoded_tokens]
    if not counted:
        return None
    seconds = sum(timing.decode_s for timing in counted)
    mean = seconds / _sum([timing.num_decoded_tokens for timing in counted])
    times_s = (timing.output_token_s for timing in counted)
    return Distribution.of((time_s for time_s in times_s if time_s is not None), mean=mean)


def _counted_by(complete: Sequence[TimedAnswer], count_tokens: CountTokens | None) -> str:
    """Returns who counted the output tokens of the answers."""
    if all(answer.num_output_tokens is not None for answer in complete):
        return "server"
    return "nobody" if count_tokens is None else "tokenizer"


def _in_ms(seconds: Distribution | None) -> dict[str, float] | None:
    if seconds is None:
        return None
    return {name: 1e3 * value for name, value in vars(seconds).items()}


def _sum(counts: Sequence[int | None]) -> int:
    return sum(count for count in counts if count is not None)


def _sum_histograms(histograms: Sequence[tuple[int, ...] | None]) -> tuple[int, ...]:
    longest = max((len(histogram) for histogram in histograms if histogram), default=0)
    return tuple(sum(h[n] for h in histograms if h and n < len(h)) for n in range(longest))
