"""Which sizes rounds are recorded in: places, and draft tokens of each.

A round is recorded for few numbers of members and of draft tokens, and runs in the least that
holds it; what is too much is nobody's. Importing this imports neither torch nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from specpipe.runtimes.torch.fused_sizes import ROWS, most_rows

MAX_DRAFT_TOKENS = ROWS - 1

_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 12, MAX_DRAFT_TOKENS)
"""Draft tokens of rounds of several members; those of a single one are recorded one by one."""


@dataclass(frozen=True)
class RoundKey:
    """What a round is recorded for.

    places   members that it has room for
    most     draft tokens that each has room for
    drafts   the draft runs, for one of them at least; else their draft tokens are copied
    is_long  one of their texts may be long: FusedEngine.is_long
    """

    places: int
    most: int
    drafts: bool
    is_long: bool

    @property
    def num_rows(self) -> int:
        """Of the target."""
        return self.places * (self.most + 1)


@dataclass(frozen=True)
class RoundSizes:
    """Sizes of the rounds of a pair.

    rows              the most of one launch of either engine
    num_draft_tokens  the most that a member has, up to MAX_DRAFT_TOKENS
    """

    max_members: int
    rows: int
    num_draft_tokens: int

    @classmethod
    def of(cls, max_batch_size: int, num_draft_tokens: int) -> RoundSizes:
        """Returns those of engines built for so much."""
        rows = most_rows(max_batch_size, num_draft_tokens)
        return cls(min(max_batch_size, rows), rows, num_draft_tokens)

    def places(self, num_members: int) -> int:
        """Returns the places of a round of so many."""
        return min(1 << (num_members - 1).bit_length(), self.max_members)

    def most_draft_tokens(self, num_members: int) -> int:
        """Returns the most draft tokens that each of so many can have."""
        return min(self.rows // self.places(num_members) - 1, self.num_draft_tokens)

    def lengths(self, num_members: int) -> list[int]:
        """Returns the numbers of draft tokens that rounds of so many are recorded for, rising."""
        most = self.most_draft_tokens(num_members)
        if num_members == 1:
            return list(range(most + 1))
        return [*(k for k in _LENGTHS if k < most), most]

    def length(self, num_members: int, num_draft_tokens: int) -> int:
        """Returns the least of them that holds so many draft tokens."""
        return next(k for k in self.lengths(num_members) if k >= num_draft_tokens)

    def shapes(self) -> list[tuple[int, int]]:
        """Returns places and draft tokens of all that rounds are recorded for, both rising."""
        every = sorted({self.places(num) for num in range(1, self.max_members + 1)})
        return [(places, most) for places in every for most in self.lengths(places)]
