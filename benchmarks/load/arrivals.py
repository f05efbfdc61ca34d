"""An open loop: requests come when they come, whatever the others wait for (Poisson arrivals)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.load.loop import Answer, Clock, Loop, NoFigures, Prompt, gap_figures, percentiles

_BEFORE = 0.25
"""Of the time, in which the load builds up."""


@dataclass(frozen=True)
class Arrivals:
    """What is asked.

    per_second  requests, on average
    seconds     for how long they come
    streams     to warm up with
    seed        of the times between them: those of two rates differ by one factor
    """

    per_second: float
    seconds: float
    max_tokens: int
    streams: int = 8
    seed: int = 0

    def loop(self, prompts: Sequence[Prompt], *, clock: Clock = time.perf_counter) -> OpenLoop:
        return OpenLoop(self, prompts, clock)


class OpenLoop(Loop):
    """Says which requests are due: the prompts in turn."""

    def __init__(self, load: Arrivals, prompts: Sequence[Prompt], clock: Clock) -> None:
        super().__init__(clock)
        self.load = load
        self._prompts = prompts
        most = 8 + 2 * int(load.per_second * load.seconds)
        pauses = np.random.default_rng(load.seed).exponential(1 / load.per_second, most)
        self._due = [float(at) for at in np.cumsum(pauses) if at <= load.seconds]
        self._start: float | None = None

    def ask(self) -> Answer | None:
        wait = self.pause()
        if wait is None or wait > 0:
            return None
        assert self._start is not None
        number = len(self.answers)
        prompt = self._prompts[number % len(self._prompts)]
        return self._ask(prompt, self.load.max_tokens, self._start + self._due[number])

    def pause(self) -> float | None:
        now = self._clock()
        if self._start is None:
            self._start = now
        if len(self.answers) == len(self._due):
            return None
        return max(0.0, self._start + self._due[len(self.answers)] - now)

    def figures(self) -> dict[str, Any]:
        """Returns what the requests behind the first quarter of the time came to.

        A first token is waited for from when the request was due.
        """
        self._check()
        assert self._start is not None
        start = self._start + _BEFORE * self.load.seconds
        first = [a.first_token_seconds for a in self.answers if a.asked_at >= start]
        if not first:
            raise NoFigures("no request came behind the first quarter of the time")
        return {
            "requests_per_second": self.load.per_second,
            "num_answers": len(first),
            "first_token": percentiles(first),
            **gap_figures(self.answers, start, self._start + self.load.seconds),
        }
