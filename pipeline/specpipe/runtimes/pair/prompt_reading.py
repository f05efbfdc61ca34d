"""Prompts read beside the rounds of other requests, which wait for them no longer than a pace says.

Where an engine reads prompts part by part, as many layers of a launch as there is time for go
between two rounds. So a launch can have all the rows that make it cheap.
"""

from __future__ import annotations

from collections.abc import Sequence

from specpipe.runtimes.pair.drafting import Drafting, RunningSequences
from specpipe.runtimes.pair.engine import Engine, PromptParts
from specpipe.runtimes.pair.pace import Pace
from specpipe.runtimes.pair.scheduling import Piece


class PromptReader:
    """The launch of prompts that is under way, of one at a time.

    What it reads counts as cached when its last part was launched.
    """

    def __init__(
        self, target: Engine, drafting: Drafting, pace: Pace, parts: PromptParts | None
    ) -> None:
        """parts are the target's; None: it reads prompts in whole launches."""
        self._target, self._drafting, self._pace, self._parts = target, drafting, pace, parts
        self._under_way: set[RunningSequences] = set()

    def __contains__(self, running: RunningSequences) -> bool:
        """Whether a part of a request's prompt is being read."""
        return running in self._under_way and self.is_busy

    @property
    def is_busy(self) -> bool:
        """Whether a launch has parts left."""
        return self._parts is not None and self._parts.seconds_of_next is not None

    def go_on(self) -> None:
        """Goes on with what is under way, as far as the pace allows."""
        while self._parts is not None and (seconds := self._parts.seconds_of_next) is not None:
            if not self._pace.allows(seconds):
                return
            self._pace.spend(seconds)
            self._parts.go_on()

    def begin(self, pieces: Sequence[Piece], read_along: Sequence[RunningSequences]) -> None:
        """Begins to read pieces of prompts, unless others are under way, without waiting for the
        device.

        read_along  those of them that the draft reads too, now or in a later step: a step has time
                    for the end of one launch, or for the draft's part of the next
        """
        if not pieces or self.is_busy:
            return
        along = [(running, self._target.length(running.target_sequence)) for running in read_along]
        if not self._drafting.read_along(along, may_wait=True):
            return
        batch, whole = [], []
        for piece in pieces:
            sequence = piece.running.target_sequence
            num_left = 0 if self._parts is None else self._parts.num_left(sequence)
            if num_left:
                batch.append((sequence, piece.token_ids[:num_left]))
            else:
                whole.append((sequence, piece.token_ids))
        if whole:
            self._target.forward(whole, [0] * len(whole))
        if self._parts is not None and batch:
            self._parts.begin(batch)
            self._under_way = {piece.running for piece in pieces}
            self.go_on()
