"""What rounds are recorded for: places, draft tokens of each, and whether tokens are drawn.

A round is recorded for few numbers of members and of draft tokens, and runs in the least that
holds it; what is too much is nobody's. Importing this imports neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from specpipe.runtimes.torch.fused_sizes import (
    ROWS,
    WIDTHS,
    most_rows,
    width_of,
)
from specpipe.speculative.request import Sampling

MAX_DRAFT_TOKENS = ROWS - 1
"""Of a member of a round, whose rows of the target are one tile."""


def beyond_rounds(num_draft_tokens: int) -> str | None:
    """Says who has more draft tokens than rounds have, where a step has so many; None: nobody."""
    if num_draft_tokens <= MAX_DRAFT_TOKENS:
        return None
    return (
        f"speculation.num_draft_tokens is {num_draft_tokens}, and a round of the fused kernels "
        f"drafts up to {MAX_DRAFT_TOKENS}: requests that name more, or nothing where "
        "speculation.adaptive is false, go step by step, which takes longer"
    )


_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 12, MAX_DRAFT_TOKENS)
"""Draft tokens of rounds of several members; those of a single one are recorded one by one."""

PACKED = 1
"""Draft tokens of a place in rounds without the draft in which a member may have several places.
So those that copy much have many rows, and those that copy nothing two.
"""

_FEW = (1, 2)
"""Places of rounds that need not fill a launch."""


class Form(IntEnum):
    """Which kernels a round has for what its members ask. Each does what those below it do."""

    GREEDY = 0
    """Nobody draws: scoring.py."""
    DRAWN = 1
    """Nobody has top-k or top-p."""
    CUT = 2
    """Nobody has both."""
    CUT_TWICE = 3


def form_of(sampling: Sampling, vocab_size: int) -> Form:
    """Returns the form that a member with this sampling needs."""
    if sampling.is_greedy:
        return Form.GREEDY
    cuts = (0 < sampling.top_k < vocab_size, sampling.top_p < 1.0)
    return (Form.DRAWN, Form.CUT, Form.CUT_TWICE)[sum(cuts)]


_FORMS = (Form.GREEDY, Form.CUT_TWICE)
"""Those that rounds of several members are recorded in; of one, all are: there, a launch that finds
nothing to do is a hundredth of a step with ten others.
"""


@dataclass(frozen=True)
class RoundKey:
    """What a round is recorded for.

    places   members that it has room for, or pieces of texts that are read
    most     draft tokens that each has room for
    drafts   the draft runs, for one of them at least; else their draft tokens are copied
    is_long  one of their texts may be long: FusedEngine.is_long; False where that changes nothing
    form     one that does what each of them needs
    """

    places: int
    most: int
    drafts: bool
    is_long: bool
    form: Form = Form.GREEDY

    @property
    def num_rows(self) -> int:
        """Of the target."""
        return self.places * (self.most + 1)

    @property
    def is_packed(self) -> bool:
        """Whether a member may have several places."""
        return not self.drafts and self.most == PACKED


def places_of(num_copied: int) -> int:
    """Returns the places that a member has in a packed round."""
    return num_copied // (PACKED + 1) + 1


@dataclass(frozen=True)
class RoundSizes:
    """Sizes of the rounds of a pair.

    rows              the most of one launch of either engine
    num_draft_tokens  the most that a member has, up to MAX_DRAFT_TOKENS
    is_parallel       the draft proposes all of them in one launch
    """

    max_members: int
    rows: int
    num_draft_tokens: int
    is_parallel: bool = False

    @classmethod
    def of(
        cls, max_batch_size: int, num_draft_tokens: int, *, is_parallel: bool = False
    ) -> RoundSizes:
        """Returns those of engines built for so much."""
        rows = most_rows(max_batch_size, num_draft_tokens)
        return cls(min(max_batch_size, rows), rows, num_draft_tokens, is_parallel)

    def draft_groups(self, most: int) -> list[int]:
        """Returns the rows of each place in the draft's launches of a round, one after the other.

        A parallel draft reads the last most + 1 tokens, all of which it may lack, and most - 1 mask
        tokens; any other the last two, and then one more at a time.
        """
        if not most:
            return []
        return [2 * most] if self.is_parallel else [2, *[1] * (most - 1)]

    def num_read(self, most: int) -> int:
        """Returns how many of the last tokens the draft reads in a round with room for so many."""
        return most + 1 if self.is_parallel else 2

    def most_draft_tokens(self, num_members: int) -> int:
        """Returns the most draft tokens that each of so many can have."""
        return self.lengths(num_members)[-1]

    def lengths(self, num_members: int) -> list[int]:
        """Returns the numbers of draft tokens that rounds of so many are recorded for, rising."""
        most = self._most(num_members)
        if num_members == 1:
            return list(range(most + 1))
        return [k for k in self._all_lengths if k <= most]

    def length(self, num_members: int, num_draft_tokens: int) -> int:
        """Returns the least of them that holds so many draft tokens."""
        return next(k for k in self.lengths(num_members) if k >= num_draft_tokens)

    def reaching(self, num_members: int, most: int, num_unread: int) -> int:
        """Returns the draft tokens of a round that has room for most, of which the draft reads so
        many of the last tokens, if its launches are no wider; else most.
        """
        for longer in self.lengths(num_members):
            if longer > most and self.num_read(most) < num_unread <= self.num_read(longer):
                is_wider = self._widths(num_members, longer) != self._widths(num_members, most)
                return most if is_wider else longer
        return most

    def _widths(self, num_members: int, most: int) -> list[int]:
        places = self.places(num_members, most)
        return [width_of(places * each) for each in (most + 1, *self.draft_groups(most))]

    def places(self, num_members: int, most: int) -> int:
        """Returns the places of a round of so many with one of their `lengths`.

        Pieces that are read count as members.
        """
        return next(places for places in self._all_places(most) if places >= num_members)

    def reading(self, num_members: int, num_draft_tokens: int) -> tuple[int, list[int]]:
        """Returns the draft tokens that each place has room for where rounds of so many read, and
        how many pieces each of them can read, by the widths of launches; a piece has a token more.
        """
        longer = [k for k in self.lengths(num_members + 1) if k >= num_draft_tokens]
        filling = self._filling(longer[0]) if longer and self._reads(longer[0]) else []
        nums_pieces = [places - num_members for places in filling if places >= num_members]
        return (longer[0], nums_pieces) if nums_pieces else (num_draft_tokens, [0])

    def forms(self, places: int) -> tuple[Form, ...]:
        """Returns the forms that rounds of so many places are recorded in, rising."""
        return tuple(Form) if places == 1 else _FORMS

    def form(self, places: int, needed: Form) -> Form:
        """Returns the least of them that does what is needed."""
        return next(form for form in self.forms(places) if form >= needed)

    def shapes(self) -> list[tuple[int, int]]:
        """Returns places and draft tokens of all that rounds are recorded for, rising."""
        alone = [(1, most) for most in range(self.num_draft_tokens + 1)]
        others = {(p, most) for most in self._all_lengths for p in self._all_places(most)}
        return sorted({*alone, *others})

    @property
    def packed(self) -> list[int]:
        """Returns the places of rounds in which members may have several, rising."""
        if self.num_draft_tokens <= PACKED:
            return []
        return [width // (PACKED + 1) for width in WIDTHS if width <= self.rows]

    @property
    def most_places(self) -> int:
        """Returns the places that any round has at most."""
        return max(*self.packed, *(places for places, _ in self.shapes()))

    def copying(self, num_copied: Sequence[int]) -> tuple[int, int]:
        """Returns places and draft tokens of the round in which members copy so many tokens.

        It is the narrowest, and of two that are as narrow the one in which each has one place.
        """
        rounds = []
        most = max(num_copied)
        if most <= self.most_draft_tokens(len(num_copied)):
            most = self.length(len(num_copied), most)
            rounds.append((self.places(len(num_copied), most), most))
        rounds += [(places, PACKED) for places in self.packed_for(num_copied)][:1]
        return min(rounds, key=lambda key: width_of(key[0] * (key[1] + 1)))

    def packed_for(self, num_copied: Sequence[int], num_pieces: int = 0) -> list[int]:
        """Returns the places of packed rounds that hold members which copy so many tokens, and so
        many pieces of texts that are read beside them.
        """
        num_places = sum(map(places_of, num_copied)) + num_pieces
        return [places for places in self.packed if places >= num_places]

    @property
    def _all_lengths(self) -> list[int]:
        """Of rounds of several members."""
        most = self._most(2)
        return sorted({*(k for k in _LENGTHS if k < most), max(most, 0)})

    def _all_places(self, most: int) -> list[int]:
        """Those of as many members as fill launches, and few; and where texts are read, all."""
        filling = self._filling(most)
        every = [min(places, self.max_members) for places in (*_FEW, *filling)]
        if self._reads(most):
            every += filling
        return sorted({places for places in every if 0 < places <= self._widest(most)})

    def _filling(self, most: int) -> list[int]:
        """As many as fill launches of each width, which take about as long for fewer."""
        filling = {width // (most + 1) for width in WIDTHS if most < width <= self.rows}
        return sorted({min(places, self._widest(most)) for places in filling})

    def _widest(self, most: int) -> int:
        """Returns the places for which both models have rows in one launch."""
        return self.rows // max([most + 1, *self.draft_groups(most)])

    def _most(self, num_members: int) -> int:
        """Returns the most draft tokens that each of so many can have rows for."""
        each = self.rows // num_members
        return min(each // 2 if self.is_parallel else each - 1, self.num_draft_tokens)

    def _reads(self, most: int) -> bool:
        """Says whether texts are read beside draft tokens: not if there is only one sequence."""
        return not most or self.max_members > 1
