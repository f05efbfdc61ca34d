"""How benchmarks.gpu takes times: of copies, steps, rounds and answers, and how busy the GPU is."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.goals import covered
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.rounds import MOST_UNDER_WAY, Member
from specpipe.runtimes.torch.fused.decoder import Rows
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.graphs import Graphs
from specpipe.runtimes.torch.fused.rounds import FusedRounds
from specpipe.runtimes.torch.fused_sizes import ROWS
from specpipe.speculative.request import GREEDY, Request, Sampling, Statistics

_COPY_BYTES = {"cuda": 2 << 30, "cpu": 1 << 20}
_LAST_KERNEL = "accept"  # of a round


class Clock:
    """Device events on a GPU; on a CPU, where calls end when they return, the time of day."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Notes the moment at which the device comes to here."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Waits until the device has done all that it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def median(self, marks: Sequence[Any]) -> float:
        """The median seconds between neighbouring marks."""
        self.wait()
        pairs = zip(marks, marks[1:], strict=False)
        is_cuda = self.device.type == "cuda"
        seconds = (a.elapsed_time(b) / 1e3 if is_cuda else b - a for a, b in pairs)
        return float(statistics.median(seconds))

    def repeated(self, run: Callable[[], object], times: int) -> float:
        """The median seconds of something that is run again and again, without a pause between."""
        run()
        self.wait()
        marks = [self.mark()]
        for _ in range(times):
            run()
            marks.append(self.mark())
        return self.median(marks)


def bytes_per_second(clock: Clock) -> float:
    """What the memory moves in a large copy, read and written bytes together."""
    size = _COPY_BYTES[clock.device.type]
    source = torch.empty(size, dtype=torch.uint8, device=clock.device).random_()
    target = torch.empty_like(source)
    return 2 * size / clock.repeated(lambda: target.copy_(source), 20)


@contextmanager
def _sequence(engine: FusedEngine, num_tokens: int) -> Iterator[int]:
    """A sequence that seems to hold so many tokens, and has room for all the engine takes."""
    sequence = engine.allocate(prompt_length=num_tokens, max_tokens=engine.max_seq_len)
    engine.skip(sequence, num_tokens)
    try:
        yield sequence
    finally:
        engine.free(sequence)


@torch.inference_mode()
def fill_cache(engine: FusedEngine) -> None:
    """Puts noise into the KV cache: zeros take a GPU less power to move."""
    for tensors in (engine.cache.keys, engine.cache.values):
        for tensor in tensors:
            tensor.normal_()


@torch.inference_mode()
def step_seconds(
    clock: Clock, engine: FusedEngine, *, context: int, num_rows: int, times: int
) -> float:
    """The time of one step: rows of one sequence through all layers and the head, best token found.

    context  tokens that are cached before the rows
    """
    decoder, device = engine.decoder, engine.spec.device
    with _sequence(engine, context) as sequence:
        positions = torch.arange(context, context + num_rows, dtype=torch.int32, device=device)
        slots = torch.full((ROWS,), engine.slot(sequence), dtype=torch.int32, device=device)
        history = torch.ones(1, engine.capacity + ROWS, dtype=torch.int32, device=device)
        texts = torch.zeros_like(slots)
        is_long = engine.is_long(context + num_rows)
        rows = Rows(positions, slots, history, num_rows, num_rows, is_long, texts)

        def launch() -> None:
            decoder.layers(rows)
            decoder.score(num_rows, writes_logits=False)
            decoder.propose(rows, history, last=num_rows)

        graphs = Graphs(device)
        return clock.repeated(lambda: graphs.run("step", launch), times)


@torch.inference_mode()
def round_seconds(
    clock: Clock,
    rounds: FusedRounds,
    draft: FusedEngine,
    target: FusedEngine,
    *,
    context: int,
    num_draft_tokens: int,
    times: int,
) -> float:
    """The time of one draft-verify round after so many tokens, while the next one waits for it."""
    with _sequence(draft, context - 1) as of_draft, _sequence(target, context - 1) as of_target:
        rounds.join(of_target, [1] * context, GREEDY)
        rounds.give_draft(of_target, of_draft)
        marks: list[Any] = []
        for _ in range(times + 2):
            if rounds.num_under_way == MOST_UNDER_WAY:
                rounds.take()
            num_positions = context + (len(marks) + 1) * (num_draft_tokens + 1)
            rounds.launch([Member(of_target, num_draft_tokens, num_positions)])
            marks.append(clock.mark())
        rounds.drop()
        rounds.leave(of_target)
        return clock.median(marks[1:])  # the first one's kernels may just have been compiled


@dataclass(frozen=True)
class Answer:
    """What a pair made of a prompt: prefill is in its seconds.

    first_seconds  until the first token was there
    """

    token_ids: tuple[int, ...]
    seconds: float
    first_seconds: float
    statistics: Statistics

    @property
    def rate(self) -> float:
        return len(self.token_ids) / self.seconds


def request(
    prompt: Sequence[int],
    max_tokens: int,
    num_draft_tokens: int | None,
    sampling: Sampling = GREEDY,
) -> Request:
    """Asks for an answer that no token ends; num_draft_tokens None: the most there may be."""
    return Request(
        request_id="benchmark",
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        sampling=sampling,
        num_draft_tokens=num_draft_tokens,
    )


def answer(pair: EnginePair, asked: Request) -> Answer:
    """Runs one request to its end."""
    token_ids: list[int] = []
    first_seconds = 0.0
    start = time.perf_counter()
    pair.submit(asked)
    while pair.has_work():
        for chunk in pair.step():
            if chunk.token_ids and not token_ids:
                first_seconds = time.perf_counter() - start
            token_ids += chunk.token_ids
    seconds = time.perf_counter() - start
    if chunk.error is not None or chunk.statistics is None:
        raise RuntimeError(f"the pair gave no answer: {chunk.error}")
    return Answer(tuple(token_ids), seconds, first_seconds, chunk.statistics)


@dataclass(frozen=True)
class Busy:
    """busy      time that kernels cover in a round under the profiler / time of a round without
    profiled  both under the profiler, which slows the host
    """

    busy: float
    profiled: float


def busy(clock: Clock, pair: EnginePair, asked: Request, *, num_rounds: int) -> Busy | None:
    """How much of steady decode kernels cover; None without a GPU."""
    if clock.device.type != "cuda":
        return None
    with _decoding(pair, asked):
        start = time.perf_counter()
        for _ in range(num_rounds):
            pair.step()
        seconds = (time.perf_counter() - start) / num_rounds
    with _decoding(pair, asked):
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(num_rounds):
                pair.step()
            clock.wait()
    kernels = [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profile.events() or []
        if event.device_type.name == "CUDA"
    ]
    ends = sorted(end for name, _, end in kernels if name == _LAST_KERNEL)
    if len(ends) < 2:
        names = Counter(name for name, _, _ in kernels).most_common(5)
        raise RuntimeError(f"the profiler saw {len(ends)} rounds; kernels: {names}")
    spans = ((start, end) for _, start, end in kernels)
    first, last = ends[0], ends[-1]
    in_a_round = covered(spans, first, last) / (len(ends) - 1)
    return Busy(in_a_round / seconds, in_a_round * (len(ends) - 1) / (last - first))


@contextmanager
def _decoding(pair: EnginePair, asked: Request) -> Iterator[None]:
    """A request whose first rounds are done."""
    pair.submit(asked)
    for _ in range(5):
        pair.step()
    try:
        yield
    finally:
        pair.cancel(asked.request_id)
        while pair.has_work():
            pair.step()


@dataclass(frozen=True)
class Comparison:
    """How one engine's best tokens are those of another along a text.

    max_error  largest difference of logits, over the largest logit
    margins    how far apart the two tokens are for the other engine, where they differ
    """

    num_tokens: int
    num_different: int
    max_error: float
    margins: list[float]


def compare(found: Tensor, wanted: Tensor) -> Comparison:
    """Compares logits [N, V] with those that are wanted."""
    best, other = wanted.argmax(-1), found.argmax(-1)
    rows = (best != other).nonzero()[:, 0]
    margins = wanted[rows, best[rows]] - wanted[rows, other[rows]]
    error = (found - wanted).abs().max() / wanted.abs().max()
    return Comparison(len(wanted), len(rows), float(error), margins.tolist())
