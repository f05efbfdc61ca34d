"""The threads around a pair: requests come from many, one runs the steps, one sends answers."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from specpipe.errors import FAULT, RequestError
from specpipe.runtimes.pair.pair import Occupancy, Pair
from specpipe.speculative.request import Chunk, Request
from specpipe.triton.outbox import OnChunk, Outbox

_LOGGER = logging.getLogger(__name__)

OnRefusal = Callable[[RequestError], None]
OnReport = Callable[[int, Occupancy], None]

_LATE_S = 0.01
"""By how much answers are late where rounds hand the interpreter over after half of the usual time.
"""
_SHORTEST_SWITCH_S = 0.001
"""Each time costs rounds as long as the other thread takes, so not as often as it may ask."""

_REPORT_INTERVAL_S = 0.5  # each report is a round trip to the server's process (metrics.py)


def exit_process() -> None:
    """Ends this process at once, since without its loop it would hang every request.

    Triton never restarts a Python model's process: launcher.py notices and restarts the server.
    """
    os._exit(1)


@dataclass(frozen=True)
class _Caller:
    on_chunk: OnChunk
    is_stream: bool


class PairLoop:
    """Runs draft-verify rounds while there is work; `submit` and `cancel` may come from any thread.

    Every request gets an answer, whatever happens: chunks until one has a finish_reason, or the
    pair's refusal. What goes wrong while a request is submitted fails that request alone (and what
    goes wrong in its text, `RequestState` contains). After a fault of the pair itself all open
    requests fail, every later one does, and `on_fault` is called once those that were open have
    their answers.

    A guide is compiled on a thread of its own before its request is submitted, so that no round
    waits for that. Answers are sent by another, in order, so that no round waits for Triton; where
    they are late, rounds hand the interpreter over to it sooner.
    `on_report` gets the number of rounds since its last call and what the pair holds: before the
    first answer to a request that comes while no other is open, twice a second while rounds go on,
    and when they end. It is called on the thread of the answers, after those of these rounds, and
    is a sign of life for the launcher while long requests keep its probe waiting.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        on_fault: Callable[[], None] = exit_process,
        on_report: OnReport = lambda num_steps, occupancy: None,
        stream_interval_s: float | None = 0.0,
        on_gathered: Callable[[int], None] = lambda num_chunks: None,
    ) -> None:
        self._pair = pair
        self._outbox = Outbox(stream_interval_s, on_gathered=on_gathered)
        self._on_fault = on_fault
        self._on_report = on_report
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._handed_over: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[str, _Caller] = {}
        self._preparing: set[str] = set()
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="specpipe-guides")
        self._fault: str | None = None
        self._is_closed = False
        self._takes_requests = True
        self._closing = threading.Lock()
        self._num_reported_steps = 0
        self._last_report = 0.0
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "specpipe-steps"), (self._send, "specpipe-answers"))
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        request: Request,
        *,
        on_chunk: OnChunk,
        on_refusal: OnRefusal,
        is_stream: bool = True,
    ) -> None:
        """Queues a request; it is answered through one of the two, on another thread.

        Once the loop is closed, at once and on this one: as cancelled. Without is_stream the answer
        is one chunk.
        """
        with self._closing:
            if self._takes_requests:
                caller = _Caller(partial(self._answer, on_chunk), is_stream)
                self._put(partial(self._submit, request, caller, on_refusal))
                return
        on_chunk(Chunk(request_id=request.request_id, finish_reason="cancelled"))

    def cancel(self, request_id: str) -> None:
        """Ends a request before the next step; unknown and finished ids are ignored."""
        self._put(partial(self._cancel, request_id))

    def close(self) -> None:
        """Ends the threads and the pair; requests that are still open end as cancelled."""
        with self._closing:  # what was submitted before is answered before
            self._takes_requests = False
            self._put(self._close)
        for thread in self._threads:
            thread.join()
        self._pair.close()

    def _put(self, news: Callable[[], None]) -> None:
        self._inbox.put(news)
        self._pair.interrupt()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                if self._fault is None and self._pair.has_work():
                    self._step()
                else:
                    self._report()
                    self._inbox.get()()
                while not self._inbox.empty():
                    self._inbox.get()()
            except Exception as exc:
                _LOGGER.exception("the draft-verify loop failed")
                self._fail(f"the draft-verify loop failed: {type(exc).__name__}: {exc}")
        self._handed_over.put(None)

    def _send(self) -> None:
        usual_s, is_open = sys.getswitchinterval(), True
        # What is due later then waited for streams that have ended since, and left with their end.
        while is_open or self._outbox.wait_s() == 0:
            try:
                with contextlib.suppress(queue.Empty):
                    while is_open:
                        add = self._handed_over.get(timeout=self._outbox.wait_s())
                        is_open = add is not None
                        if add is not None:
                            add()
                self._outbox.send_next()
                switch_s = usual_s / (1 + self._outbox.late_s / _LATE_S)
                sys.setswitchinterval(max(switch_s, _SHORTEST_SWITCH_S))
            except Exception:
                _LOGGER.exception("an answer could not be sent")
        sys.setswitchinterval(usual_s)

    def _step(self) -> None:
        self._deliver(self._pair.step())
        if time.monotonic() - self._last_report >= _REPORT_INTERVAL_S:
            self._report()

    def _report(self) -> None:
        num_steps = self._pair.num_steps
        occupancy = self._pair.occupancy() if self._fault is None else Occupancy()
        self._call(partial(self._on_report, num_steps - self._num_reported_steps, occupancy))
        self._num_reported_steps = num_steps
        self._last_report = time.monotonic()

    def _submit(self, request: Request, caller: _Caller, on_refusal: OnRefusal) -> None:
        self._open[request.request_id] = caller
        if self._fault is not None:
            self._deliver([_failure(request.request_id, self._fault)])
        elif request.guide is None:
            self._take_in(request, on_refusal)
        else:
            self._preparing.add(request.request_id)
            prepared = self._preparer.submit(self._pair.prepare, request)
            prepared.add_done_callback(
                lambda _: self._put(partial(self._take_prepared, request, on_refusal, prepared))
            )

    def _take_prepared(
        self, request: Request, on_refusal: OnRefusal, prepared: Future[None]
    ) -> None:
        self._preparing.discard(request.request_id)
        if request.request_id in self._open:  # not cancelled, and nothing has failed
            self._take_in(request, on_refusal, prepared)

    def _take_in(
        self, request: Request, on_refusal: OnRefusal, prepared: Future[None] | None = None
    ) -> None:
        try:
            if prepared is not None:
                prepared.result()
            self._pair.submit(request)
        except RequestError as exc:
            del self._open[request.request_id]
            self._call(partial(on_refusal, exc))
            return
        except Exception:
            # It counts as a fault of this request: a broken pair shows in its next step.
            _LOGGER.exception("a request could not be submitted")
            self._deliver([_failure(request.request_id, FAULT)])
            return
        if len(self._open) == 1:
            self._report()

    def _cancel(self, request_id: str) -> None:
        if request_id in self._preparing:
            self._deliver([Chunk(request_id=request_id, finish_reason="cancelled")])
        elif self._fault is None and request_id in self._open:
            self._pair.cancel(request_id)

    def _close(self) -> None:
        self._is_closed = True
        self._preparer.shutdown(wait=False, cancel_futures=True)
        for request_id in tuple(self._open):
            self._cancel(request_id)
            self._deliver([Chunk(request_id=request_id, finish_reason="cancelled")])

    def _fail(self, message: str) -> None:
        if self._fault is not None:
            return
        self._fault = message
        self._deliver([_failure(request_id, message) for request_id in self._open])
        self._report()
        self._call(self._on_fault)

    def _call(self, call: Callable[[], None]) -> None:
        self._handed_over.put(partial(self._outbox.add_call, call))

    def _deliver(self, chunks: Sequence[Chunk]) -> None:
        self._handed_over.put(partial(self._gather, self._callers_of(chunks)))

    def _callers_of(self, chunks: Sequence[Chunk]) -> list[tuple[_Caller, Chunk]]:
        """Returns what goes to whom; requests that have ended have none."""
        delivered = []
        for chunk in chunks:
            caller = self._open.get(chunk.request_id)
            if caller is not None:
                delivered.append((caller, chunk))
                if chunk.finish_reason is not None:
                    del self._open[chunk.request_id]
        return delivered

    def _gather(self, delivered: Sequence[tuple[_Caller, Chunk]]) -> None:
        for caller, chunk in delivered:
            self._outbox.add(chunk, caller.on_chunk, is_stream=caller.is_stream)

    def _answer(self, on_chunk: OnChunk, chunk: Chunk) -> None:
        try:
            on_chunk(chunk)
        except Exception:
            self.cancel(chunk.request_id)  # the client is gone
            raise


def _failure(request_id: str, error: str) -> Chunk:
    return Chunk(request_id=request_id, finish_reason="error", error=error)
