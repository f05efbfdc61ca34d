"""The door before a real Triton: as a child that is watched, and with clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpipe.gateway.child import GatewayChild, reserve
from specpipe.gateway.keys import Keys
from specpipe.gateway.listening import bind, parse_listen
from specpipe.gateway.models import ServedModel
from specpipe.gateway.run import standing
from specpipe.gateway.settings import GatewaySettings
from specpipe.machine.prometheus import parse_samples, total
from specpipe.triton.server import processes
from specpipe.triton.server.server import Server
from tests.triton.asking import CANCELLED, metrics, settled_metrics
from tests.waiting import PATIENCE_S

KEY = "a-key-of-the-tests-0123"


def settings_for(server: Server, **settings: Any) -> GatewaySettings:
    given: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "urls": (server.grpc_url,),
        "repository": server.version.repository,
        "names": ("echo",),
        "request_timeout_s": 600.0,
        "has_access_log": False,
    }
    return GatewaySettings(**{**given, **settings})


def in_flight(server: Server) -> float | None:
    return total(parse_samples(server.read_metrics() or ""), "specpipe_requests_in_flight")


def begin(url: str, key: str = KEY, **body: Any) -> http.client.HTTPConnection:
    """Asks for one completion."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": "echo", "prompt": "a b c", "max_tokens": 8, **body}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def ask(url: str, key: str = KEY) -> tuple[int, dict[str, str], Any]:
    """The status of a completion, its headers, and what it says."""
    with contextlib.closing(begin(url, key)) as connection:
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), json.loads(response.read())


def test_a_child_answers_is_started_again_and_lets_streams_finish(
    echo_server: Server, tmp_path: Path, wait_until: Callable[..., bool]
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: a, sha256: {hashlib.sha256(KEY.encode()).hexdigest()}}}]\n")
    settings = settings_for(echo_server, keys=keys)
    lines: list[str] = []
    child = GatewayChild(settings, reserve(settings), secret=echo_server.secret, log=lines.append)
    with child:
        first = child.pid
        assert first is not None
        # Where it listens, whom it asks and what it knows stands in its environment alone.
        said = " ".join(processes.arguments(first))
        ports = [child.url.rsplit(":", 1)[1], echo_server.grpc_url.rsplit(":", 1)[1]]
        assert not any(text in said for text in (*ports, echo_server.secret))
        status, _, said = ask(child.url)
        assert (status, said["choices"][0]["text"]) == (200, "a b ca b ca b")
        assert ask(child.url, key="another")[0] == 401

        # A whole answer that nobody waits for, and that would not end by itself.
        before = settled_metrics(echo_server)[CANCELLED]
        gone = begin(child.url, prompt=f"<until {tmp_path / 'never'}> a b")
        assert wait_until(lambda: in_flight(echo_server) == 1)
        gone.close()
        assert wait_until(lambda: metrics(echo_server, CANCELLED)[CANCELLED] == before + 1)

        os.kill(first, signal.SIGKILL)
        assert ask(child.url)[0] == 200  # it waits in the socket meanwhile
        assert child.pid != first
        assert lines == ["the door is started again in 0 s: it ended with exit code -9"]

        go = tmp_path / "go"
        with contextlib.closing(
            begin(child.url, prompt=f"<until {go}> a b", max_tokens=60, stream=True)
        ) as connection:
            stream = connection.getresponse()
            stream.readline()
            ending = threading.Thread(target=child.__exit__)
            ending.start()
            assert wait_until(lambda: ask(child.url)[0] == 503)
            _, headers, refusal = ask(child.url)
            assert (headers["connection"], headers["retry-after"]) == ("close", "5")
            assert refusal["error"]["message"] == "the server is about to end: ask again"
            go.touch()
            assert stream.read().endswith(b"data: [DONE]\n\n")
        ending.join()
    with pytest.raises(ConnectionRefusedError):
        ask(child.url)


async def go_away(port: int, chance: random.Random) -> None:
    """Asks for a long answer and goes away somewhere in it, or before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    streams = chance.random() < 0.7
    asked = {"model": "echo", "prompt": "<slow> a b", "max_tokens": 900, "stream": streams}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    is_whole = chance.random() < 0.8
    writer.write(head.encode() + body[: None if is_whole else 5])
    await writer.drain()
    if streams and is_whole:
        for _ in range(chance.randrange(20)):
            await reader.readline()
    else:
        await asyncio.sleep(chance.random())
    if chance.random() < 0.5:
        writer.transport.abort()
    writer.close()


async def leave_nothing_behind(server: Server, num_rounds: int) -> list[tuple[int, int]]:
    """Returns the open descriptors and the living objects after each round."""
    settings = settings_for(server)
    served = await asyncio.to_thread(ServedModel.load, settings.repository, settings.names)
    chance = random.Random(1)
    left = []
    # The listener is not ours to count: uvicorn closes it.
    listener = bind(parse_listen(settings.listen))
    port = listener.getsockname()[1]
    async with standing(settings, Keys(None, {}), served, listener, lambda line: None) as stands:
        while not await stands.is_ready():
            await asyncio.sleep(0.01)
        tasks = asyncio.all_tasks()
        (member,) = stands.pool.members
        for _ in range(num_rounds):
            await asyncio.gather(*(go_away(port, chance) for _ in range(64)))
            deadline = time.monotonic() + PATIENCE_S
            while member.server.num_running or asyncio.all_tasks() != tasks:
                assert time.monotonic() < deadline, asyncio.all_tasks() - tasks
                await asyncio.sleep(0.05)
            assert await stands.door.drain(0) == 0
            stands.door._is_draining = False
            while await asyncio.to_thread(in_flight, server):
                assert time.monotonic() < deadline
            gc.collect()
            left.append((len(os.listdir("/proc/self/fd")), len(gc.get_objects())))
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return left


def test_64_clients_that_go_away_leave_nothing_behind(
    echo_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPIPE_SECRET", echo_server.secret)
    (first, second) = asyncio.run(leave_nothing_behind(echo_server, 2))
    assert second[0] <= first[0]
    assert second[1] < 1.05 * first[1]
