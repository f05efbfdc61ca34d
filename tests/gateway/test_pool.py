"""Several servers: who is asked, who is left out, and when another one is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from specpipe.errors import CutStream, NoAnswer, RequestError, ServerError
from specpipe.gateway import pool as pools
from specpipe.gateway.pool import Pool
from specpipe.gateway.upstream import Busy
from specpipe.triton.client import Completion
from tests.waiting import PATIENCE_S

CHUNKS = [Completion(text="a"), Completion(text="b", finish_reason="stop")]


class Server:
    """Answers with CHUNKS until `failure` is set, which comes after `num_before` of them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.failure: Exception | None = None
        self.num_before = 0
        self.num_asked = self.num_probes = self.num_running = 0
        self.last_response_s = float("-inf")
        self.is_closed = False

    async def answer(self, inputs: Any) -> AsyncGenerator[Completion, None]:
        self.num_asked += 1
        for i, chunk in enumerate(CHUNKS):
            if self.failure is not None and i == self.num_before:
                raise self.failure
            yield chunk

    async def probe(self, *, timeout_s: float) -> None:
        self.num_probes += 1
        if isinstance(self.failure, ServerError):
            raise self.failure

    async def close(self) -> None:
        self.is_closed = True


def with_pool(
    servers: list[Server], use: Callable[[Pool], Awaitable[None]], log: list[str] | None = None
) -> None:
    async def run() -> None:
        lines = [] if log is None else log
        pool = Pool(servers, log=lines.append)  # type: ignore[arg-type]
        try:
            await until(pool.is_ready)
            await use(pool)
        finally:
            await pool.close()
        assert all(server.is_closed for server in servers)

    asyncio.run(run())


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def ask(pool: Pool, key: str = "") -> list[Completion]:
    return [chunk async for chunk in pool.answer({}, sticky_key=key)]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    monkeypatch.setattr(pools, "RETURN_INTERVAL_S", 0.02)
    return [Server(f"grpc://server-{i}:8001") for i in range(3)]


def test_a_server_that_does_not_answer_is_left_out_and_comes_back(three: list[Server]) -> None:
    first, *_ = three
    lines: list[str] = []

    async def use(pool: Pool) -> None:
        failure = first.failure = NoAnswer(first.url, "connection refused")
        first.num_running = -1  # the least busy
        assert await ask(pool) == CHUNKS
        assert await ask(pool) == CHUNKS
        assert first.num_asked == 1
        assert sum(server.num_asked for server in three) == 3
        assert pool.states() == {server.url: server is not first for server in three}
        first.failure = None
        await until(lambda: answers(pool, first))
        assert await ask(pool) == CHUNKS
        assert first.num_asked == 2
        assert lines[-2:] == [f"{first.url} is left out: {failure}", f"{first.url} answers"]

    async def answers(pool: Pool, server: Server) -> bool:
        return pool.states()[server.url]

    with_pool(three, use, lines)


def test_an_answer_that_has_begun_is_not_asked_for_again(three: list[Server]) -> None:
    first, *others = three
    first.num_running = -1

    async def use(pool: Pool) -> None:
        first.failure, first.num_before = CutStream.after(1, first.url, "connection reset"), 1
        with pytest.raises(CutStream):
            await ask(pool)
        assert [server.num_asked for server in others] == [0, 0]
        assert not pool.states()[first.url]

    with_pool(three, use)


def test_a_refusal_is_the_answer_and_a_full_queue_asks_the_next_one(three: list[Server]) -> None:
    async def use(pool: Pool) -> None:
        for server, retry_after_s in zip(three, (9.0, 4.0, 7.0), strict=True):
            server.failure = Busy("the queue is full", retry_after_s=retry_after_s)
        with pytest.raises(Busy) as busy:
            await ask(pool)
        assert busy.value.retry_after_s == 4.0
        three[2].failure = None
        assert await ask(pool) == CHUNKS
        for server in three:
            server.failure, server.num_asked = RequestError("top_p is 2"), 0
        with pytest.raises(RequestError, match="top_p"):
            await ask(pool)
        assert sum(server.num_asked for server in three) == 1
        assert all(pool.states().values())

    with_pool(three, use)


def test_a_key_stays_with_its_server_and_moves_only_when_that_is_out(three: list[Server]) -> None:
    async def use(pool: Pool) -> None:
        homes = {}
        for key in map(str, range(60)):
            for server in three:
                server.num_asked = 0
            await ask(pool, key)
            await ask(pool, key)
            (homes[key],) = [server for server in three if server.num_asked == 2]
        counts = [list(homes.values()).count(server) for server in three]
        assert min(counts) >= 10
        gone = three[0]
        gone.failure = NoAnswer(gone.url, "gone")
        for key, home in homes.items():
            home.num_asked = 0
            await ask(pool, key)
            assert home is gone or home.num_asked == 1

    with_pool(three, use)


def test_nobody_is_there() -> None:
    server = Server("grpc://server:8001")

    async def use(pool: Pool) -> None:
        server.failure = NoAnswer(server.url, "connection refused")
        with pytest.raises(NoAnswer):
            await ask(pool)
        assert not await pool.is_ready()
        with pytest.raises(ServerError) as nobody:
            await ask(pool)
        said = "grpc://server:8001 does not answer: connection refused"
        assert str(nobody.value) == f"no server answers: grpc://server:8001: {said}"
        assert server.num_asked == 1

    with_pool([server], use)
