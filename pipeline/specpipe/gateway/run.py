"""Runs a door until a signal: makes its parts, lets uvicorn serve them, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import uvicorn
import uvloop

from specpipe.errors import ServerError
from specpipe.gateway.access_log import AccessLog
from specpipe.gateway.app import make_app
from specpipe.gateway.door import Door
from specpipe.gateway.keys import Keys
from specpipe.gateway.listening import bind, check_open, parse_listen, url_of
from specpipe.gateway.metrics import GatewayMetrics
from specpipe.gateway.models import ServedModel
from specpipe.gateway.pool import Pool
from specpipe.gateway.protocol import DoorProtocol
from specpipe.gateway.settings import PROBE_KEY_VARIABLE, GatewaySettings
from specpipe.gateway.triton_upstream import TritonUpstream
from specpipe.machine.callables import Log
from specpipe.machine.signals import ending_signals
from specpipe.runtimes.pair_file import read_pair

_OVERTIME_S = 30.0  # beyond what the server gives an answer, since it says more than silence
_EXIT_TIME_S = 2  # for connections that are left after the drain
_LOOK_INTERVAL_S = 0.05


def run(
    settings: GatewaySettings, *, log: Log, on_ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP: the first drains, the second ends the process.

    on_ready gets the URL as soon as a server behind the door answers. Raises KeyboardInterrupt
    after SIGINT, and ServerError where the door cannot stand there. For the main thread.
    """
    keys = Keys(settings.keys, os.environ, log=log)
    listen = parse_listen(settings.listen)
    check_open(listen, has_keys=keys.are_needed, allow_no_keys=settings.allow_no_keys)
    if keys.are_needed and (probe_key := os.environ.get(PROBE_KEY_VARIABLE)):
        keys.add("specpipe-serve", probe_key)
    served = ServedModel.load(settings.repository, settings.names)
    given = settings.listener
    with bind(listen) if given is None else socket.socket(fileno=given) as listener:
        number = uvloop.run(_serve(settings, keys, served, listener, log, on_ready))
    if number == signal.SIGINT:
        raise KeyboardInterrupt


async def _serve(
    settings: GatewaySettings,
    keys: Keys,
    served: ServedModel,
    listener: socket.socket,
    log: Log,
    on_ready: Callable[[str], None],
) -> int:
    async with standing(settings, keys, served, listener, log) as stands:
        telling = asyncio.create_task(_tell_ready(stands, url_of(listener), on_ready))
        try:
            number = await _first_signal(stands.serving)
        finally:
            telling.cancel()
        log(f"the door is closed: requests have {settings.drain_timeout_s:g} s to finish")
        if num_left := await stands.door.drain(settings.drain_timeout_s):
            log(f"{num_left} requests are cut off")
        return number


@dataclass(frozen=True)
class Standing:
    """A door that stands, with all that is behind it."""

    door: Door
    pool: Pool
    server: uvicorn.Server
    serving: asyncio.Task[None]

    async def is_ready(self) -> bool:
        return self.server.started and await self.pool.is_ready()


@contextlib.asynccontextmanager
async def standing(
    settings: GatewaySettings, keys: Keys, served: ServedModel, listener: socket.socket, log: Log
) -> AsyncIterator[Standing]:
    """Yields a door that takes requests; what is under way at the end is cut off."""
    timeout_s = settings.request_timeout_s + _OVERTIME_S
    token_id = read_pair(settings.repository).options.used_token_id
    upstreams = [TritonUpstream(u, timeout_s=timeout_s, probe_id=token_id) for u in settings.urls]
    pool = Pool(upstreams, log=log)
    max_body_bytes = 4 * served.limits.max_messages_bytes
    has_log = settings.has_access_log
    door = Door(
        make_app(pool, served, is_lenient=settings.is_lenient, max_body_bytes=max_body_bytes),
        keys=keys,
        metrics=GatewayMetrics(pool.states),
        max_body_bytes=max_body_bytes,
        access_log=AccessLog(log, has_prompts=settings.log_prompts) if has_log else None,
    )
    server = _Server(
        uvicorn.Config(
            door,
            interface="asgi3",
            http=DoorProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            server_header=False,
            log_config=None,
            log_level="error",
            timeout_graceful_shutdown=_EXIT_TIME_S,
        )
    )
    await pool.begin()  # whoever comes first is answered, too
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield Standing(door, pool, server, serving)
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        await pool.close()


class _Server(uvicorn.Server):
    """uvicorn's, without its handlers of signals, which drop what is under way."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _first_signal(serving: asyncio.Task[None]) -> int:
    """Waits for a signal; a second one ends the process at once.

    Not by asyncio's own handlers: those would take the place of the command's (signals.py).
    """
    loop = asyncio.get_running_loop()
    first: asyncio.Future[int] = loop.create_future()
    numbers: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if numbers:
            os._exit(128 + number)
        numbers.append(number)
        loop.call_soon_threadsafe(first.set_result, number)

    for number in ending_signals():
        signal.signal(number, handle)
    await asyncio.wait((first, serving), return_when=asyncio.FIRST_COMPLETED)
    if not first.done():
        await serving
        raise ServerError("the door's HTTP server ended")
    return first.result()


async def _tell_ready(standing: Standing, url: str, on_ready: Callable[[str], None]) -> None:
    while not await standing.is_ready():
        await asyncio.sleep(_LOOK_INTERVAL_S)
    on_ready(url)
