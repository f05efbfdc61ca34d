"""One engine: slots of a KV cache, and sequences of different lengths in one rectangle of tokens.

An engine takes consecutive slots and the same number of tokens for each (shapes.py). Sequences get
the lowest free slot, so those that run lie close together; what is missing to the rectangle is
padding, which is overwritten before anything sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specpipe.runtimes.pair.engine import Pages, SequenceId
from specpipe.runtimes.tensorrt import shapes
from specpipe.runtimes.tensorrt.engine_config import TensorRTEngineSpec

Int32s = NDArray[np.int32]

LogitRows = NDArray[np.float32]
"""Logits [R, V]."""


class Runner(Protocol):
    """What runs a network on its KV cache of max_batch_size slots."""

    def run(
        self, first_slot: int, input_ids: Int32s, write_indices: Int32s, logits_indices: Int32s
    ) -> LogitRows:
        """Runs input_ids [B, N] in B slots from first_slot on; returns float32 logits [R, V].

        write_indices [B] are the positions at which the tokens begin, logits_indices [R] the rows
        b · N + n that are scored. What is returned may be overwritten by the next run.
        """

    def clear(self, slot: int, start: int, stop: int) -> None:
        """Makes keys and values of positions start … stop of a slot zero."""


def step_inputs(
    input_ids: Int32s, write_indices: Int32s, logits_indices: Int32s
) -> dict[str, Int32s]:
    """Returns all inputs of a run by name, but for KV caches and weights."""
    num_tokens = input_ids.shape[1]
    return {
        shapes.INPUT_IDS: input_ids,
        shapes.POSITION_IDS: write_indices[:, None] + np.arange(num_tokens, dtype=np.int32),
        shapes.WRITE_INDICES: write_indices,
        shapes.KEY_VALUE_LENGTHS: write_indices + np.int32(num_tokens),
        shapes.LOGITS_INDICES: logits_indices,
    }


@dataclass
class _Sequence:
    slot: int
    length: int = 0
    padding: int = 0
    """The id that it is padded with: its last token, whose keys and values are known to be sane."""
    is_suspect: bool = False
    """A row of it had NaN logits, so NaN may be in the cache behind what is truncated."""


class TensorRTEngine:
    """The sequences of one engine. One thread uses it at a time."""

    def __init__(self, spec: TensorRTEngineSpec, runner: Runner) -> None:
        self._spec, self._runner = spec, runner
        self.vocab_size = spec.vocab_size
        self.max_seq_len = spec.max_seq_len
        self.max_batch_size = spec.max_batch_size
        self.max_draft_len = spec.max_draft_len
        self.pages: Pages | None = None
        self._max_rows = spec.max_rows
        self.max_logits_of_sequence = spec.max_draft_len + 1
        self.max_logits = spec.max_batch_size * self.max_logits_of_sequence
        self._max_length = spec.max_seq_len + self._max_rows
        self._chunk = max(profile.tokens[2] for profile in spec.profiles)
        self._free = set(range(spec.max_batch_size))
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._next_id = 0

    def can_admit(self, max_tokens: int) -> bool:
        """Returns whether a sequence of `max_tokens` tokens, prompt included, has room now."""
        return bool(self._free) and max_tokens <= self.max_seq_len

    def allocate(self, *, prompt_length: int, max_tokens: int) -> SequenceId:
        """Makes an empty sequence; `can_admit(max_tokens)` must hold."""
        assert self.can_admit(max_tokens)
        slot = min(self._free)
        self._free.remove(slot)
        # Masked keys weigh 0, but 0 times a NaN that an earlier sequence left is NaN.
        self._runner.clear(slot, 0, self._spec.capacity)
        sequence = self._next_id
        self._next_id += 1
        self._sequences[sequence] = _Sequence(slot)
        return sequence

    def length(self, sequence: SequenceId) -> int:
        """Returns how many tokens of a sequence have their keys and values cached."""
        return self._sequences[sequence].length

    def forward(
        self, batch: Sequence[tuple[SequenceId, Sequence[int]]], num_logits: Sequence[int]
    ) -> torch.Tensor:
        """Appends one or more tokens to each sequence and scores what follows them.

        Returns float32 logits [sum(num_logits), V] in host memory: those after the last
        num_logits[i] tokens of sequence i, in the order of the batch. The next forward may
        overwrite them.

        Sequences with no more tokens than a step has of each (shapes.max_rows) run together, longer
        pieces (of prompts) one by one: to pad the others to their length would be most of the work.
        """
        pieces = [
            _Piece(self._sequences[sequence], token_ids, count)
            for (sequence, token_ids), count in zip(batch, num_logits, strict=True)
        ]
        for piece in pieces:
            self._check(piece)
        runs = [[p] for p in pieces if len(p.token_ids) > self._max_rows]
        if short := [p for p in pieces if len(p.token_ids) <= self._max_rows]:
            runs.append(short)
        if len(runs) == 1:
            return torch.from_numpy(self._run(runs[0]))
        rows: dict[int, LogitRows] = {}
        for run in runs:
            logits, first = self._run(run).copy(), 0
            for piece in run:
                rows[piece.sequence.slot] = logits[first : first + piece.num_logits]
                first += piece.num_logits
        return torch.from_numpy(np.concatenate([rows[piece.sequence.slot] for piece in pieces]))

    def skip(self, sequence: SequenceId, num_tokens: int) -> None:
        """Takes tokens as cached that never were: their keys and values are zero."""
        self._sequences[sequence].length += num_tokens

    def truncate(self, sequence: SequenceId, length: int) -> None:
        """Forgets all tokens of a sequence after the first `length`."""
        state = self._sequences[sequence]
        if length >= state.length:
            return
        if state.is_suspect:
            # Padding may lie behind the last token, too.
            self._runner.clear(state.slot, length, self._spec.capacity)
            state.is_suspect = False
        state.length = length

    def free(self, sequence: SequenceId) -> None:
        """Ends a sequence and gives its slot to others."""
        self._free.add(self._sequences.pop(sequence).slot)

    def _check(self, piece: _Piece) -> None:
        room = self._max_length - piece.sequence.length
        if not 1 <= len(piece.token_ids) <= room:
            raise ValueError(
                f"{len(piece.token_ids)} tokens after {piece.sequence.length}: expected 1 to {room}"
            )
        most = min(len(piece.token_ids), self.max_logits_of_sequence)
        if piece.num_logits > most:
            raise ValueError(
                f"{piece.num_logits} rows of logits of {len(piece.token_ids)} tokens: expected at "
                f"most {most}"
            )

    def _run(self, pieces: Sequence[_Piece]) -> LogitRows:
        """Runs the slots from the first to the last of the pieces as one rectangle.

        A slot between them that has no piece is given padding where its next tokens will come. One
        piece alone may be longer than a run can be.
        """
        while len(pieces[0].token_ids) > self._chunk:
            size = min(self._chunk, len(pieces[0].token_ids) - max(pieces[0].num_logits, 1))
            self._run([replace(pieces[0], token_ids=pieces[0].token_ids[:size], num_logits=0)])
            pieces = [replace(pieces[0], token_ids=pieces[0].token_ids[size:])]
        by_slot = {state.slot: state for state in self._sequences.values()}
        slots = [piece.sequence.slot for piece in pieces]
        first_slot = min(slots)
        batch_size = max(slots) - first_slot + 1
        num_tokens = max(len(piece.token_ids) for piece in pieces)
        input_ids = np.zeros((batch_size, num_tokens), np.int32)
        write_indices = np.zeros(batch_size, np.int32)
        for row, slot in enumerate(range(first_slot, first_slot + batch_size)):
            if slot in by_slot:
                input_ids[row] = by_slot[slot].padding
                write_indices[row] = by_slot[slot].length
        scored: list[int] = []
        for piece in pieces:
            row, length = piece.sequence.slot - first_slot, len(piece.token_ids)
            input_ids[row, :length] = piece.token_ids
            input_ids[row, length:] = piece.token_ids[-1]
            stop = row * num_tokens + length
            scored += range(stop - piece.num_logits, stop)
        # The network scores one row at least.
        indices = np.array(scored or [0], np.int32)
        logits = self._runner.run(first_slot, input_ids, write_indices, indices)[: len(scored)]
        first = 0
        for piece in pieces:
            piece.sequence.length += len(piece.token_ids)
            piece.sequence.padding = piece.token_ids[-1]
            # A NaN among the keys or values of a token makes all logits of its row NaN.
            if np.isnan(logits[first : first + piece.num_logits, 0]).any():
                piece.sequence.is_suspect = True
            first += piece.num_logits
        return logits


@dataclass(frozen=True)
class _Piece:
    """The tokens that a sequence is to go on with, and how many of the last are scored."""

    sequence: _Sequence
    token_ids: Sequence[int]
    num_logits: int
