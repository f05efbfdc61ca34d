"""What every pair does with requests around its rounds: takes them in, starts them, ends them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from specpipe.machine.callables import Clock
from specpipe.runtimes.pair.admission import OVERDUE, Waiting, WaitingRequests
from specpipe.runtimes.pair.features import check_features
from specpipe.runtimes.pair.pair import DetokenizerFactory, Occupancy, PairOptions
from specpipe.speculative.adaptive import DraftLength, Prior
from specpipe.speculative.guide import Guides, Matcher
from specpipe.speculative.lookup import CopyOdds
from specpipe.speculative.request import Chunk, FinishReason, Request, RequestLimits
from specpipe.speculative.state import RequestState


@dataclass(eq=False)
class Running:
    """A request that was started; deadline is by its pair's clock."""

    state: RequestState
    deadline: float


R = TypeVar("R", bound=Running)


class QueuedPair(ABC, Generic[R]):
    """The part of a `Pair` that does not depend on who runs the models.

    Requests wait in a queue until there is a slot for them, and end when they are cancelled or
    overdue. What a request may emit waits in `_chunks` for the end of a step; any thread may add
    to it.
    """

    def __init__(
        self,
        options: PairOptions,
        limits: RequestLimits,
        detokenizer: DetokenizerFactory,
        *,
        max_batch_size: int,
        honours: Collection[str] = (),
        guides: Guides | None = None,
        prior: Prior | None = None,
        copy_odds: CopyOdds | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """max_batch_size is how many requests may run.

        honours    those of FEATURES that requests may ask for; the others are refused by name
        guides     with them requests may have a guide, too
        prior      DraftLength's
        copy_odds  DraftChoice's
        """
        self._options, self._limits, self._detokenizer = options, limits, detokenizer
        self._max_batch_size, self._clock = max_batch_size, clock
        self._honours = {*honours, *(("guided_decoding_guide",) if guides is not None else ())}
        self._guides, self._prior, self._copy_odds = guides, prior, copy_odds
        self._waiting = WaitingRequests(options, clock=clock)
        self._running: list[R] = []
        self._chunks: deque[Chunk] = deque()
        self.num_steps = 0

    def prepare(self, request: Request) -> None:
        if request.guide is not None and self._guides is not None:
            self._guides.compile(request.guide)

    def submit(self, request: Request) -> str:
        self._limits.check(request)
        check_features(request, self._honours)
        self.prepare(request)
        self._check_request(request)
        self._waiting.put(request, num_running=len(self._running))
        return request.request_id

    def cancel(self, request_id: str) -> None:
        for running in self._running:
            if running.state.request.request_id == request_id:
                self._end(running, "cancelled")
                return
        waiting = self._waiting.take(request_id)
        if waiting is not None:
            self._chunks.append(self._state_of(waiting).finish("cancelled"))

    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._chunks)

    def occupancy(self) -> Occupancy:
        """Returns counts only: where the models run elsewhere, so are their KV caches."""
        return Occupancy(num_running=len(self._running), num_waiting=len(self._waiting))

    @abstractmethod
    def _start(self, waiting: Waiting) -> bool:
        """Adds a request to those that run; False where there is no room for it yet."""

    def _check_request(self, request: Request) -> None:
        """Raises RequestError for an input that this pair would ignore."""

    def _adapts(self, request: Request) -> bool:
        """Returns whether the draft length of a request follows its acceptance."""
        return False

    def _waits_for_others(self, waiting: Waiting) -> bool:
        """Returns whether a request gains by waiting for those that run, which others need not."""
        return False

    def _admit(self) -> None:
        """Starts those that are next, as long as there is room."""
        passed: list[Waiting] = []
        while self._waiting and len(self._running) + len(passed) < self._max_batch_size:
            waiting = self._waiting.first
            if self._waits_for_others(waiting):
                passed.append(waiting)
            elif not self._start(waiting):
                break
            self._waiting.pop()
        for waiting in passed:
            self._waiting.put_back(waiting)

    def _end_overdue(self) -> None:
        now = self._clock()
        for running in [r for r in self._running if r.deadline <= now]:
            self._end(running, "error", OVERDUE)
        for waiting in self._waiting.take_overdue(now):
            state = self._state_of(waiting)
            self._chunks.append(state.finish("error", waiting.overdue(now)))

    def _time_left_s(self) -> float:
        """Returns how long until a deadline passes; infinite where nothing runs or waits."""
        deadlines = [r.deadline for r in self._running if not r.state.is_finished]
        of_waiting = self._waiting.next_deadline()
        if of_waiting is not None:
            deadlines.append(of_waiting)
        return max(min(deadlines, default=float("inf")) - self._clock(), 0.0)

    def _end(self, running: R, reason: FinishReason, error: str | None = None) -> None:
        """Ends a request that runs, from outside."""
        self._leave(running, running.state.finish(reason, error))

    def _emit(self, running: R, chunk: Chunk) -> None:
        """Lets out what a round gave a request, which leaves with its last chunk."""
        if chunk.finish_reason is not None:
            self._leave(running, chunk)
        elif chunk.token_ids or chunk.text:
            self._chunks.append(chunk)

    def _leave(self, running: R, chunk: Chunk) -> None:
        """Takes out a request that has ended with this chunk."""
        self._running.remove(running)
        self._chunks.append(chunk)

    def _take_chunks(self) -> list[Chunk]:
        """Takes out what a step returns."""
        return [self._chunks.popleft() for _ in range(len(self._chunks))]

    def _state_of(self, waiting: Waiting) -> RequestState:
        """Returns a new state, or the one that a request has from before it gave way."""
        if waiting.state is not None:
            return waiting.state
        request = waiting.request
        return RequestState(
            request,
            self._limits,
            self._detokenizer(
                request.text_token_ids, skip_special_tokens=request.skip_special_tokens
            ),
            draft_length=DraftLength(self._prior) if self._adapts(request) else None,
            copy_odds=self._copy_odds,
            matcher=self._matcher(request),
            queue_s=waiting.waited_s(self._clock()),
        )

    def _matcher(self, request: Request) -> Matcher | None:
        if request.guide is None or self._guides is None:
            return None
        return self._guides.matcher(
            request.guide,
            end_token_ids=request.end_token_ids,
            vocab_size=self._limits.vocab_size,
        )
