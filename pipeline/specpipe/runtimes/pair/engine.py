"""What a pair asks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Logits = Any
"""An array [rows, V] of the engine's library."""

SequenceId = int


class Engine(Protocol):
    """One model with its KV cache; sequences are opaque ids."""

    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    max_logits: int
    """Rows of logits of a forward; enough for the verification of a full batch."""
    max_logits_of_sequence: int

    def can_admit(self, max_tokens: int) -> bool:
        """Returns whether a sequence of max_tokens fits in with those that are there."""

    def allocate(self, *, prompt_length: int, max_tokens: int) -> SequenceId:
        """Makes an empty sequence."""

    def length(self, sequence: SequenceId) -> int:
        """Returns how many tokens have their keys and values cached."""

    def forward(
        self, batch: Sequence[tuple[SequenceId, Sequence[int]]], num_logits: Sequence[int]
    ) -> Logits:
        """Appends tokens to sequences; returns logits [sum(num_logits), V].

        They are those of the last num_logits[i] tokens of sequence i.
        """

    def skip(self, sequence: SequenceId, num_tokens: int) -> None:
        """Takes tokens as cached that a round has cached, or, for timing, that never were."""

    def truncate(self, sequence: SequenceId, length: int) -> None:
        """Forgets what comes after the first length tokens."""

    def free(self, sequence: SequenceId) -> None:
        """Gives the sequence's memory back."""
