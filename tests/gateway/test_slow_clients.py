"""Clients that send no request, one without end, or read no answer, are broken off."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from specpipe.gateway import protocol
from specpipe.gateway.listening import bind, parse_listen
from specpipe.gateway.protocol import DoorProtocol
from tests.waiting import PATIENCE_S

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(4096 if scope["path"] == "/much" else 1):
        body = b"x" * (1 << 16)
        await send({"type": "http.response.body", "body": body, "more_body": True})
    ended.set()
    await send({"type": "http.response.body", "body": b""})


ended = asyncio.Event()


@contextlib.asynccontextmanager
async def serving(**options: int) -> AsyncIterator[int]:
    listener = bind(parse_listen("0"), **options)
    config = uvicorn.Config(
        app, http=DoorProtocol, ws="none", lifespan="off", log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def test_a_head_that_does_not_come_or_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIME_S", 1.0)

    async def broken_off(port: int, *sent: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        came = b""
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            for block in sent:
                writer.write(block)
                await writer.drain()
                await asyncio.sleep(0.01)
            came = await asyncio.wait_for(reader.read(), PATIENCE_S)
        return came

    async def run() -> None:
        async with serving() as port:
            began = time.monotonic()
            assert await broken_off(port) == b""
            assert await broken_off(port, REQUEST[:20]) == b""
            answered = await broken_off(port, REQUEST, REQUEST[:20])
            assert answered.startswith(b"HTTP/1.1 200")
            assert answered.count(b"HTTP/1.1") == 1
            assert time.monotonic() - began >= 3.0
            monkeypatch.setattr(protocol, "HEAD_TIME_S", 600.0)
            assert await broken_off(port, REQUEST[:-2] + b"A: " + b"x" * 70_000) == b""

    asyncio.run(run())


def test_who_reads_nothing_is_cut_off() -> None:
    async def run() -> None:
        async with serving(unsent_ms=500) as port:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
                # Until the connection is cut nothing more is sent, and the rest goes nowhere.
                await asyncio.wait_for(ended.wait(), PATIENCE_S)

    asyncio.run(run())


def test_a_body_that_comes_with_its_head_may_be_longer_than_a_head() -> None:
    async def run() -> None:
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
            with contextlib.closing(writer):
                for size in (70_000, 100_000, 5):
                    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
                    writer.write(head.encode() + b"x" * size)
                    answer = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 20)
                    assert answer.startswith(b"HTTP/1.1 200"), size

    asyncio.run(run())
