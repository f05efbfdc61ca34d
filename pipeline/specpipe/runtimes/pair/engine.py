"""What a pair asks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Logits = Any
"""An array [rows, V] of the engine's library."""

SequenceId = int


class Pages(Protocol):
    """The KV cache of an engine whose sequences take memory as they grow, and share what is equal.

    capacity_tokens    positions of all sequences together
    num_held_tokens    those of pages that sequences have; of one that several share, once
    num_cached_tokens  those of pages that no sequence has, and that wait to be reused
    """

    capacity_tokens: int

    @property
    def num_held_tokens(self) -> int: ...

    @property
    def num_cached_tokens(self) -> int: ...

    def grow(self, sequence: SequenceId, num_tokens: int) -> bool:
        """Gives a sequence room for num_tokens in all, those of rounds under way among them.

        False, and no change, where there is none. What only waits to be reused makes room. More
        than a sequence can have, with what rounds write beyond its end, it does not get.
        """

    def reuse(self, sequence: SequenceId, token_ids: Sequence[int], salt: str = "") -> int:
        """Lets an empty sequence begin with what is cached of the prompt that it is to read.

        Returns how many of its first tokens that are: 0 where nothing is, and never all of them.
        Their keys and values are, bit for bit, those that the sequence would have computed. Only
        prompts of the same salt share any.
        """


class PromptParts(Protocol):
    """Prompts that an engine reads a part of a launch at a time.

    Between two parts it does what else it is asked for, but that it ends a launch that is under way
    before `forward` reads other tokens of prompts. A sequence that is freed meanwhile is read no
    further.
    """

    def num_left(self, sequence: SequenceId) -> int:
        """Returns how many tokens of a prompt are to be read so, before all others: or none."""

    def begin(self, batch: Sequence[tuple[SequenceId, Sequence[int]]]) -> None:
        """Takes tokens to append to sequences, no more than `num_left` of each.

        Nothing else that was begun is left. They count as cached with the last part.
        """

    @property
    def seconds_of_next(self) -> float | None:
        """What the next part takes, about; 0 where that was not measured. None: none is left."""

    def go_on(self) -> None:
        """Reads the next part, without waiting for the device."""


class Engine(Protocol):
    """One model with its KV cache; sequences are opaque ids."""

    pages: Pages | None
    """None: a sequence has all the room that it may ever need from the beginning."""
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    max_logits: int
    """Rows of logits of a forward; enough for the verification of a full batch."""
    max_logits_of_sequence: int

    def can_admit(self, max_tokens: int) -> bool:
        """Returns whether a sequence of max_tokens fits in with those that are there, now."""

    def allocate(self, *, prompt_length: int, max_tokens: int) -> SequenceId:
        """Makes an empty sequence with room for max_tokens, which `Pages.grow` may make more."""

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
