"""uvicorn's HTTP with limits for the heads of requests, for which it has none (0.54, httptools)."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIME_S = 30.0  # from a connection, or the last answer, to the end of the next head
MAX_HEAD_BYTES = 1 << 16  # as many as uvicorn's other implementation takes


class DoorProtocol(HttpToolsProtocol):
    """Breaks a connection off whose head is too long, or does not come."""

    _timer: asyncio.TimerHandle | None = None
    _is_in_head = True
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)  # before it is read: a block may end its request
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head, self._num_head_bytes = True, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def _wait(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEAD_TIME_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
