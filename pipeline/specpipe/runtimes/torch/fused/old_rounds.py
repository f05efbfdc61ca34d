"""Draft-verify rounds of one stream, each a single CUDA graph; its state is on the GPU.

A round drafts K tokens, verifies them, accepts and moves on without the host, which is told
afterwards and, meanwhile, has given the GPU the next round already. What a round starts from:

history    the tokens of the text by position, and behind them what is being drafted
positions  a run of positions, one apart; that of the last token of the text stands at FIRST

The draft begins each round with two tokens, the last one and the one before: of a round whose
draft tokens were all accepted, it never read the last. Reading one twice changes nothing.

A greedy round takes the best token of each row; one of a sampled request draws them: sampling.py.
Draft tokens may be copied from the text instead: lookup.py.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specpipe.runtimes.pair.sampler import RoundResult
from specpipe.runtimes.pair.single_stream import MOST_UNDER_WAY
from specpipe.runtimes.torch.fused import old_kernels
from specpipe.runtimes.torch.fused.decoder import Rows
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.graphs import Graphs
from specpipe.runtimes.torch.fused.old_drawing import Drawing, Mode, Settings, Text
from specpipe.runtimes.torch.fused_sizes import CHUNK, ROWS
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.noise import Purpose
from specpipe.speculative.request import GREEDY, Sampling

MAX_DRAFT_TOKENS = ROWS - 1

_NUM_POSITIONS = 128  # a power of 2
_FIRST = _NUM_POSITIONS - 2 * ROWS
_CATCH_UP = 16
"""Tokens that the draft catches up with in one launch, after rounds without it."""

_COMMON = (Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9))
"""What rounds are recorded for beforehand, while texts are short."""

_EVERY_MODE = [
    Sampling(temperature=1.0, is_seeded=is_seeded, top_k=top_k, top_p=top_p)
    for is_seeded in (False, True)
    for top_k in (0, 2)
    for top_p in (1.0, 0.9)
]
"""Between them these take every kernel in every form."""

_TIMED_ROUNDS = 5
_TIMED_CONTEXT = 256


@dataclass
class _UnderWay:
    result: Tensor
    done: torch.cuda.Event | None
    num_unread: int
    """The most of its tokens that the draft has not read."""


class OldRounds:
    """Runs rounds of one sequence at a time, on the engines of a pair."""

    def __init__(
        self,
        draft: FusedEngine,
        target: FusedEngine,
        *,
        num_draft_tokens: int,
        vocab_size: int,
        unused: Sequence[tuple[int, int]],
        copies: bool = False,
    ) -> None:
        """num_draft_tokens is the most that a round drafts, up to MAX_DRAFT_TOKENS.

        copies says whether there will be rounds whose draft tokens are copied from the text.
        """
        self._draft, self._target = draft, target
        self._num_draft_tokens, self._vocab_size = num_draft_tokens, vocab_size
        self._device = target.spec.device
        for engine in (draft, target):
            engine.decoder.use_tokens(vocab_size, list(unused))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self._device)

        self._graphs = Graphs(self._device)
        self._history = zeros(max(draft.capacity, target.capacity) + 2 * ROWS)
        self._positions = zeros(_NUM_POSITIONS)
        self._draft_slots, self._target_slots = zeros(ROWS), zeros(ROWS)
        self._texts = zeros(ROWS)
        self._mode: Mode | None = None
        self._settings = Settings(self._device)
        self._draft_drawing, self._target_drawing = self._drawings()
        self._result = zeros(2 + ROWS)
        is_cuda = self._device.type == "cuda"
        self._told = [
            torch.zeros(2 + ROWS, dtype=torch.int32, pin_memory=is_cuda)
            for _ in range(MOST_UNDER_WAY + 1)
        ]
        self._under_way: deque[_UnderWay] = deque()
        self._num_launched = 0
        self._is_long = False
        self._num_unread = 0
        self._has_draft = False
        self._copies = copies
        self.costs: StepCosts | None = None
        self.copy_costs: StepCosts | None = None

    def _drawings(self) -> tuple[Drawing, Drawing]:
        """What draws tokens for the draft and for the target."""
        is_unused = self._target.decoder.is_unused[: self._vocab_size]
        text = Text(self._history, self._positions, _FIRST)

        def drawing(engine: FusedEngine, num_rows: int) -> Drawing:
            return Drawing(engine.decoder, self._settings, text, is_unused, num_rows=num_rows)

        most = self._num_draft_tokens
        return drawing(self._draft, max(most, 1)), drawing(self._target, most + 1)

    @property
    def num_under_way(self) -> int:
        """Rounds that were launched and not yet taken."""
        return len(self._under_way)

    @torch.inference_mode()
    def begin(
        self,
        token_ids: Sequence[int],
        *,
        target_sequence: int,
        draft_sequence: int | None,
        sampling: Sampling = GREEDY,
    ) -> None:
        """Starts with a text of which the target has cached all but the last token.

        The draft may lack one more. Without a draft_sequence rounds must have no draft tokens.
        """
        assert not self._under_way
        num_tokens = len(token_ids)
        self._history[:num_tokens] = torch.tensor(token_ids, dtype=torch.int32)
        first = num_tokens - 1 - _FIRST
        self._positions.copy_(torch.arange(first, first + _NUM_POSITIONS, dtype=torch.int32))
        self._target_slots.fill_(self._target.slot(target_sequence))
        self._has_draft = draft_sequence is not None
        if draft_sequence is not None:
            self._draft_slots.fill_(self._draft.slot(draft_sequence))
        self._num_unread = 0
        self._mode = None
        if not sampling.is_greedy:
            self._mode = self._settings.write(sampling, self._vocab_size)

    @torch.inference_mode()
    def launch(self, num_draft_tokens: int, *, num_positions: int, is_copied: bool = False) -> None:
        """Puts a round on the GPU; num_positions is what its text may have reached by its end."""
        assert len(self._under_way) < len(self._told), "take a round first"
        self._is_long = self._target.is_long(num_positions)
        is_drafting = num_draft_tokens > 0 and not is_copied
        num_unread = self._num_unread + sum(r.num_unread for r in self._under_way)
        can_read = self._has_draft and num_positions <= self._draft.capacity
        if is_drafting or (can_read and num_unread + num_draft_tokens + 1 >= _FIRST):
            self._catch_up(num_unread)
        key = ("round", num_draft_tokens, is_copied, self._is_long, self._mode)
        self._graphs.run(key, lambda: self._round(num_draft_tokens, is_copied=is_copied))
        told = self._told[self._num_launched % len(self._told)]
        self._num_launched += 1
        told.copy_(self._result, non_blocking=True)
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        left_unread = 0 if is_drafting else num_draft_tokens + 1
        self._under_way.append(_UnderWay(told, done, left_unread))

    def take(self) -> RoundResult:
        """Waits for the oldest round under way and says what came of it."""
        under_way = self._under_way.popleft()
        if under_way.done is not None:
            under_way.done.synchronize()
        num_emitted, num_judged, *token_ids = under_way.result.tolist()
        self._num_unread += min(under_way.num_unread, num_emitted)
        return RoundResult(token_ids[:num_emitted] if num_emitted else None, num_judged)

    def drop(self) -> None:
        """Waits for what is under way and forgets it: the sequence has ended, or goes elsewhere."""
        while self._under_way:
            self.take()

    def _catch_up(self, num_unread: int) -> None:
        """Lets the draft read what was emitted by rounds without it.

        `launch` sees to it that this is no more than positions reach back.
        """
        if num_unread:
            # One more: it need not have read the last token before those either.
            launches = min(-(-(num_unread + 1) // _CATCH_UP), _FIRST // _CATCH_UP)
            for blocks_ago in range(launches, 0, -1):
                self._read_block(blocks_ago)
        self._num_unread = 0
        for under_way in self._under_way:
            under_way.num_unread = 0

    def _read_block(self, blocks_ago: int) -> None:
        first = _FIRST - blocks_ago * _CATCH_UP
        key = ("catch up", first, self._is_long)
        self._graphs.run(key, lambda: self._draft_layers(first, _CATCH_UP))

    def _round(self, num_draft_tokens: int, *, is_copied: bool = False) -> None:
        target, mode = self._target.decoder, self._mode
        if is_copied:
            self._copy_tokens(num_draft_tokens)
        else:
            self._draft_tokens(num_draft_tokens)
        num_rows = num_draft_tokens + 1
        target.layers(self._rows(_FIRST, num_rows, self._target_slots))
        target.score(0, num_rows, writes_logits=mode is not None)
        if mode is None:
            best = target.best, target.best_ids
            target.launch(
                old_kernels.accept, (1,),
                *best, self._history, self._positions, self._result, len(best[0]),
                NUM_DRAFT=num_draft_tokens, FIRST=_FIRST, NUM_POSITIONS=_NUM_POSITIONS, ROWS=ROWS,
                BLOCKS=64,
            )  # fmt: skip
        else:
            drawing = self._target_drawing
            drawing.draw(mode, Purpose.RECOVERED, first_row=0, num_rows=num_rows)
            # Of copied tokens nobody has a row: the target's own, then, which change nothing.
            judged_by = drawing if is_copied else self._draft_drawing
            drawing.accept(judged_by, mode, self._result, num_draft_tokens)

    def _draft_tokens(self, num_draft_tokens: int) -> None:
        draft, mode = self._draft.decoder, self._mode
        for index in range(num_draft_tokens):
            num_rows = 1 if index else 2
            first = _FIRST + index - (num_rows - 1)
            self._draft_layers(first, num_rows)
            draft.score(num_rows - 1, 1, writes_logits=mode is not None)
            if mode is None:
                draft.launch(
                    old_kernels.propose, (1,),
                    draft.best, draft.best_ids, self._history, self._positions[_FIRST + index :],
                    len(draft.best), ROWS=ROWS, BLOCKS=64,
                )  # fmt: skip
            else:
                self._draft_drawing.draw(mode, Purpose.DRAFT, first_row=index, num_rows=1)
                self._draft_drawing.propose(index)

    def _copy_tokens(self, num_draft_tokens: int) -> None:
        assert self._mode is None or not self._mode.rejects, "the accept test wants probabilities"
        self._target.decoder.launch(
            old_kernels.copy_draft, (1,),
            self._history, self._positions, num_draft_tokens,
            FIRST=_FIRST, BLOCK=4096, ROWS=ROWS, num_warps=16,
        )  # fmt: skip

    def _draft_layers(self, first: int, num_rows: int) -> None:
        self._draft.decoder.layers(self._rows(first, num_rows, self._draft_slots))

    def _rows(self, first: int, num_rows: int, slots: Tensor) -> Rows:
        return Rows(
            positions=self._positions[first : first + num_rows],
            slots=slots,
            tokens=self._history[None],
            num_rows=num_rows,
            group=num_rows,
            is_long=self._is_long,
            texts=self._texts[:num_rows],
        )

    @torch.inference_mode()
    def prepare(self) -> None:
        """Records greedy rounds, all that may be asked for, and the commonest of sampled requests.

        A round that is recorded while requests run makes one of them wait, the longer the more of
        its kernels are to be compiled first: so all are, here. On a GPU; it times rounds, too.
        """
        lengths = range(self._num_draft_tokens + 1)
        kinds = [(k, False) for k in lengths]
        if self._copies:
            kinds += [(k, True) for k in lengths[1:]]
        engines = (self._draft, self._target)
        draft, target = (engine.allocate(prompt_length=1, max_tokens=1) for engine in engines)
        for num_positions in self._lengths():
            for k, is_copied in kinds:
                self._begin_again(target, draft)
                self.launch(k, num_positions=num_positions, is_copied=is_copied)
                self.drop()
            for blocks_ago in range(1, _FIRST // _CATCH_UP + 1):
                self._read_block(blocks_ago)
        for sampling in _EVERY_MODE:
            self._begin_again(target, draft, sampling=sampling)
            self._round(lengths[-1])
        for sampling in _COMMON:
            for k in lengths:
                self._begin_again(target, draft, sampling=sampling)
                self.launch(k, num_positions=CHUNK)
                self.drop()
        for engine, sequence in zip(engines, (draft, target), strict=True):
            engine.free(sequence)
        plain, *drafting = [self._seconds(k) for k in lengths]
        self.costs = _costs(plain, drafting)
        if self._copies:
            self.copy_costs = _costs(plain, [self._seconds(k, is_copied=True) for k in lengths[1:]])

    def _lengths(self) -> list[int]:
        """A short text and, if there can be one, a long one."""
        capacity = max(self._draft.capacity, self._target.capacity)
        return [CHUNK, capacity] if self._target.is_long(capacity) else [CHUNK]

    def _begin_again(
        self, target: int, draft: int, num_tokens: int = 1, *, sampling: Sampling = GREEDY
    ) -> None:
        text = [0] * num_tokens
        self.begin(text, target_sequence=target, draft_sequence=draft, sampling=sampling)

    def _seconds(self, num_draft_tokens: int, *, is_copied: bool = False) -> float:
        """The median seconds of a round."""
        context = min(_TIMED_CONTEXT, self._draft.max_seq_len, self._target.max_seq_len)
        engines = (self._draft, self._target)
        draft, target = (e.allocate(prompt_length=context, max_tokens=context) for e in engines)
        times: list[float] = []
        for _ in range(_TIMED_ROUNDS):
            self._begin_again(target, draft, context)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.launch(num_draft_tokens, num_positions=context, is_copied=is_copied)
            end.record()
            self.drop()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        for engine, sequence in zip(engines, (draft, target), strict=True):
            engine.free(sequence)
        return statistics.median(times)


def _costs(plain: float, speculating: Sequence[float]) -> StepCosts:
    """What rounds of 1, 2, 3 ... draft tokens cost, by their seconds and those of a plain one."""
    # Drafting is in the time of a round, so the draft's own step costs nothing more.
    return StepCosts(0.0, [0.0, *(max(seconds / plain - 1.0, 0.0) for seconds in speculating)])
