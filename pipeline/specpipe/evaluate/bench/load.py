"""A closed loop: a constant number of streams, each of which asks question after question."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from specpipe.errors import SpecpipeError
from specpipe.evaluate.endpoints.base import Endpoint, Question, TimedAnswer, record
from specpipe.machine.callables import Clock
from specpipe.machine.signals import thread_pool
from specpipe.progress import Count, count

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What came of the measured questions; answers in their order.

    epoch_s  what to add to a time of an answer for seconds since 1970
    """

    concurrency: int
    answers: tuple[TimedAnswer, ...]
    epoch_s: float = 0.0


def run_load(
    endpoint: Endpoint,
    questions: Sequence[Question],
    *,
    concurrency: int,
    num_warm_up: int = 0,
    clock: Clock = time.perf_counter,
) -> Load:
    """Asks the questions with `concurrency` streams, all of them busy while any is measured.

    First come warm-up questions, one for each stream at least, whose answers are thrown away. A
    stream that finds no question left asks one again until the last measured answer is there, and
    then drops it: the measured ones have neither a ramp nor a tail among them.
    """
    with count(len(questions), "answers") as answered, thread_pool(concurrency) as pool:
        work = _Work(endpoint, questions, max(concurrency, num_warm_up), clock, answered)
        try:
            for stream in [pool.submit(work.run_stream) for _ in range(concurrency)]:
                stream.result()
        finally:
            work.stop()  # Ctrl-C comes here
    answers = tuple(answer for answer in work.answers if answer is not None)
    assert len(answers) == len(questions)
    return Load(concurrency=concurrency, answers=answers, epoch_s=time.time() - clock())


def in_turns(sides: Sequence[Item], rounds: int) -> Iterator[Item]:
    """Yields all sides each round, in alternating order: A B, B A, A B.

    So what drifts during a run (a clock rate, a neighbour) falls on all of them alike.
    """
    for number in range(rounds):
        yield from sides if number % 2 == 0 else reversed(sides)


class _Work:
    """The questions of one load, taken by its streams one at a time."""

    def __init__(
        self,
        endpoint: Endpoint,
        questions: Sequence[Question],
        num_warm_up: int,
        clock: Clock,
        answered: Count,
    ) -> None:
        self._endpoint, self._questions, self._clock = endpoint, questions, clock
        self._answered = answered
        self._lock = threading.Lock()
        self._num_taken = -num_warm_up  # up to 0 they are warm-up
        self._num_left = len(questions)
        self._is_stopped = False
        self.answers: list[TimedAnswer | None] = [None] * len(questions)

    def run_stream(self) -> None:
        """Asks until all measured answers are there, or another stream failed."""
        try:
            self._ask()
        except BaseException:
            self.stop()
            raise

    def _ask(self) -> None:
        while not self._is_over():
            with self._lock:
                number = self._num_taken
                self._num_taken += 1
            question = self._questions[number % len(self._questions)]
            if number < 0:
                record(self._endpoint, question, clock=self._clock)
            elif number < len(self._questions):
                self.answers[number] = record(self._endpoint, question, clock=self._clock)
                with self._lock:
                    self._num_left -= 1
                self._answered.advance()
            elif not self._keep_busy(question):
                return

    def stop(self) -> None:
        """Makes the streams end after their current answers."""
        self._is_stopped = True

    def _keep_busy(self, question: Question) -> bool:
        """Asks until the load is over; returns False when that fails, as it would only do again."""
        pieces = cast("_Closable", self._endpoint.stream(question))
        try:
            with contextlib.closing(pieces):
                for _ in pieces:
                    if self._is_over():
                        break
        except SpecpipeError:
            return False
        return True

    def _is_over(self) -> bool:
        return self._is_stopped or self._num_left == 0


class _Closable(Protocol):
    def __iter__(self) -> Iterator[object]: ...

    def close(self) -> None: ...
