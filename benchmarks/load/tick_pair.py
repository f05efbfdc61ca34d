"""A pair without models: a round takes a set time and gives every request a token.

So what is measured around it is the server alone.
"""

from __future__ import annotations

import os
import time
from typing import Any

from specpipe.runtimes.pair.pair import Occupancy
from specpipe.speculative.request import Chunk, Request, Statistics
from specpipe.triton.repository import contents

_WORDS = (" one", " two", " three", " four", " five")
_ROUND_S, _HOST_S = "SPECPIPE_TICK_ROUND_S", "SPECPIPE_TICK_HOST_S"


class TickPair:
    """round_s  of a round, longer where others hold the interpreter as it ends
    host_s   of work for the interpreter with which it ends, in CPU time
    """

    def __init__(self, round_s: float, host_s: float) -> None:
        self._round_s, self._host_s = round_s, host_s
        self._requests: dict[str, Request] = {}
        self._num_tokens: dict[str, int] = {}
        self._cancelled: set[str] = set()
        self.num_steps = 0

    def prepare(self, request: Request) -> None: ...

    def submit(self, request: Request) -> str:
        name = request.request_id
        self._requests[name], self._num_tokens[name] = request, 0
        return name

    def cancel(self, request_id: str) -> None:
        if request_id in self._requests:
            self._cancelled.add(request_id)

    def has_work(self) -> bool:
        return bool(self._requests)

    def interrupt(self) -> None: ...

    def close(self) -> None: ...

    def occupancy(self) -> Occupancy:
        return Occupancy(num_running=len(self._requests))

    def step(self) -> list[Chunk]:
        self.num_steps += 1
        time.sleep(self._round_s - self._host_s)
        end = time.thread_time() + self._host_s
        while time.thread_time() < end:
            pass
        return [self._next(request) for request in tuple(self._requests.values())]

    def _next(self, request: Request) -> Chunk:
        name = request.request_id
        number = self._num_tokens[name] = self._num_tokens[name] + 1
        chunk = Chunk(request_id=name, text=_WORDS[number % len(_WORDS)], token_ids=(number,))
        is_cancelled = name in self._cancelled
        if not is_cancelled and number < request.max_tokens:
            return chunk
        del self._requests[name], self._num_tokens[name]
        self._cancelled.discard(name)
        return Chunk(
            request_id=name,
            text=chunk.text,
            token_ids=chunk.token_ids,
            finish_reason="cancelled" if is_cancelled else "length",
            statistics=Statistics(
                num_input_tokens=len(request.prompt_token_ids),
                num_output_tokens=number,
                num_steps=number,
                total_draft_tokens=0,
                total_accepted_draft_tokens=0,
                seed_used=0,
                acceptance_rate=0.0,
            ),
        )


class _Runtime:
    def load_pair(self, *_: Any) -> TickPair:
        return TickPair(float(os.environ[_ROUND_S]), float(os.environ[_HOST_S]))


def set_times(round_s: float, host_s: float) -> None:
    """Says how long the rounds of pairs are that processes of this one load."""
    os.environ[_ROUND_S], os.environ[_HOST_S] = str(round_s), str(host_s)


def register() -> None:
    """Makes this process load a TickPair, whatever runtime pair.json names."""
    contents.load_runtime = lambda name: _Runtime()  # type: ignore[assignment,return-value]
