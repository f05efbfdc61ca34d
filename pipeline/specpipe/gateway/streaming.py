"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specpipe.gateway.answers import Answers, ClientGone, unless_gone
from specpipe.gateway.errors import ApiError
from specpipe.triton.client.completion import Completion

_KEEP_ALIVE = b": waiting\n\n"  # a comment, which clients pass over
_DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx otherwise collects what passes
]

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


class Writer(Protocol):
    """Turns chunks of answers into the bodies of events."""

    def events(self, index: int, completion: Completion) -> Iterable[dict[str, Any]]:
        """Returns what a chunk of the answer of that number is to the client."""

    def last_events(self) -> Iterable[dict[str, Any]]:
        """Returns what comes when all answers have ended."""


class EventStream(Response):
    """A response that begins with the first chunk, or after `keep_alive_s` without one.

    Until it has begun a failure has its own status; from then on it is an event.
    """

    def __init__(
        self,
        answers: Answers,
        writer: Writer,
        *,
        keep_alive_s: float,
        told: Callable[[BaseException], ApiError],
        when_over: Callable[[], None],
    ) -> None:
        """told  what a failure is to the client"""
        self._answers, self._writer, self._keep_alive_s = answers, writer, keep_alive_s
        self._told, self._when_over = told, when_over
        self._has_begun = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            try:
                await unless_gone(receive, self._send_all(send))
            except ClientGone:
                raise
            except Exception as exc:
                await self._send_failure(self._told(exc), scope, receive, send)
            finally:
                self._when_over()

    async def _send_all(self, send: Send) -> None:
        events, encode = self._writer.events, _encode
        async with contextlib.aclosing(self._answers) as answers:
            first = await self._first(answers, send)
            if not self._has_begun:
                await self._begin(send)
            if first is not None:
                for event in events(*first):
                    await send(_body(encode(event)))
            async for index, completion in answers:
                for event in events(index, completion):
                    await send(_body(encode(event)))
        ended = "".join(f"data: {encode(event)}\n\n" for event in self._writer.last_events())
        await send({"type": "http.response.body", "body": ended.encode() + _DONE})

    async def _first(self, answers: Answers, send: Send) -> tuple[int, Completion] | None:
        """Waits for the first chunk, and lets the client hear something meanwhile."""
        first = asyncio.ensure_future(anext(answers, None))
        try:
            while not (await asyncio.wait((first,), timeout=self._keep_alive_s))[0]:
                if not self._has_begun:
                    await self._begin(send)
                await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
            return first.result()
        finally:
            # A generator that runs cannot be closed.
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _begin(self, send: Send) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def _send_failure(
        self, error: ApiError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not self._has_begun:
            await error.response()(scope, receive, send)
            return
        event = f"data: {_encode(error.body)}\n\n".encode()
        await send({"type": "http.response.body", "body": event + _DONE})


def _body(event: str) -> dict[str, Any]:
    body = f"data: {event}\n\n".encode()
    return {"type": "http.response.body", "body": body, "more_body": True}
