"""Streams that answer while a long prompt is read now and then: what that does to their gaps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load.loop import Answer, Clock, Loop, NoFigures, Prompt, percentiles

_LOOK_EVERY = 0.01
"""Seconds: whether a prompt is due."""


@dataclass(frozen=True)
class Readings:
    """What is asked.

    num_long  prompts that are read meanwhile, one after another, unless a stream has ended
    pause     before each of them, in seconds
    """

    streams: int
    max_tokens: int
    num_long: int = 6
    pause: float = 0.5

    def loop(self, prompts: Sequence[Prompt], *, clock: Clock = time.perf_counter) -> ReadingLoop:
        return ReadingLoop(self, prompts, clock)


class ReadingLoop(Loop):
    """The first num_long prompts are the long ones, of which one token is asked.

    The others are those of the streams, asked once each, at the beginning.
    """

    def __init__(self, load: Readings, prompts: Sequence[Prompt], clock: Clock) -> None:
        super().__init__(clock)
        self.load = load
        self._long = list(prompts[: load.num_long])
        self._short = list(prompts[load.num_long :][: load.streams])
        self._next_at: float | None = None

    def ask(self) -> Answer | None:
        now, number = self._clock(), len(self.answers)
        if number < len(self._short):
            return self._ask(self._short[number], self.load.max_tokens, now)
        if self._is_over or not all(answer.times for answer in self.answers):
            return None
        if self._next_at is None:
            self._next_at = now + self.load.pause
        if now < self._next_at:
            return None
        self._next_at = None
        return self._ask(self._long[number - len(self._short)], 1, now)

    def pause(self) -> float | None:
        return None if self._is_over else _LOOK_EVERY

    @property
    def _is_over(self) -> bool:
        is_any_whole = any(answer.is_whole for answer in self._streams)
        return is_any_whole or len(self.answers) == len(self._short) + len(self._long)

    @property
    def _streams(self) -> list[Answer]:
        return self.answers[: len(self._short)]

    def figures(self) -> dict[str, Any]:
        """Returns gaps of the streams while a long prompt is read, and while none is.

        All of it while no stream has ended; raises NoFigures where no prompt was read by then.
        """
        self._check()
        begun = max(answer.times[0] for answer in self._streams)
        ended = min(answer.times[-1] for answer in self._streams)
        long = [a for a in self.answers[len(self._short) :] if a.times[0] <= ended]
        if not long:
            raise NoFigures("a stream ended before a long prompt had been read")
        meanwhile: list[float] = []
        otherwise: list[float] = []
        for stream in self._streams:
            for before, at, _ in stream.gaps():
                if begun <= before and at <= ended:
                    is_read = any(a.asked_at < at and before < a.times[0] for a in long)
                    (meanwhile if is_read else otherwise).append(at - before)
        return {
            "num_read": len(long),
            "first_token": percentiles([answer.first_token_seconds for answer in long]),
            "gap_meanwhile": percentiles(meanwhile),
            "gap_otherwise": percentiles(otherwise),
        }
