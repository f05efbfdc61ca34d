"""A closed loop: N streams that are always busy, when what came, and what its steady part came to.

The answers that streams begin with are of different lengths, so that streams do not end together
ever after. The steady part begins when all of these have ended, and ends when a stream first has
nothing more to ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Clock = Callable[[], float]


@dataclass(frozen=True)
class Load:
    """What is asked.

    num_requests  in all, unless the time is over
    seconds       what the steady part may take at most; answers that have begun then end
    """

    streams: int
    num_requests: int
    max_tokens: int
    seconds: float = float("inf")


@dataclass
class Answer:
    """A request, and when which tokens of its answer came."""

    number: int
    max_tokens: int
    asked_at: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return sum(self.counts) == self.max_tokens


class ClosedLoop:
    """Says what the streams ask next, and keeps what came."""

    def __init__(self, load: Load, *, clock: Clock = time.perf_counter) -> None:
        self.load = load
        self.answers: list[Answer] = []
        self._clock = clock
        self._num_first_ended = 0
        self._start: float | None = None
        self._stop: float | None = None

    def ask(self) -> Answer | None:
        """Returns what a stream that is free asks now; None: nothing more."""
        now, number, load = self._clock(), len(self.answers), self.load
        is_late = self._start is not None and now - self._start >= load.seconds
        if number >= load.num_requests or is_late or self._stop is not None:
            if self._stop is None:
                self._stop = now
            return None
        max_tokens = load.max_tokens
        if number < load.streams:
            max_tokens = max(1, load.max_tokens * (number + 1) // load.streams)
        self.answers.append(Answer(number, max_tokens, now))
        return self.answers[-1]

    def take(self, number: int, num_tokens: int, token_ids: Sequence[int] = ()) -> None:
        """Notes that tokens of an answer came; their ids where they are known."""
        answer = self.answers[number]
        answer.times.append(self._clock())
        answer.counts.append(num_tokens)
        answer.token_ids += token_ids
        if answer.is_whole and number < self.load.streams:
            self._num_first_ended += 1
            if self._num_first_ended == self.load.streams:
                self._start = answer.times[-1]

    def figures(self) -> dict[str, Any]:
        """Returns what the steady part came to; raises RuntimeError where there was none.

        A gap is the time between two chunks of one answer; by tokens, its share of each token of
        the second one.
        """
        broken = [answer.number for answer in self.answers if not answer.is_whole]
        if broken:
            raise RuntimeError(f"answers {broken[:8]} have not as many tokens as they should have")
        start, stop = self._start, self._stop
        no_more = len(self.answers) <= self.load.streams
        if start is None or stop is None or stop <= start or no_more:
            raise RuntimeError("a stream had nothing more to ask before all streams were busy")
        num_tokens = 0
        first, whole, gaps, token_gaps = [], [], [], []
        for answer in self.answers:
            for before, at, count in _chunks(answer):
                if not start < at <= stop:
                    continue
                num_tokens += count
                if before is not None and before > start:
                    gaps.append(at - before)
                    token_gaps += [(at - before) / count] * count
            if start <= answer.asked_at and answer.times[0] <= stop:
                first.append(answer.times[0] - answer.asked_at)
                if answer.times[-1] <= stop:
                    whole.append(answer.times[-1] - answer.asked_at)
        return {
            "seconds": stop - start,
            "num_tokens": num_tokens,
            "num_answers": len(whole),
            "tokens_per_second": num_tokens / (stop - start),
            "first_token": percentiles(first),
            "answer": percentiles(whole),
            "chunk_gap": percentiles(gaps),
            "token_gap": percentiles(token_gaps),
            "is_cut": len(self.answers) < self.load.num_requests,
        }


def _chunks(answer: Answer) -> Iterable[tuple[float | None, float, int]]:
    """The chunks of an answer: when the last one came, when it came, and its tokens."""
    return zip([None, *answer.times], answer.times, answer.counts, strict=False)


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median and 99th percentile, in ms; None of nothing."""
    if not seconds:
        return None
    p50, p99 = np.percentile(seconds, (50, 99))
    return {"p50_ms": 1e3 * float(p50), "p99_ms": 1e3 * float(p99)}
