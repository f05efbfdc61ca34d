"""Draft-verify rounds of many sequences at once, which the device makes without the host.

EnginePair can ask a device for logits in every step and choose tokens itself. A device that can
draft, verify and accept by itself needs to be asked for nothing: it gets its next round before the
last one has ended, and is never idle. The text is the same either way.

A sequence joins when the target has cached all of its text but the last token, or what rounds do
not read of it. From then on its text is the device's until it leaves; what it emits is told round
by round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specpipe.runtimes.pair.costs import PromptCosts
from specpipe.runtimes.pair.engine import PromptParts, SequenceId
from specpipe.runtimes.pair.sampler import RoundResult
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.batch_draft_length import Packing
from specpipe.speculative.request import Sampling

MOST_UNDER_WAY = 2
"""Rounds launched and not yet taken: one that runs, and one for when it ends."""


class Member(NamedTuple):
    """The part of one sequence in a round.

    target_sequence   whose it is; it has joined
    num_draft_tokens  how many are drafted, or copied, and verified
    num_positions     the most that its text may have when the round ends: prompt and output, with
                      all that rounds under way may still emit
    is_copied         its draft tokens are copied from its own text, as PromptLookup does
    """

    target_sequence: SequenceId
    num_draft_tokens: int
    num_positions: int
    is_copied: bool = False


@dataclass(frozen=True)
class Reading:
    """A part of a text that the target reads in a round, beside its members.

    target_sequence  whose it is; it has joined
    first_position   of the part: the target has cached what is before it, or does in this round
    num_tokens       of the part, which leaves the last token of the text
    """

    target_sequence: SequenceId
    first_position: int
    num_tokens: int

    @property
    def stop(self) -> int:
        """The position behind the part."""
        return self.first_position + self.num_tokens


@dataclass(frozen=True)
class ReadingRoom:
    """What a round can read beside its members.

    num_pieces       of texts
    tokens_of_piece  the most that each has, all of one text
    """

    num_pieces: int
    tokens_of_piece: int

    @property
    def num_tokens(self) -> int:
        """The most, if they are of one text."""
        return self.num_pieces * self.tokens_of_piece

    def less(self, num_tokens: int) -> ReadingRoom:
        """Returns what is left when so many tokens of a text are read."""
        num_pieces = self.num_pieces - -(-num_tokens // self.tokens_of_piece)
        return ReadingRoom(num_pieces, self.tokens_of_piece)


class Rounds(Protocol):
    """Rounds on the engines of a pair. One thread uses them.

    max_members  sequences of a round, which may all have joined at once
    prompts      reads those of the target part by part, between rounds; None: it cannot
    """

    max_members: int
    prompts: PromptParts | None

    @property
    def draft_prompt_costs(self) -> PromptCosts | None:
        """What prompts take the draft; None where that was not measured."""

    def most_draft_tokens(self, num_members: int) -> int:
        """Returns the most draft tokens that each of so many members can have in a round."""

    def costs(self, num_members: int) -> StepCosts | None:
        """Returns what rounds of so many cost by draft length, the draft's steps included.

        None where that was not measured.
        """

    def copy_costs(self, num_members: int) -> StepCosts | None:
        """Returns the same of rounds whose draft tokens are all copied.

        None: there are no such, or that was not measured.
        """

    def reading_rooms(self, members: Sequence[Member]) -> Sequence[ReadingRoom]:
        """Returns what a round can read beside its members.

        The first costs nothing, as its launch is no wider than without; each further one is that of
        the next wider launch. Any of the pieces may be a member without draft tokens instead.
        """

    def can_read(self, target_sequence: SequenceId) -> bool:
        """Returns whether all that the target lacks of a text, whatever it is, may be read so.

        It follows from the sequence alone, not from load: bits depend on what reads a text.
        """

    def packing(self, num_members: int) -> Packing | None:
        """Returns what packed rounds of so many cost; None: there are none, or see copy_costs.

        In those nobody drafts, and who copies more tokens than a place has rows has several places.
        """

    def join(
        self, target_sequence: SequenceId, token_ids: Sequence[int], sampling: Sampling
    ) -> None:
        """Takes in a sequence whose text the target has cached but for the last token.

        Or more of it is still to be read, and `can_read` says that rounds may; then it is no member
        before all of that was launched.
        """

    def give_draft(self, target_sequence: SequenceId, draft_sequence: SequenceId) -> None:
        """Lets a sequence that has joined draft from the next round on.

        The draft has cached its text, as far as rounds that were taken tell it, but for the last
        token or the last two. What rounds under way emit it reads before it drafts.
        """

    def lose_draft(self, target_sequence: SequenceId) -> None:
        """Lets a sequence go on without its draft, whose room may be given to others at once.

        It may get another once all rounds in which it drafted are taken.
        """

    def launch(self, members: Sequence[Member], readings: Sequence[Reading] = ()) -> None:
        """Begins a round as soon as the last one has ended, and does not wait for it.

        At most MOST_UNDER_WAY are under way. Only members that have a draft may draft. None has
        more draft tokens than so many can have, but in a packed round with places for all. Who is
        read to the last token but one may be a member of the same round. Without members there is
        nothing to take, so it counts as none that is under way.
        """

    def take(self) -> list[RoundResult]:
        """Waits for the oldest round under way and returns what came of it, by member.

        After a round in which it drafted K tokens and emitted n the draft has cached the text as
        it was before the round, less its last token, and min(K, n) more; one that proposes them in
        one pass no more than min(1, n). The target has cached all but the last token.
        """

    def leave(self, target_sequence: SequenceId) -> None:
        """Lets a sequence go. Rounds under way may still have it; it gets nothing of them.

        Its room may be given to others at once: the device does things in order.
        """

    def drop(self) -> None:
        """Waits for all rounds under way and forgets them."""
