"""What stands around the application, whatever it answers: who comes in, and what is kept of it.

Plain ASGI: a chunk of a stream passes through one function more, and a client that is gone is seen
by the application as it would be without.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specpipe.errors import show
from specpipe.gateway.access_log import AccessLog
from specpipe.gateway.errors import ApiError, too_large, too_many
from specpipe.gateway.keys import ApiKey, Keys
from specpipe.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from specpipe.gateway.rates import Usages

_FREE_PATHS = frozenset(("/health", "/metrics", "/version"))
"""What is asked without a key, and is not counted against one."""

_REQUEST_ID = re.compile(rb"[\w.:-]{1,64}", re.ASCII)
_CLOSING = {"Connection": "close"}
_DRAIN_RETRY_S = 5  # after which another server may stand here
_BODY_TIME_S = 60.0  # from the first byte of a request to its last


class _Refusal(Exception):
    """A request that does not come in; `reason` is its label in the metrics."""

    def __init__(self, reason: str, error: ApiError) -> None:
        self.reason, self.error = reason, error


@dataclass
class _Visit:
    """One request, from its coming in to its end."""

    request_id: str
    began_s: float
    key: ApiKey | None = None
    body: bytes = b""
    status: int | None = None
    first_s: float | None = None
    num_chunks: int = 0
    is_whole: bool = False
    is_gone: bool = False
    num_tokens: list[int] = field(default_factory=lambda: [0, 0])


class Door:
    """Wraps the application; requests that are under way can be waited for."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        metrics: GatewayMetrics,
        max_body_bytes: int,
        access_log: AccessLog | None = None,
        body_time_s: float = _BODY_TIME_S,
    ) -> None:
        self._app, self._keys, self._metrics, self._access_log = app, keys, metrics, access_log
        self._max_body_bytes, self._body_time_s = max_body_bytes, body_time_s
        self._usages = Usages()
        self._num_running = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self, limit_s: float) -> int:
        """Lets nobody in any more, and waits that long; returns how many were not answered."""
        self._is_draining = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), limit_s)
        return self._num_running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        visit = _Visit(_request_id(headers), time.monotonic())
        self._num_running += 1
        self._idle.clear()
        self._metrics.in_flight.inc()
        try:
            await self._visit(visit, headers, scope, receive, self._watched(send, visit))
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._idle.set()
            self._metrics.in_flight.dec()
            self._keep(visit, scope)

    async def _visit(
        self,
        visit: _Visit,
        headers: Mapping[bytes, bytes],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        path = scope["path"]
        if path == "/metrics" and scope["method"] in ("GET", "HEAD"):
            await self._send_metrics(send)
            return
        if path in _FREE_PATHS and not (self._is_draining and path == "/health"):
            await self._enter(visit, scope, receive, send)
            return
        usage = None
        try:
            visit.key = self._key_of(headers)
            if visit.key is not None:
                usage = self._usages.of(visit.key)
                if (over := usage.begin()) is not None:
                    usage = None
                    raise _Refusal("rate", too_many(over.message, over.retry_after_s))
            visit.body = await self._read_body(visit, headers, receive)
            if not visit.is_gone:
                await self._enter(visit, scope, _again(visit, receive), send)
        except _Refusal as refusal:
            self._metrics.count_refused(refusal.reason)
            await refusal.error.response()(scope, receive, send)
        finally:
            if usage is not None:
                usage.end(sum(visit.num_tokens))

    async def _enter(self, visit: _Visit, scope: Scope, receive: Receive, send: Send) -> None:
        state = {
            **scope.get("state", {}),
            "request_id": visit.request_id,
            "key_name": visit.key.name if visit.key else "",
            "count_tokens": lambda prompt, output: self._count_tokens(visit, prompt, output),
        }
        await self._app({**scope, "state": state}, receive, send)

    def _key_of(self, headers: Mapping[bytes, bytes]) -> ApiKey | None:
        """Returns whose request it is; raises for one that may not come in."""
        if self._is_draining:
            raise _Refusal("draining", _draining())
        if not self._keys.are_needed:
            return None
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not key:
            message = "no key was sent: expected `Authorization: Bearer KEY`"
            raise _Refusal("key", _unauthorized(message))
        found = self._keys.find(key.strip())
        if found is None:
            raise _Refusal("key", _unauthorized("this key is not known here"))
        return found

    async def _read_body(
        self, visit: _Visit, headers: Mapping[bytes, bytes], receive: Receive
    ) -> bytes:
        most = (visit.key and visit.key.max_body_bytes) or self._max_body_bytes
        told = headers.get(b"content-length", b"0")
        if told.isdigit() and int(told[:20]) > most:
            raise _Refusal("size", too_large(most, _CLOSING))
        try:
            return await asyncio.wait_for(_body(visit, receive, most), self._body_time_s)
        except asyncio.TimeoutError:
            raise _Refusal("slow", _too_slow(self._body_time_s)) from None

    def _watched(self, send: Send, visit: _Visit) -> Send:
        request_id = (b"x-request-id", visit.request_id.encode())

        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                headers = [*message.get("headers", ()), request_id]
                if self._is_draining:
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            elif message.get("body"):
                if visit.first_s is None:
                    visit.first_s = time.monotonic() - visit.began_s
                visit.num_chunks += 1
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                visit.is_whole = True

        return pass_on

    async def _send_metrics(self, send: Send) -> None:
        page = self._metrics.page()
        headers = [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"content-length", str(len(page)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": page})

    def _count_tokens(self, visit: _Visit, num_prompt: int, num_output: int) -> None:
        visit.num_tokens[0] += num_prompt
        visit.num_tokens[1] += num_output
        name = visit.key.name if visit.key else ""
        self._metrics.count_tokens(name, num_prompt, num_output)

    def _keep(self, visit: _Visit, scope: Scope) -> None:
        whole_s = time.monotonic() - visit.began_s
        status = visit.status or (499 if visit.is_gone else 500)
        is_gone = visit.is_gone or not visit.is_whole
        self._metrics.count(
            path=scope["path"],
            status=status,
            is_gone=is_gone,
            num_chunks=visit.num_chunks,
            first_s=visit.first_s,
            whole_s=whole_s,
        )
        if self._access_log is None or scope["path"] in _FREE_PATHS:
            return
        num_prompt, num_output = visit.num_tokens
        facts = {
            "request_id": visit.request_id,
            "client": scope["client"][0] if scope.get("client") else None,
            "key": visit.key.name if visit.key else None,
            "method": show(scope["method"]),
            "path": show(scope["path"]),
            "status": status,
            "is_gone": is_gone or None,
            "seconds": round(whole_s, 4),
            "first_chunk_seconds": visit.first_s and round(visit.first_s, 4),
            "body_bytes": len(visit.body),
            "num_chunks": visit.num_chunks,
            "prompt_tokens": num_prompt or None,
            "completion_tokens": num_output or None,
        }
        self._access_log.write(facts, visit.body)


async def _body(visit: _Visit, receive: Receive, most: int) -> bytes:
    blocks, num_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            visit.is_gone = True
            return b""
        blocks.append(message.get("body", b""))
        num_bytes += len(blocks[-1])
        if num_bytes > most:
            raise _Refusal("size", too_large(most, _CLOSING))
        if not message.get("more_body"):
            return b"".join(blocks)


def _again(visit: _Visit, receive: Receive) -> Receive:
    """Returns what gives the body that was read, and then what comes after it."""
    is_read = False

    async def receive_again() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": visit.body, "more_body": False}
        message = await receive()
        if message["type"] == "http.disconnect" and not visit.is_whole:
            visit.is_gone = True
        return message

    return receive_again


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """Returns the client's own id, where it is a plain one."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _unauthorized(message: str) -> ApiError:
    return ApiError(
        message,
        status=401,
        type="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer", **_CLOSING},
    )


def _too_slow(seconds: float) -> ApiError:
    return ApiError(
        f"the body did not come within {seconds:g} s",
        status=408,
        code="body_too_slow",
        headers=_CLOSING,
    )


def _draining() -> ApiError:
    return ApiError(
        "the server is about to end: ask again",
        status=503,
        type="server_error",
        code="draining",
        headers={"Retry-After": str(_DRAIN_RETRY_S), **_CLOSING},
    )
