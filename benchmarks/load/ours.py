"""Our side in process: pairs on the fused kernels, by their public face."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import FusedModel, Source, plain_engine
from benchmarks.gpu.tensors import RoundedFormat
from benchmarks.gpu.timing import Clock, step_seconds
from benchmarks.inflate import Size, size_of
from benchmarks.load.loop import Answer, Loop
from benchmarks.load.sides import (
    FORMATS,
    Counts,
    Emitted,
    Process,
    drive,
    num_draft_tokens,
    pair_of,
    words_of,
)
from specpipe.checkpoints.parallel_draft import MASK_KEY
from specpipe.errors import CheckpointError
from specpipe.runtimes.pair.pair import Pair, PairOptions
from specpipe.runtimes.torch import pair as torch_pair
from specpipe.runtimes.torch.engine import TorchEngine
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused_sizes import PAGE, pages_of, spare_positions
from specpipe.speculative.request import Request
from specpipe.text.tokenizer import Tokenizer

MAX_NUM_TOKENS = 1024
"""Tokens of prompts in a step: an H200 reads more no faster."""

_WAITING = 1024
"""Requests that may wait, which an open loop wants."""

_CONTEXT, _TIMES = 256, 20
"""Tokens before a pass that is timed, or fewer where texts are shorter, and how often it is."""


class Ours:
    """Requests of one pair after another, each with its own draft length."""

    def __init__(self, pairs: Mapping[str, Pair], about: dict[str, Any]) -> None:
        self.about = about
        self.pairs = pairs
        self._num_runs = 0

    def run(self, setting: str, loop: Loop) -> Counts:
        self._num_runs += 1
        pair = self.pairs[pair_of(setting)]
        asked = _Asked(pair, num_draft_tokens(setting), salt=str(self._num_runs))
        before = asked.late_work()
        drive(asked, loop)
        after = asked.late_work()
        if before is not None and after is not None:
            asked.counts.num_late = after - before
        return asked.counts


class _Asked:
    """A pair, asked with one draft length; None: as many draft tokens as pay.

    salt  of its own, so that it begins with what no earlier run has read
    """

    def __init__(self, pair: Pair, num_draft_tokens: int | None, salt: str) -> None:
        self.counts = Counts()
        self._pair, self._num_draft_tokens, self._salt = pair, num_draft_tokens, salt

    def submit(self, answer: Answer) -> None:
        request = Request(
            request_id=str(answer.number),
            prompt_token_ids=tuple(answer.prompt),
            max_tokens=answer.max_tokens,
            num_draft_tokens=self._num_draft_tokens,
            cache_salt=self._salt,
        )
        self._pair.submit(request)

    def step(self) -> Iterator[Emitted]:
        for chunk in self._pair.step():
            if chunk.error is not None:
                raise RuntimeError(f"the pair gave no answer: {chunk.error}")
            if (statistics := chunk.statistics) is not None:
                self.counts.num_drafted += statistics.total_draft_tokens
                self.counts.num_accepted += statistics.total_accepted_draft_tokens
                self.counts.num_cached += statistics.num_cached_input_tokens
                self.counts.num_preempted += statistics.num_preemptions
            is_last = chunk.finish_reason is not None
            yield Emitted(int(chunk.request_id), chunk.token_ids, is_last)

    def late_work(self) -> int | None:
        """What was compiled and recorded since the pair was loaded; None where it does not say."""
        late_work = asdict(self._pair.occupancy()).get("late_work")
        return None if late_work is None else sum(late_work.values())


def load(process: Process) -> Ours:
    """Makes the weights in the memory of the device, and a pair for each kind of setting.

    They run on the fused kernels; on a CPU on torch's own.
    """
    device, dtype = torch.device(process.device), getattr(torch, process.dtype)
    of_draft, of_target = map(size_of, process.sizes) if process.sizes else (None, None)

    def source(folder: str, size: Size | None) -> Source:
        return Source(Path(folder), size, device, dtype, process.positions or None)

    target = source(process.target, of_target)
    load_pair = (_PlainPairs if device.type == "cpu" else _FusedPairs)(target, process)
    pairs: dict[str, Pair] = {}
    about = {}
    for kind in dict.fromkeys(pair_of(setting) for setting in process.settings):
        is_parallel = "parallel" in words_of(kind)
        draft = source(process.parallel if is_parallel else process.draft, of_draft)
        options = _options(process, kind, draft)
        pairs[kind] = load_pair(kind, draft, options)
        about[kind or "usual"] = asdict(options)
    gc.freeze()  # as serving does
    return Ours(pairs, {"options": about})


def _options(process: Process, kind: str, draft: Source) -> PairOptions:
    words, parallel = words_of(kind), draft.config().parallel
    if parallel is None and "parallel" in words:
        raise CheckpointError(f"{draft.folder} has no {MASK_KEY}: it proposes tokens one by one")
    return PairOptions(
        num_draft_tokens=process.most_drafted,
        parallel=parallel,
        prompt_lookup=not words & {"drafts", "noise"},
        prefix_reuse="reuse" in words,  # the prompts of closed loops come again and again
        max_batch_size=process.max_streams,
        max_seq_len=process.loads[0][1] if "half" in words else process.max_length,
        max_num_tokens=process.options.get("max_num_tokens", MAX_NUM_TOKENS),
        max_queue_size=_WAITING,
    )


class _PlainPairs:
    """Pairs on a CPU."""

    def __init__(self, target: Source, process: Process) -> None:
        self._target = target
        self._make = Tokenizer.load(Path(process.target)).detokenizer

    def __call__(self, kind: str, draft: Source, options: PairOptions) -> Pair:
        if not words_of(kind) <= {"drafts", "parallel"}:
            raise ValueError(f"on a CPU there is no pair '{kind}'")
        engines = [plain_engine(source, **_limits(options)) for source in (draft, self._target)]
        return torch_pair.pair_of(engines[0], engines[1], options, self._make)


class _FusedPairs:
    """Pairs that share their weights."""

    def __init__(self, target: Source, process: Process) -> None:
        self._target, self._process = target, process
        self._models: dict[tuple[Path, RoundedFormat | None, bool], FusedModel] = {}
        self._make = Tokenizer.load(Path(process.target)).detokenizer

    def __call__(self, kind: str, draft: Source, options: PairOptions) -> Pair:
        words = words_of(kind)
        of_draft, of_target = (
            next((name for word, name in FORMATS.items() if f"{word}{role}" in words), None)
            for role in ("draft", "")
        )
        models = (
            self._model(draft, of_draft, is_noise="noise" in words),
            self._model(self._target, of_target),
        )
        limits = {**_limits(options), "kv_cache_tokens": self._kv_cache_tokens(kind, options)}
        engines = [model.engine(**limits) for model in models]
        return torch_pair.fused_pair_of(engines[0], engines[1], options, self._make)

    def _model(
        self, source: Source, rounded: RoundedFormat | None, *, is_noise: bool = False
    ) -> FusedModel:
        key = source.folder, rounded, is_noise
        if key not in self._models:
            self._models[key] = FusedModel.make(source, rounded)
            if is_noise:
                self._models[key].spoil()
        return self._models[key]

    def _kv_cache_tokens(self, kind: str, options: PairOptions) -> int:
        """Positions of all that is asked at once, in whole pages."""
        spare = spare_positions(options.num_draft_tokens)

        def wanted(streams: int, length: int) -> int:
            return streams * PAGE * pages_of(length + spare)

        if "half" in words_of(kind):
            return wanted(*self._process.loads[0]) // 2
        return max(wanted(streams, length) for streams, length in self._process.loads)


def _limits(options: PairOptions) -> dict[str, int]:
    return {
        "max_seq_len": options.max_seq_len,
        "max_draft_len": options.num_draft_tokens,
        "max_batch_size": options.max_batch_size,
    }


def pass_seconds(engine: TorchEngine | FusedEngine, num_rows: int, *, num_scored: int = 0) -> float:
    """Times one pass of so many rows of one text; num_scored of them give logits, or all.

    On the fused kernels it is the device's time, of all rows scored.
    """
    context = min(_CONTEXT, engine.max_seq_len - num_rows)
    if isinstance(engine, FusedEngine):
        clock = Clock(engine.spec.device)
        return step_seconds(clock, engine, context=context, num_rows=num_rows, times=_TIMES)
    num_scored = num_scored or num_rows
    return min(_forward_seconds(engine, context, num_rows, num_scored) for _ in range(_TIMES))


def _forward_seconds(engine: TorchEngine, context: int, num_rows: int, num_scored: int) -> float:
    sequence = engine.allocate(prompt_length=context, max_tokens=context + num_rows)
    engine.skip(sequence, context)
    start = time.perf_counter()
    engine.forward([(sequence, [0] * num_rows)], [num_scored])
    seconds = time.perf_counter() - start
    engine.free(sequence)
    return seconds
