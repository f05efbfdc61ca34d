"""How long requests that decode wait for the prompts of others; benchmarks/notes.md, "Prompts in
parts", has what was simulated.
"""

from __future__ import annotations

import math

from specpipe.runtimes.pair.costs import PromptCosts

_SHARE = 1.2
"""Of the time of a round that is read between two."""

_LEAST_SHARE = 1 / 4
"""Of that time, which the draft may take behind a prompt that took all of it: a guess."""

_CROWDING = 8.0
"""By how much that grows for each further prompt that waits, for one request that decodes."""


class Pace:
    """Seconds of reading prompts between two rounds.

    What the draft reads counts as well. It follows a round, so that it is the next step's part of
    reading that has less time.
    """

    def __init__(self, draft_costs: PromptCosts | None = None) -> None:
        """draft_costs  of prompts that the draft reads; None: they are not counted"""
        self._draft_costs = draft_costs
        self._bound = self._left = math.inf

    def begin(self, round_seconds: float | None, *, num_reading: int, num_decoding: int) -> None:
        """Begins a step in which num_decoding requests decode, and others have prompts to be read.

        round_seconds  what their round takes; None: that is not known, and nothing is bounded
        """
        owed = max(min(self._left, 0.0), -self._bound)
        if round_seconds is None or not num_decoding:
            self._bound = self._left = math.inf
            return
        num_more = max(num_reading - 1, 0)
        self._bound = round_seconds * (_SHARE + _CROWDING * num_more / num_decoding)
        self._left = self._bound + max(owed, -self._bound)

    def allows(self, seconds: float) -> bool:
        """Returns whether there is time for so much more, or nothing was read yet."""
        return seconds <= self._left or self._left >= self._bound

    def spend(self, seconds: float) -> None:
        """Counts what is read."""
        self._left -= seconds

    def most_drafts_tokens(self, most: int, start: int) -> int:
        """Returns how many tokens of prompts, up to most, the draft may read in this step.

        start  tokens that it has read of the text of which it has read most
        """
        if self._draft_costs is None or math.isinf(self._bound):
            return most
        seconds = max(self._left, _LEAST_SHARE * self._bound)
        return min(most, self._draft_costs.most_within(seconds, start))

    def allows_draft(self, num_tokens: int, num_looks: int) -> bool:
        """Returns whether there is time for so much more of the draft, or nothing was read yet."""
        return self._draft_costs is None or self.allows(
            self._draft_costs.seconds(num_tokens, num_looks)
        )

    def spend_on_draft(self, num_tokens: int, num_looks: int) -> None:
        """Counts what the draft reads, and the positions that it looks back at."""
        if self._draft_costs is not None:
            self._left -= self._draft_costs.seconds(num_tokens, num_looks)
