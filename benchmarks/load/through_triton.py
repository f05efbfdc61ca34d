"""A pair behind Triton, by gRPC: a client's view of a server that runs already.

Prompts are asked for as text, which the server makes tokens of again: it may find a few more or
less than were meant.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from benchmarks.load.loop import Answer, Loop
from benchmarks.load.sides import Counts, Process, num_draft_tokens
from specpipe.gateway.triton_upstream import TritonUpstream
from specpipe.text.tokenizer import Tokenizer


class ThroughTriton:
    """A server, asked over one connection."""

    def __init__(self, process: Process) -> None:
        self._url = process.options["url"]
        self._tokenizer = Tokenizer.load(Path(process.target))
        self.about: dict[str, Any] = {"url": self._url}

    def run(self, setting: str, loop: Loop) -> Counts:
        return asyncio.run(self._run(setting, loop))

    async def _run(self, setting: str, loop: Loop) -> Counts:
        upstream, counts = TritonUpstream(self._url), Counts()
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                while (answer := loop.ask()) is not None:
                    asking = self._ask(upstream, setting, loop, answer, counts)
                    running.add(asyncio.create_task(asking))
                if running:
                    ended, running = await asyncio.wait(
                        running, timeout=loop.pause(), return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in ended:
                        task.result()
                elif (pause := loop.pause()) is not None:
                    await asyncio.sleep(pause)
                else:
                    return counts
        finally:
            for task in running:
                task.cancel()
            await upstream.close()

    async def _ask(
        self, upstream: TritonUpstream, setting: str, loop: Loop, answer: Answer, counts: Counts
    ) -> None:
        inputs: dict[str, Any] = {
            "text_input": self._tokenizer.decode(answer.prompt),
            "max_tokens": answer.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if (number := num_draft_tokens(setting)) is not None:
            inputs["num_draft_tokens"] = number
        async for completion in upstream.answer(inputs):
            if completion.token_ids:
                loop.take(answer.number, len(completion.token_ids), completion.token_ids)
            if (statistics := completion.statistics) is not None:
                counts.num_drafted += statistics.total_draft_tokens
                counts.num_accepted += statistics.total_accepted_draft_tokens
