"""A pair behind Triton, by gRPC: a client's view of a server that runs already.

Prompts are asked for as text, which the server makes tokens of again: it may find a few more or
less than were meant.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from benchmarks.load.closed_loop import Answer, ClosedLoop
from benchmarks.load.sides import Counts, Point, Process, num_draft_tokens
from specpipe.gateway.triton_upstream import TritonUpstream
from specpipe.text.tokenizer import Tokenizer


class ThroughTriton:
    """A server, asked by as many streams as there are, over one connection."""

    def __init__(self, process: Process) -> None:
        self._url = process.options["url"]
        self._tokenizer = Tokenizer.load(Path(process.target))
        self.about: dict[str, Any] = {"url": self._url}

    def run(self, point: Point, loop: ClosedLoop) -> Counts:
        return asyncio.run(self._run(point, loop))

    async def _run(self, point: Point, loop: ClosedLoop) -> Counts:
        upstream, counts = TritonUpstream(self._url), Counts()

        async def stream() -> None:
            while (answer := loop.ask()) is not None:
                await self._ask(upstream, point, loop, answer, counts)

        try:
            await asyncio.gather(*(stream() for _ in range(point.load.streams)))
        finally:
            await upstream.close()
        return counts

    async def _ask(
        self,
        upstream: TritonUpstream,
        point: Point,
        loop: ClosedLoop,
        answer: Answer,
        counts: Counts,
    ) -> None:
        inputs: dict[str, Any] = {
            "text_input": self._tokenizer.decode(point.prompt(answer)),
            "max_tokens": answer.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if (number := num_draft_tokens(point.setting)) is not None:
            inputs["num_draft_tokens"] = number
        async for completion in upstream.answer(inputs):
            if completion.token_ids:
                loop.take(answer.number, len(completion.token_ids), completion.token_ids)
            if (statistics := completion.statistics) is not None:
                counts.num_drafted += statistics.total_draft_tokens
                counts.num_accepted += statistics.total_accepted_draft_tokens
