"""Requests on their way into a pair: who waits, who is next, and who waited too long."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specpipe.errors import RequestError
from specpipe.machine.callables import Clock
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.speculative.request import Request
from specpipe.speculative.state import RequestState

OVERDUE = "the request ran into its time limit (timeout_s or serving.request_timeout_s)"
"""The message of a running request at its deadline."""

QUEUE_FULL = "the queue is full"
"""How the refusal of a request begins that finds no place to wait."""

_NOT_STARTED = "without being started"


def is_for_load(message: str) -> bool:
    """Returns whether an error is due to the load alone: the pair works."""
    return any(part in message for part in (OVERDUE, QUEUE_FULL, _NOT_STARTED))


@dataclass(order=True)
class Waiting:
    """A request that has no slot yet; those with a lower number go first, then the older ones.

    state       of one that ran and gave way to others, as it left it
    num_cached  tokens that it had cached then
    """

    priority: int
    arrival: int
    request: Request = field(compare=False)
    submitted: float = field(compare=False)
    deadline: float = field(compare=False)
    """When its last token is due; like `submitted`, by the queue's clock."""
    state: RequestState | None = field(compare=False, default=None)
    num_cached: int = field(compare=False, default=0)

    def waited_s(self, now: float) -> float:
        """Returns how long the request has waited."""
        return now - self.submitted

    def overdue(self, now: float) -> str:
        """Returns the message of a request whose deadline passes while it waits."""
        if self.state is not None:
            return OVERDUE
        return (
            f"the request waited {self.waited_s(now):.1f} s {_NOT_STARTED}, "
            "which is its time limit (timeout_s or serving.request_timeout_s)"
        )


class WaitingRequests:
    """The queue in front of a pair, by priority and then by arrival."""

    def __init__(self, options: PairOptions, *, clock: Clock = time.monotonic) -> None:
        self._options, self._clock = options, clock
        self._heap: list[Waiting] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, request: Request, *, num_running: int) -> None:
        """Adds a request; raises RequestError, with the numbers, when the queue is full."""
        if len(self._heap) >= self._options.max_queue_size:
            raise RequestError(
                f"{QUEUE_FULL}: {len(self._heap)} requests wait "
                f"(serving.max_queue_size), {num_running} run; try again later"
            )
        now = self._clock()
        limit_s = self._options.request_timeout_s
        timeout_s = limit_s if request.timeout_s is None else min(request.timeout_s, limit_s)
        waiting = Waiting(request.priority, next(self._arrivals), request, now, now + timeout_s)
        heapq.heappush(self._heap, waiting)

    def put_back(self, waiting: Waiting) -> None:
        """Adds a request that was taken out, and keeps its place."""
        heapq.heappush(self._heap, waiting)

    @property
    def first(self) -> Waiting:
        """The request that is next."""
        return self._heap[0]

    def pop(self) -> Waiting:
        """Takes out the request that is next."""
        return heapq.heappop(self._heap)

    def take(self, request_id: str) -> Waiting | None:
        """Takes out one request; None when it does not wait here."""
        return next(iter(self._take(lambda w: w.request.request_id == request_id)), None)

    def take_overdue(self, now: float) -> list[Waiting]:
        """Takes out all whose deadline is past."""
        return self._take(lambda waiting: waiting.deadline <= now)

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline; None when no request waits."""
        return min((waiting.deadline for waiting in self._heap), default=None)

    def _take(self, condition: Callable[[Waiting], bool]) -> list[Waiting]:
        matching = [waiting for waiting in self._heap if condition(waiting)]
        if matching:
            self._heap = [waiting for waiting in self._heap if not condition(waiting)]
            heapq.heapify(self._heap)
        return sorted(matching)
