"""Several Tritons behind the door: which one a request goes to, and which are left out meanwhile.

A server is left out from the first call that it does not answer, or the first probe, and comes back
after a probe, which is a real request for one token. A request goes to another server only while
nothing of its answer has come: two halves of one answer need not fit.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specpipe.errors import CutStream, NoAnswer, ServerError, to_sentence
from specpipe.gateway.triton_upstream import TritonUpstream
from specpipe.gateway.upstream import Busy
from specpipe.machine.callables import Clock, Log
from specpipe.triton.client.completion import Completion

PROBE_INTERVAL_S = 5.0  # of a server that is well and sends nothing
RETURN_INTERVAL_S = 1.0  # of one that is left out
PROBE_TIMEOUT_S = 30.0

_BEGIN_TIME_S = 5.0
_LOOK_INTERVAL_S = 0.01

_NOT_ASKED = "it was not asked yet"


@dataclass(eq=False)
class Member:
    """A server of the pool; `fault` says why it is left out, None that it is not."""

    server: TritonUpstream
    fault: str | None = _NOT_ASKED

    def weight(self, sticky_key: str) -> bytes:
        """Returns what decides between servers, for one key: the same as long as both are there.

        Rendezvous hashing (Thaler and Ravishankar 1998): where a server leaves, only its own keys
        move.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{len(sticky_key)} {sticky_key}{self.server.url}".encode())
        return digest.digest()


class Pool:
    """An `Upstream` of several servers; to be made where its event loop runs."""

    def __init__(
        self,
        servers: Sequence[TritonUpstream],
        *,
        log: Log = lambda line: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.members = [Member(server) for server in servers]
        self._log, self._clock = log, clock
        self._watching = [asyncio.create_task(self._watch(member)) for member in self.members]

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for member in self.members:
            await member.server.close()

    async def begin(self) -> None:
        """Waits until a server answers, or all were asked in vain, or a while."""
        deadline = self._clock() + _BEGIN_TIME_S
        while self._clock() < deadline and not await self.is_ready():
            if all(member.fault != _NOT_ASKED for member in self.members):
                return
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def states(self) -> dict[str, bool]:
        """Returns by URL whether requests go to a server."""
        return {member.server.url: member.fault is None for member in self.members}

    async def is_ready(self) -> bool:
        return any(member.fault is None for member in self.members)

    async def answer(
        self, inputs: Mapping[str, Any], *, sticky_key: str = ""
    ) -> AsyncGenerator[Completion, None]:
        """Asks one server after the other, until one begins to answer."""
        failure: Exception | None = None
        for member in self._in_order(sticky_key):
            has_begun = False
            try:
                async with contextlib.aclosing(member.server.answer(inputs)) as chunks:
                    async for chunk in chunks:
                        has_begun = True
                        yield chunk
                return
            except Busy as exc:
                if not isinstance(failure, Busy) or exc.retry_after_s < failure.retry_after_s:
                    failure = exc
            except (CutStream, NoAnswer) as exc:
                self._leave_out(member, exc)
                if has_begun:
                    raise
                failure = failure or exc
        raise failure or ServerError(f"no server answers: {self._faults()}")

    def _in_order(self, sticky_key: str) -> list[Member]:
        """Returns those that are well: of a key always the same first, else the least busy."""
        well = [member for member in self.members if member.fault is None]
        if sticky_key:
            return sorted(well, key=lambda member: member.weight(sticky_key))
        return sorted(well, key=lambda member: member.server.num_running)

    def _faults(self) -> str:
        return "; ".join(f"{member.server.url}: {member.fault}" for member in self.members)

    def _leave_out(self, member: Member, failure: Exception) -> None:
        if member.fault in (None, _NOT_ASKED):
            self._log(f"{member.server.url} is left out: {to_sentence(failure)}")
        member.fault = to_sentence(failure)

    async def _watch(self, member: Member) -> None:
        while True:
            await self._probe(member)
            await asyncio.sleep(PROBE_INTERVAL_S if member.fault is None else RETURN_INTERVAL_S)

    async def _probe(self, member: Member) -> None:
        """Asks a server for one token, unless it answered others just now."""
        began = self._clock()
        if member.fault is None and member.server.last_response_s > began - PROBE_INTERVAL_S:
            return
        try:
            await member.server.probe(timeout_s=PROBE_TIMEOUT_S)
        except ServerError as exc:
            # Long prompts may keep a probe waiting on a server that answers others meanwhile.
            if member.fault is not None or member.server.last_response_s < began:
                self._leave_out(member, exc)
            return
        except Exception as exc:  # or nobody would ask this server again
            self._leave_out(member, exc)
            return
        if member.fault not in (None, _NOT_ASKED):
            self._log(f"{member.server.url} answers")
        member.fault = None
