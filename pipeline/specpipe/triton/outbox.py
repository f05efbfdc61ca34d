"""What waits to be sent: in which order, when, and how many chunks of a stream in one response.

A response through Triton takes the thread that sends it 0.2 to 0.4 ms, which it waits for the
ensemble, and all processes together 0.8 ms of a core, however long its text is (Triton 2.51 on two
cores, benchmarks/responses.py). With two thousand a second a server would do little else.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from specpipe.machine.callables import Clock
from specpipe.speculative.request import Chunk, join_chunks

OnChunk = Callable[[Chunk], None]

_SHARE = 1 / 8
"""Of its time that the thread may send: it shares an interpreter with the loop, and on few cores
Triton's processes are beside the models."""

_LONGEST_INTERVAL_S = 0.075
"""A text still seems to flow; with what sending takes gaps stay below 0.1 s."""

_WEIGHT = 1 / 16  # of one response in the mean of what they take


_AT_ONCE = -math.inf
_BROKEN = ("error", "cancelled")
"""Ends that clients raise for, so that text beside them would be lost."""


@dataclass
class _Stream:
    on_chunk: OnChunk
    is_stream: bool
    waiting: list[Chunk] = field(default_factory=list)
    has_begun: bool = False  # with its text
    sent_s: float = 0.0  # or when that was to be sent


class Outbox:
    """Answers on their way out. One thread adds and sends.

    The first text of a stream leaves at once, and so does its end with what waits then, in the
    order of their coming. What comes between waits until some time has passed since the last
    response, and leaves as one: where sending is behind, responses become longer and not more. A
    whole answer is all end.

    interval_s   between two responses of a stream; 0: each chunk has its own; None: as long as
                 keeps sending to a share of the time, by what a response is measured to take
    on_gathered  is told how many chunks leave in the response of another one

    `late_s` is by how much the last response that had to wait left later than it could have.
    """

    def __init__(
        self,
        interval_s: float | None,
        *,
        on_gathered: Callable[[int], None] = lambda num_chunks: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._given_interval_s = interval_s
        self._on_gathered = on_gathered
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._num_begun = 0
        self._response_s = 0.0
        self.late_s = 0.0
        self._sendings: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._numbers = itertools.count()

    def add_call(self, call: Callable[[], None]) -> None:
        """Adds a call that is made behind all that is to leave at once and came before."""
        self._send_at(_AT_ONCE, call)

    def add(self, chunk: Chunk, on_chunk: OnChunk, *, is_stream: bool) -> None:
        """Adds a chunk of a request that wants each on its own, or else (is_stream) its answer."""
        name, is_end = chunk.request_id, chunk.finish_reason is not None
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = _Stream(on_chunk, is_stream)
        waiting = stream.waiting
        if not is_end and (waiting or not is_stream):  # nearly always, under load
            waiting.append(chunk)
        elif is_end:
            del self._streams[name]
            self._num_begun -= stream.has_begun
            if is_stream and chunk.finish_reason in _BROKEN:
                self._send_at(_AT_ONCE, partial(self._answer, stream, waiting))
                waiting = []
            self._send_at(_AT_ONCE, partial(self._answer, stream, [*waiting, chunk]))
            waiting.clear()
        elif not stream.has_begun or self._given_interval_s == 0:
            if chunk.text and not stream.has_begun:
                stream.has_begun, stream.sent_s = True, self._clock()
                self._num_begun += 1
            self._send_at(_AT_ONCE, partial(self._answer, stream, [chunk]))
        else:
            waiting.append(chunk)
            due_s = max(stream.sent_s + self._interval_s(), self._clock())
            self._send_at(due_s, partial(self._answer, stream, waiting))

    def wait_s(self) -> float | None:
        """Returns the seconds until `send_next` has something to do; None: it has nothing."""
        return max(0.0, self._sendings[0][0] - self._clock()) if self._sendings else None

    def send_next(self) -> bool:
        """Sends one response, or makes one call, where that is due; returns whether it was."""
        if self.wait_s() != 0:
            return False
        due_s, _, send = heapq.heappop(self._sendings)
        if due_s != _AT_ONCE:
            self.late_s = self._clock() - due_s
        send()
        return True

    def _send_at(self, due_s: float, send: Callable[[], None]) -> None:
        heapq.heappush(self._sendings, (due_s, next(self._numbers), send))

    def _interval_s(self) -> float:
        if self._given_interval_s is not None:
            return self._given_interval_s
        return min(self._num_begun * self._response_s / _SHARE, _LONGEST_INTERVAL_S)

    def _answer(self, stream: _Stream, chunks: list[Chunk]) -> None:
        if not chunks:  # they have left with the end
            return
        joined = join_chunks(chunks)
        if stream.is_stream and len(chunks) > 1:
            self._on_gathered(len(chunks) - 1)
        chunks.clear()
        stream.sent_s = self._clock()
        stream.on_chunk(joined)
        if stream.has_begun:
            taken_s = self._clock() - stream.sent_s
            self._response_s += (taken_s - self._response_s) * _WEIGHT
