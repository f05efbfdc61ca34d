"""Our side in process: a pair on the fused kernels, by its public face."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import FusedModel, Source, plain_engine
from benchmarks.inflate import Size, size_of
from benchmarks.load.closed_loop import Answer, ClosedLoop
from benchmarks.load.sides import Counts, Emitted, Point, Process, drive, num_draft_tokens
from specpipe.runtimes.pair.pair import Pair, PairOptions
from specpipe.runtimes.torch.pair import fused_pair_of, pair_of
from specpipe.speculative.request import Request
from specpipe.text.tokenizer import Tokenizer

MAX_NUM_TOKENS = 1024
"""Tokens of prompts in a step: an H200 reads more no faster."""


class Ours:
    """Requests of one pair, each with its own draft length."""

    def __init__(self, pair: Pair, about: dict[str, Any]) -> None:
        self.about = about
        self._pair = pair
        self._counts = Counts()

    def run(self, point: Point, loop: ClosedLoop) -> Counts:
        self._counts = Counts()
        before = self._late_work()
        drive(self, point, loop)
        after = self._late_work()
        if before is not None and after is not None:
            self._counts.num_late = after - before
        return self._counts

    def submit(self, answer: Answer, prompt: Sequence[int], setting: str) -> None:
        request = Request(
            request_id=str(answer.number),
            prompt_token_ids=tuple(prompt),
            max_tokens=answer.max_tokens,
            num_draft_tokens=num_draft_tokens(setting),
        )
        self._pair.submit(request)

    def step(self) -> Iterator[Emitted]:
        for chunk in self._pair.step():
            if chunk.error is not None:
                raise RuntimeError(f"the pair gave no answer: {chunk.error}")
            if (statistics := chunk.statistics) is not None:
                self._counts.num_drafted += statistics.total_draft_tokens
                self._counts.num_accepted += statistics.total_accepted_draft_tokens
            is_last = chunk.finish_reason is not None
            yield Emitted(int(chunk.request_id), chunk.token_ids, is_last)

    def _late_work(self) -> int | None:
        """What was compiled and recorded since the pair was loaded; None where it does not say."""
        late_work = asdict(self._pair.occupancy()).get("late_work")
        return None if late_work is None else sum(late_work.values())


def load(process: Process) -> Ours:
    """Makes both engines in the memory of the device, and a pair of them.

    They run on the fused kernels; on a CPU on torch's own.
    """
    device, dtype = torch.device(process.device), getattr(torch, process.dtype)
    sizes: list[Size | None] = [size_of(size) for size in process.sizes]
    draft, target = (
        Source(Path(folder), size, device, dtype, process.positions or None)
        for folder, size in zip((process.draft, process.target), sizes or [None, None], strict=True)
    )
    options = PairOptions(
        num_draft_tokens=process.most_drafted,
        prompt_lookup=process.kind == "lookup",
        max_batch_size=process.max_streams,
        max_seq_len=process.max_length,
        max_num_tokens=process.options.get("max_num_tokens", MAX_NUM_TOKENS),
        max_queue_size=process.max_streams,
    )
    limits = {
        "max_seq_len": options.max_seq_len,
        "max_draft_len": options.num_draft_tokens,
        "max_batch_size": options.max_batch_size,
    }
    make = Tokenizer.load(Path(process.target)).detokenizer
    about = {"options": asdict(options)}
    if device.type == "cpu":
        if process.kind == "noise":
            raise ValueError("drafts of noise are made on a GPU only")
        engines = [plain_engine(source, **limits) for source in (draft, target)]
        return Ours(pair_of(engines[0], engines[1], options, make), about)
    of_draft, of_target = FusedModel.make(draft), FusedModel.make(target)
    if process.kind == "noise":
        of_draft.spoil()
    pair = fused_pair_of(of_draft.engine(**limits), of_target.engine(**limits), options, make)
    return Ours(pair, about)
