"""The answers of one request, asked for at once and taken as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import Receive

from specpipe.gateway.inputs import Ask
from specpipe.gateway.upstream import Upstream
from specpipe.triton.client.completion import Completion

T = TypeVar("T")

Answers = AsyncGenerator[tuple[int, Completion], None]

_MOST_AT_ONCE = 32  # answers of one request that are asked for before others have ended: a guess


class ClientGone(Exception):
    """Nobody waits for the response any more."""


async def answers(upstream: Upstream, asks: Sequence[Ask], *, sticky_key: str) -> Answers:
    """Yields every chunk of every answer, with the number of its ask.

    A failure of one ends all. Closing the generator cancels what is still being answered.
    """
    if len(asks) == 1:
        async with contextlib.aclosing(
            upstream.answer(asks[0].inputs, sticky_key=sticky_key)
        ) as answer:
            async for completion in answer:
                yield 0, completion
        return
    # A client that reads slowly holds up its answers here, not in memory.
    arrived: asyncio.Queue[tuple[int, Completion | BaseException | None]] = asyncio.Queue(1)
    room = asyncio.Semaphore(_MOST_AT_ONCE)

    async def ask(index: int) -> None:
        try:
            async with (
                room,
                contextlib.aclosing(
                    upstream.answer(asks[index].inputs, sticky_key=sticky_key)
                ) as answer,
            ):
                async for completion in answer:
                    await arrived.put((index, completion))
            await arrived.put((index, None))
        except Exception as exc:
            await arrived.put((index, exc))

    tasks = [asyncio.ensure_future(ask(index)) for index in range(len(asks))]
    try:
        num_left = len(asks)
        while num_left:
            index, found = await arrived.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                num_left -= 1
            else:
                yield index, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collected(arriving: Answers, num: int) -> list[Completion]:
    """Returns answers that come in one piece each, in their order."""
    completions = {}
    async with contextlib.aclosing(arriving):
        async for index, completion in arriving:
            completions[index] = completion
    return [completions[index] for index in range(num)]


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns what comes of the work; cancels it, and raises ClientGone, when the client leaves.

    receive  of a request whose body was read
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientGone
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
