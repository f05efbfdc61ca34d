"""An engine on the fused kernels: the `Engine` of EnginePair, for GPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from specpipe.runtimes.pair.costs import PromptCosts
from specpipe.runtimes.pair.engine import Pages
from specpipe.runtimes.torch.engine import TorchEngineSpec
from specpipe.runtimes.torch.fused.decoder import Decoder, Rows
from specpipe.runtimes.torch.fused.graphs import Graphs, Recording
from specpipe.runtimes.torch.fused.host import pinned
from specpipe.runtimes.torch.fused.pages import PagedKVCache
from specpipe.runtimes.torch.fused.prompt import Piece, PromptRows, Prompts
from specpipe.runtimes.torch.fused.weights import Weights
from specpipe.runtimes.torch.fused_sizes import (
    CHUNK,
    MOST_CHUNKS,
    PAGE,
    ROW_COUNTS,
    SHORT_PROMPT,
    most_rows,
    pages_of,
    pages_to_share,
    prompt_width_of,
    spare_positions,
    width_of,
)
from specpipe.runtimes.torch.page_pool import PageKey, page_keys

SequenceId = int


@dataclass
class _Sequence:
    """A sequence on a row of the page table.

    num_prompt  tokens that the kernels of prompts read
    num_shared  pages at its beginning that are not written any more, since others may read them
    keys        of the pages behind them, which others may read as soon as they are full
    """

    slot: int
    num_prompt: int
    length: int = 0
    num_shared: int = 0
    keys: deque[PageKey] = field(default_factory=deque)


@dataclass(frozen=True)
class _Row:
    slot: int
    position: int
    token_id: int


_NOBODY = _Row(slot=0, position=-1, token_id=0)


@dataclass
class _Reading:
    """Launches of prompts that are made part by part.

    lengths  of the sequences, when all were made
    part     the next of the first launch
    """

    launches: deque[PromptRows]
    lengths: dict[SequenceId, int]
    part: int = 0


class FusedEngine:
    """A decoder and the KV cache of the sequences that run on it. One thread uses it at a time."""

    def __init__(
        self, spec: TorchEngineSpec, weights: Weights, *, short_prompt: int = SHORT_PROMPT
    ) -> None:
        """short_prompt  tokens of a prompt that the kernels of decoding read, at most"""
        self.spec = spec
        self.vocab_size = spec.model.vocab_size
        self.max_seq_len = spec.max_seq_len
        self.max_draft_len = spec.max_draft_len
        self.pages: Pages | None = self
        self.max_logits = self.max_logits_of_sequence = spec.max_logits
        self.memory = spec.memory
        self._spare = spare_positions(spec.max_draft_len)
        self.capacity = spec.max_seq_len + self._spare
        self.cache = PagedKVCache(
            num_layers=spec.model.num_layers,
            num_slots=spec.max_batch_size,
            capacity=self.capacity,
            num_kv_heads=spec.model.num_kv_heads,
            head_size=spec.model.head_size,
            dtype=spec.dtype,
            device=spec.device,
            num_pages=None if spec.kv_cache_tokens is None else spec.kv_cache_tokens // PAGE,
        )
        num_pages = self.cache.pool.num_pages
        self.capacity_tokens = PAGE * num_pages
        # As many as all together have pages for.
        self.max_batch_size = min(spec.max_batch_size, num_pages // pages_of(1 + self._spare))
        self._short_prompt = short_prompt
        self._most_rows = most_rows(spec.max_batch_size, spec.max_draft_len)
        self.decoder = Decoder(
            spec.model, weights, self.cache, capacity=self.capacity, most_rows=self._most_rows
        )
        self.graphs = Graphs(spec.device)
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._next_id = 0
        # positions, slots and token ids of a launch
        self._inputs = torch.zeros(3 * self._most_rows, dtype=torch.int32, device=spec.device)
        self.prompts = Prompts(self.decoder, prompt_width_of(spec.max_seq_len))
        self._most_prompt_rows = self.prompts.most_rows
        self.prompt_costs: PromptCosts | None = None
        self._reading: _Reading | None = None

    def can_admit(self, max_tokens: int) -> bool:
        """Says whether a sequence of up to `max_tokens` tokens, prompt included, finds room now."""
        return max_tokens <= self.max_seq_len and self.cache.can_hold(max_tokens + self._spare)

    def allocate(self, *, prompt_length: int, max_tokens: int) -> SequenceId:
        """Makes an empty sequence; `can_admit(max_tokens)` must hold."""
        assert self.can_admit(max_tokens)
        sequence = self._next_id
        self._next_id += 1
        slot = self.cache.allocate(max_tokens + self._spare)
        num_prompt = 0 if prompt_length <= self._short_prompt else prompt_length - 1
        self._sequences[sequence] = _Sequence(slot, num_prompt)
        return sequence

    @property
    def num_held_tokens(self) -> int:
        """Positions of the pages that sequences have; of one that several share, once."""
        pool = self.cache.pool
        return PAGE * (pool.num_pages - pool.num_available)

    @property
    def num_cached_tokens(self) -> int:
        """Positions of the pages that no sequence has, and that wait to be reused."""
        return PAGE * self.cache.pool.num_cached

    def grow(self, sequence: SequenceId, num_tokens: int) -> bool:
        """Gives a sequence room for so many tokens, those of rounds among them; False without.

        No sequence gets more than it can have, and none less than it has.
        """
        slot = self._sequences[sequence].slot
        return self.cache.grow(slot, min(num_tokens, self.capacity))

    def reuse(self, sequence: SequenceId, token_ids: Sequence[int], salt: str = "") -> int:
        """Lets an empty sequence begin with pages that are cached of the prompt that it is to read.

        Returns how many tokens those hold. Of a sequence that is not asked this, others reuse
        nothing either. Its own first pages go back, so who has it begin with little room, and
        grow after this, asks for no more than it needs.
        """
        state = self._sequences[sequence]
        assert not state.length, "nothing was read yet"
        num_pages = pages_to_share(state.num_prompt, self.max_draft_len)
        keys = page_keys(token_ids[: num_pages * PAGE], salt)
        state.num_shared = self.cache.share(state.slot, keys)
        state.keys.extend(keys[state.num_shared :])
        state.length = PAGE * state.num_shared
        return state.length

    def length(self, sequence: SequenceId) -> int:
        """Returns how many tokens of a sequence have their keys and values cached."""
        return self._sequences[sequence].length

    def slot(self, sequence: SequenceId) -> int:
        """Returns the row of the page table that a sequence has until it is freed."""
        return self._sequences[sequence].slot

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[tuple[SequenceId, Sequence[int]]], num_logits: Sequence[int]
    ) -> Tensor:
        """Appends one or more tokens to each sequence and scores what follows them.

        Returns float32 logits [sum(num_logits), V]: those after the last num_logits[i] tokens of
        sequence i, in the order of the batch. It is an inference tensor.

        Tokens of a prompt that is not short, but for its last, go through the kernels of prompts,
        all others through those of decoding, however many there are. So a position's keys and
        values do not depend on how a prompt is cut, or on what else is in the batch.
        """
        while self._reading is not None and any(self.num_left(s) for s, _ in batch):
            self.go_on()
        pieces: list[Piece] = []
        rows: list[_Row] = []
        scored: list[int] = []  # of the rows
        at: list[int] = []  # where their logits go
        num_scored = 0
        for (sequence_id, tokens), count in zip(batch, num_logits, strict=True):
            sequence = self._sequences[sequence_id]
            start, stop = sequence.length, sequence.length + len(tokens)
            capacity = min(self.cache.capacity(sequence.slot), self.capacity)
            if not tokens or stop > capacity:
                raise ValueError(
                    f"{len(tokens)} tokens after {start}: expected 1 to {capacity - start}"
                )
            num_prompt = min(self.num_left(sequence_id), len(tokens))
            first_scored = len(tokens) - count
            if num_prompt > 0:
                pieces.append(
                    Piece(
                        sequence.slot,
                        start,
                        tokens[:num_prompt],
                        scored_from=start + first_scored,
                        logit=num_scored,
                    )  # fmt: skip
                )
            for i, token_id in enumerate(tokens[num_prompt:], num_prompt):
                if i >= first_scored:
                    scored.append(len(rows))
                    at.append(num_scored + i - first_scored)
                rows.append(_Row(sequence.slot, start + i, token_id))
            num_scored += count
            sequence.length = stop
        logits = torch.empty(num_scored, self.vocab_size, device=self.spec.device)
        for prompt_rows in PromptRows.packed(
            pieces, self._most_prompt_rows, self.prompts.tile_rows
        ):
            self._read(prompt_rows, logits)
        for first in range(0, len(rows), self._most_rows):
            stop = first + self._most_rows
            self._launch(rows[first:stop])
            here = [i for i, row in enumerate(scored) if first <= row < stop]
            if here:
                places = self._on_device([scored[i] - first for i in here])
                found = self.decoder.logits.index_select(0, places)
                logits.index_copy_(0, self._on_device([at[i] for i in here]), found)
        for sequence_id, _ in batch:
            self._let_share(self._sequences[sequence_id])
        return logits

    def _let_share(self, sequence: _Sequence) -> None:
        """Lets others begin with pages that are full now: what reads them runs after this."""
        while sequence.keys and sequence.length >= PAGE * (sequence.num_shared + 1):
            self.cache.pool.name(sequence.slot, sequence.num_shared, sequence.keys.popleft())
            sequence.num_shared += 1

    def _read(self, rows: PromptRows, logits: Tensor) -> None:
        """Caches rows of prompts; few are scored, and how that is done is not recorded."""
        width = self.prompts.fill(rows)
        if not rows.scored:
            for layers in self.prompts.parts(width):
                self._run_part(width, layers)
            return
        self.prompts.launch(width, is_whole=True)
        found = self.prompts.score(self._on_device(rows.scored))
        logits.index_copy_(0, self._on_device(rows.logits), found)

    def _run_part(self, width: int, layers: range) -> None:
        key = ("prompt", width, layers.start)
        self.graphs.run(key, partial(self.prompts.launch, width, layers))

    def num_left(self, sequence: SequenceId) -> int:
        """Returns how many tokens of a sequence the kernels of prompts have yet to read."""
        state = self._sequences[sequence]
        return max(state.num_prompt - state.length, 0)

    def begin(self, batch: Sequence[tuple[SequenceId, Sequence[int]]]) -> None:
        """Takes tokens of prompts, no more than `num_left` of each: `go_on` reads them."""
        assert self._reading is None
        pieces = []
        lengths = {}
        for sequence_id, tokens in batch:
            sequence = self._sequences[sequence_id]
            start, stop = sequence.length, sequence.length + len(tokens)
            assert 0 < len(tokens) <= self.num_left(sequence_id)
            pieces.append(Piece(sequence.slot, start, tokens, scored_from=stop))
            lengths[sequence_id] = stop
        launches = PromptRows.packed(pieces, self._most_prompt_rows, self.prompts.tile_rows)
        self._reading = _Reading(deque(launches), lengths)

    @property
    def seconds_of_next(self) -> float | None:
        """What the next part takes, about; 0 where that was not measured. None: none is left."""
        if self._reading is None:
            return None
        if self.prompt_costs is None:
            return 0.0
        rows = self._reading.launches[0]
        seconds = self.prompt_costs.seconds(len(rows.positions), sum(rows.positions))
        return seconds / len(self.prompts.parts(self.prompts.width(rows)))

    @torch.inference_mode()
    def go_on(self) -> None:
        """Launches the next part; sequences have what was read when the last one is launched."""
        reading = self._reading
        assert reading is not None
        rows = reading.launches[0]
        if not reading.part:
            self.prompts.fill(rows)
        width = self.prompts.width(rows)
        parts = self.prompts.parts(width)
        self._run_part(width, parts[reading.part])
        reading.part += 1
        if reading.part < len(parts):
            return
        reading.launches.popleft()
        reading.part = 0
        if not reading.launches:
            self._reading = None
            for sequence_id, length in reading.lengths.items():
                sequence = self._sequences[sequence_id]
                sequence.length = length
                self._let_share(sequence)

    @torch.inference_mode()
    def recordings(self, longest_prompt: int) -> list[Recording]:
        """Returns what forwards launch, with pieces of prompts of up to so many tokens together.

        All rows are nobody's, until there is a forward.
        """
        self._inputs.fill_(_NOBODY.position)
        self._most_prompt_rows = min(prompt_width_of(longest_prompt), self.prompts.most_rows)
        prompts = [
            Recording(
                self.graphs,
                ("prompt", width, layers.start),
                partial(self.prompts.launch, width, layers),
            )
            for width in self.prompt_widths
            for layers in self.prompts.parts(width)
        ]
        # What scores is run as it is; this has it compiled.
        scoring = partial(self.prompts.score_first, self.prompt_widths)
        prompts.append(Recording(self.graphs, "scored", scoring))
        rows = [
            Recording(self.graphs, (num_rows, is_long), partial(self._run_rows, num_rows, is_long))
            for num_rows in ROW_COUNTS
            if num_rows <= self._most_rows
            for is_long in sorted({False, self._is_long_of(num_rows, self.capacity)})
        ]
        return prompts + rows

    @property
    def prompt_widths(self) -> list[int]:
        """The most rows of each kind of launch of prompts."""
        return [width for width in self.prompts.widths if width <= self._most_prompt_rows]

    def _on_device(self, numbers: Sequence[int]) -> Tensor:
        """Copies numbers without waiting for what the device does before it."""
        device = self.spec.device
        return pinned(torch.tensor(numbers), device).to(device, non_blocking=True)

    def _launch(self, rows: Sequence[_Row]) -> None:
        """Runs rows of one launch; each of them is attended by itself."""
        num_rows = next(count for count in ROW_COUNTS if count >= len(rows))
        filled = [*rows, *[_NOBODY] * (num_rows - len(rows))]
        self._inputs[: 3 * num_rows] = self._on_device(
            [
                *(row.position for row in filled),
                *(row.slot for row in filled),
                *(row.token_id for row in filled),
            ]
        )
        is_long = self._is_long_of(num_rows, max(row.position for row in rows) + 1)
        self.graphs.run((num_rows, is_long), partial(self._run_rows, num_rows, is_long))

    def _run_rows(self, num_rows: int, is_long: bool) -> None:
        positions, slots, tokens = self._inputs[: 3 * num_rows].view(3, num_rows)
        self.decoder.layers(Rows(positions, slots, tokens, num_rows, 1, is_long))
        self.decoder.score(num_rows, writes_logits=True, width=width_of(num_rows))

    def _is_long_of(self, num_rows: int, num_positions: int) -> bool:
        return self.is_long(num_positions) and not self.decoder.lists_blocks(num_rows, 1)

    @staticmethod
    def is_long(num_positions: int) -> bool:
        """Returns whether attention over that many positions takes blocks of them, not chunks.

        Where it takes blocks anyway, Decoder.lists_blocks, that is nothing to it.
        """
        return num_positions > MOST_CHUNKS * CHUNK

    def skip(self, sequence: SequenceId, num_tokens: int) -> None:
        """Takes tokens as cached that a round has cached, or, for timing, that never were."""
        state = self._sequences[sequence]
        state.length += num_tokens
        state.keys.clear()

    def truncate(self, sequence: SequenceId, length: int) -> None:
        """Forgets all tokens of a sequence after the first `length`."""
        state = self._sequences[sequence]
        state.length = min(state.length, length)
        assert state.length >= PAGE * state.num_shared, "others may read what was cut off"

    def free(self, sequence: SequenceId) -> None:
        """Ends a sequence and gives its room to others."""
        slot = self._sequences.pop(sequence).slot
        reading = self._reading
        if reading is not None and reading.lengths.pop(sequence, None) is not None:
            for rows in reading.launches:
                rows.blank(slot)
            if reading.part:
                self.prompts.blank(slot)
            if not reading.lengths:
                self._reading = None
        self.cache.free(slot)
