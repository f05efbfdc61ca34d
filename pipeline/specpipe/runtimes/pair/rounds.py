"""Draft-verify rounds of many sequences at once, which the device makes without the host.

EnginePair can ask a device for logits in every step and choose tokens itself. A device that can
draft, verify and accept by itself needs to be asked for nothing: it gets its next round before the
last one has ended, and is never idle. The text is the same either way.

A sequence joins when the target has cached all of its text but the last token. From then on its
text is the device's until it leaves; what it emits is told round by round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specpipe.runtimes.pair.engine import SequenceId
from specpipe.runtimes.pair.sampler import RoundResult
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.request import Sampling

MOST_UNDER_WAY = 2
"""Rounds launched and not yet taken: one that runs, and one for when it ends."""


@dataclass(frozen=True)
class Member:
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


class Rounds(Protocol):
    """Rounds on the engines of a pair. One thread uses them.

    max_members  sequences of a round, which may all have joined at once
    """

    max_members: int

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

    def join(
        self, target_sequence: SequenceId, token_ids: Sequence[int], sampling: Sampling
    ) -> None:
        """Takes in a sequence whose text the target has cached but for the last token."""

    def give_draft(self, target_sequence: SequenceId, draft_sequence: SequenceId) -> None:
        """Lets a sequence that has joined draft from the next round on.

        The draft has cached its text, as far as rounds that were taken tell it, but for the last
        token or the last two. What rounds under way emit it reads before it drafts.
        """

    def lose_draft(self, target_sequence: SequenceId) -> None:
        """Lets a sequence go on without its draft, whose room may be given to others at once.

        It may get another once all rounds in which it drafted are taken.
        """

    def launch(self, members: Sequence[Member]) -> None:
        """Begins a round as soon as the last one has ended, and does not wait for it.

        At most MOST_UNDER_WAY are under way. Only members that have a draft may draft.
        """

    def take(self) -> list[RoundResult]:
        """Waits for the oldest round under way and returns what came of it, by member.

        After a round in which it drafted K tokens and emitted n the draft has cached the text as
        it was before the round, less its last token, and min(K, n) more. The target has cached all
        but the last token.
        """

    def leave(self, target_sequence: SequenceId) -> None:
        """Lets a sequence go. Rounds under way may still have it; it gets nothing of them.

        Its room may be given to others at once: the device does things in order.
        """

    def drop(self) -> None:
        """Waits for all rounds under way and forgets them."""
