"""What is asked of a side, and when what came: the part that all kinds of load have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Clock = Callable[[], float]
Prompt = Sequence[int]


class NoFigures(Exception):
    """A run came to an end too early to say anything; what was asked is as it was."""


@dataclass
class Answer:
    """A request, and when which tokens of its answer came.

    asked_at  when it was asked, or was to be
    """

    number: int
    prompt: Prompt
    max_tokens: int
    asked_at: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return sum(self.counts) == self.max_tokens

    @property
    def first_token_seconds(self) -> float:
        return self.times[0] - self.asked_at

    def gaps(self) -> Iterable[tuple[float, float, int]]:
        """Yields each chunk but the first: when the one before it came, when it, its tokens."""
        return zip(self.times, self.times[1:], self.counts[1:], strict=False)


class AnyLoad(Protocol):
    """How much is asked, and how; JSON-able.

    streams     how many are busy at once; where that is open, how many to warm up with
    max_tokens  of an answer
    """

    @property
    def streams(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    def loop(self, prompts: Sequence[Prompt], *, clock: Clock = time.perf_counter) -> Loop:
        """Returns one run of it."""


class Loop:
    """Says what is asked next, and keeps what came."""

    def __init__(self, clock: Clock) -> None:
        self.answers: list[Answer] = []
        self._clock = clock
        self._num_busy = 0

    def ask(self) -> Answer | None:
        """Returns what is to be asked now; None: nothing."""
        raise NotImplementedError

    def pause(self) -> float | None:
        """Seconds until more may be asked, though nothing comes; None: only if something comes."""
        return None

    def figures(self) -> dict[str, Any]:
        """Returns what it came to; raises NoFigures, and RuntimeError where answers are broken."""
        raise NotImplementedError

    def take(self, number: int, num_tokens: int, token_ids: Sequence[int] = ()) -> None:
        """Notes that tokens of an answer came; their ids where they are known."""
        answer = self.answers[number]
        answer.times.append(self._clock())
        answer.counts.append(num_tokens)
        answer.token_ids += token_ids
        if answer.is_whole:
            self._num_busy -= 1
            self._ended(answer)

    def _ended(self, answer: Answer) -> None:
        """Is told of each whole answer."""

    def _ask(self, prompt: Prompt, max_tokens: int, at: float) -> Answer:
        self.answers.append(Answer(len(self.answers), prompt, max_tokens, at))
        self._num_busy += 1
        return self.answers[-1]

    def _check(self) -> None:
        broken = [answer.number for answer in self.answers if not answer.is_whole]
        if broken:
            raise RuntimeError(f"answers {broken[:8]} have not as many tokens as they should have")


def gap_figures(answers: Iterable[Answer], start: float, stop: float) -> dict[str, Any]:
    """Returns what passed between two chunks of an answer, both of them within a time.

    By tokens: its share of each token of the second one.
    """
    gaps, token_gaps = [], []
    for answer in answers:
        for before, at, count in answer.gaps():
            if start < before and at <= stop:
                gaps.append(at - before)
                token_gaps += [(at - before) / count] * count
    return {"chunk_gap": percentiles(gaps), "token_gap": percentiles(token_gaps)}


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median and 99th percentile, in ms; None of nothing."""
    if not seconds:
        return None
    p50, p99 = np.percentile(seconds, (50, 99))
    return {"p50_ms": 1e3 * float(p50), "p99_ms": 1e3 * float(p99)}
