"""A closed loop: N streams that are always busy, and what its steady part came to.

The answers that streams begin with are of different lengths, so that streams do not end together
ever after. The steady part begins when all of these have ended, and ends when a stream first has
nothing more to ask.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load.loop import Answer, Clock, Loop, NoFigures, Prompt, gap_figures, percentiles


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

    def loop(self, prompts: Sequence[Prompt], *, clock: Clock = time.perf_counter) -> ClosedLoop:
        return ClosedLoop(self, prompts, clock)


class ClosedLoop(Loop):
    """Says what the streams ask next: the prompts in turn."""

    def __init__(self, load: Load, prompts: Sequence[Prompt], clock: Clock) -> None:
        super().__init__(clock)
        self.load = load
        self._prompts = prompts
        self._num_first_ended = 0
        self._start: float | None = None
        self._stop: float | None = None

    def ask(self) -> Answer | None:
        now, number, load = self._clock(), len(self.answers), self.load
        if self._num_busy == load.streams:
            return None
        is_late = self._start is not None and now - self._start >= load.seconds
        if number >= load.num_requests or is_late or self._stop is not None:
            if self._stop is None:
                self._stop = now
            return None
        max_tokens = load.max_tokens
        if number < load.streams:
            max_tokens = max(1, load.max_tokens * (number + 1) // load.streams)
        return self._ask(self._prompts[number % len(self._prompts)], max_tokens, now)

    def _ended(self, answer: Answer) -> None:
        if answer.number < self.load.streams:
            self._num_first_ended += 1
            if self._num_first_ended == self.load.streams:
                self._start = answer.times[-1]

    def figures(self) -> dict[str, Any]:
        """Returns what the steady part came to; raises NoFigures where there was none."""
        self._check()
        start, stop = self._start, self._stop
        no_more = len(self.answers) <= self.load.streams
        if start is None or stop is None or stop <= start or no_more:
            raise NoFigures("a stream had nothing more to ask before all streams were busy")
        num_tokens = 0
        first, whole = [], []
        for answer in self.answers:
            arrivals = zip(answer.times, answer.counts, strict=True)
            num_tokens += sum(count for at, count in arrivals if start < at <= stop)
            if start <= answer.asked_at and answer.times[0] <= stop:
                first.append(answer.first_token_seconds)
                if answer.times[-1] <= stop:
                    whole.append(answer.times[-1] - answer.asked_at)
        return {
            "seconds": stop - start,
            "num_tokens": num_tokens,
            "num_answers": len(whole),
            "tokens_per_second": num_tokens / (stop - start),
            "first_token": percentiles(first),
            "answer": percentiles(whole),
            **gap_figures(self.answers, start, stop),
            "is_cut": len(self.answers) < self.load.num_requests,
        }
