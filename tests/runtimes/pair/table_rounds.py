"""Rounds of a device that is a table, which holds its callers to every word of `Rounds`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specpipe.runtimes.pair.costs import CostTable, PromptCosts
from specpipe.runtimes.pair.engine import PromptParts
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.rounds import MOST_UNDER_WAY, Member, Reading, ReadingRoom
from specpipe.runtimes.pair.sampler import Drafted, RoundResult
from specpipe.runtimes.pair.torch_sampler import TorchSampler
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.batch_draft_length import Packing
from specpipe.speculative.lookup import PromptLookup
from specpipe.speculative.request import Request, Sampling
from tests.runtimes.table_engine import HasLogits, TableEngine
from tests.speculative.table import TableModel, WordDetokenizer, new_state, target_rule

Costs = Callable[[int], StepCosts | None]


class Device(TableEngine):
    """An engine whose tokens a round may have cached: then `skip` finds them in the text.

    num_told      how many of a sequence those are, as far as rounds that were taken tell it
    part_seconds  of each of the three parts in which it reads what `begin` takes
    """

    part_seconds = 0.0

    def __init__(self, model: HasLogits, **limits: int) -> None:
        super().__init__(model, **limits)
        self.texts: dict[int, list[int]] = {}
        self.num_told: dict[int, int] = {}
        self.prompt_lengths: dict[int, int] = {}
        self._begun: dict[int, Sequence[int]] = {}
        self._num_parts_left = 0

    def allocate(self, *, prompt_length: int, max_tokens: int) -> int:
        sequence = super().allocate(prompt_length=prompt_length, max_tokens=max_tokens)
        self.prompt_lengths[sequence] = prompt_length
        return sequence

    def num_left(self, sequence: int) -> int:
        return max(self.prompt_lengths[sequence] - 1 - self.length(sequence), 0)

    def begin(self, batch: Sequence[tuple[int, Sequence[int]]]) -> None:
        assert not self._num_parts_left
        self._begun = dict(batch)
        self._num_parts_left = 3

    @property
    def seconds_of_next(self) -> float | None:
        return self.part_seconds if self._num_parts_left else None

    def go_on(self) -> None:
        assert self._num_parts_left
        self._num_parts_left -= 1
        if not self._num_parts_left and self._begun:
            super().forward(list(self._begun.items()), [0] * len(self._begun))

    def forward(
        self, batch: Sequence[tuple[int, Sequence[int]]], num_logits: Sequence[int]
    ) -> torch.Tensor:
        while self._num_parts_left:
            self.go_on()
        return super().forward(batch, num_logits)

    def skip(self, sequence: int, num_tokens: int) -> None:
        text, length = self.texts[sequence], self.length(sequence)
        assert 0 <= num_tokens <= self.num_told[sequence] - length
        self.sequences[sequence] += text[length : length + num_tokens]

    def free(self, sequence: int) -> None:
        super().free(sequence)
        self._begun.pop(sequence, None)
        self.texts.pop(sequence, None)
        self.num_told.pop(sequence, None)


@dataclass
class _Text:
    """num_told are the tokens of the text that its caller knows, and num_read those that the target
    has cached or does in rounds under way.
    """

    token_ids: list[int]
    sampling: Sampling
    num_told: int
    target_sequence: int
    num_read: int
    draft_sequence: int | None = None


@dataclass
class TableRounds:
    """A round is made when it is launched, so the device is ahead of what was taken."""

    draft: Device
    target: Device
    costs_of: Costs = lambda num_members: None
    max_members: int = 4
    max_rows: int = 64
    short_prompt: int = 0
    costs_of_copies: StepCosts = StepCosts(0.0, [0.01 * n for n in range(9)])
    launched: list[list[Member]] = field(default_factory=list)
    read: list[list[int]] = field(default_factory=list)
    num_packed: int = 0
    draft_prompt_costs: PromptCosts | None = None

    def __post_init__(self) -> None:
        self.prompts: PromptParts | None = self.target
        self.texts: dict[int, _Text] = {}
        self.sampler = TorchSampler(self.target.vocab_size)
        self.under_way: deque[list[tuple[_Text, RoundResult, int]]] = deque()

    @property
    def lengths(self) -> list[int]:
        """The draft length of each round, of one member."""
        return [member.num_draft_tokens for (member,) in self.launched]

    @property
    def copied(self) -> list[int]:
        return [m.num_draft_tokens for members in self.launched for m in members if m.is_copied]

    def most_draft_tokens(self, num_members: int) -> int:
        return min(8, self.max_rows // num_members - 1)

    def costs(self, num_members: int) -> StepCosts | None:
        return self.costs_of(num_members)

    def copy_costs(self, num_members: int) -> StepCosts | None:
        if self.costs_of(num_members) is None:
            return None
        verify = self.costs_of_copies.verify[: self.most_draft_tokens(num_members) + 1]
        return replace(self.costs_of_copies, verify=verify)

    def packing(self, num_members: int) -> Packing | None:
        """Of two rows a place, as many as there may be."""
        places = self.max_rows // 2
        if self.costs_of(num_members) is None or places < num_members:
            return None
        return Packing(2, {places: self.costs_of_copies.time(1)})

    def reading_rooms(self, members: Sequence[Member]) -> list[ReadingRoom]:
        """Launches are of 8 rows, or 16, and so on."""
        num_draft = [member.num_draft_tokens for member in members]
        size, num_places = max(num_draft, default=0) + 1, len(members)
        if any(num_draft) and not any(m.num_draft_tokens and not m.is_copied for m in members):
            size, num_places = 2, self._num_places(members)
        widths = [width for width in (8, 16, 32) if width < self.max_rows]
        filling = [width // size - num_places for width in (*widths, self.max_rows)]
        return [ReadingRoom(num, size) for num in filling if num >= 0] or [ReadingRoom(0, size)]

    def _num_places(self, members: Sequence[Member]) -> int:
        return sum(member.num_draft_tokens // 2 + 1 for member in members)

    def can_read(self, target_sequence: int) -> bool:
        return self.target.prompt_lengths[target_sequence] <= self.short_prompt

    def join(self, target_sequence: int, token_ids: Sequence[int], sampling: Sampling) -> None:
        assert target_sequence not in self.texts
        assert len(self.texts) < self.max_members
        num_read = self.target.length(target_sequence)
        assert num_read == len(token_ids) - 1 or self.can_read(target_sequence)
        assert self.target.sequences[target_sequence] == list(token_ids[:num_read])
        text = _Text(list(token_ids), sampling, len(token_ids), target_sequence, num_read)
        self.texts[target_sequence] = text
        self.target.texts[target_sequence] = text.token_ids
        self.target.num_told[target_sequence] = len(token_ids) - 1

    def lose_draft(self, target_sequence: int) -> None:
        text = self.texts[target_sequence]
        assert text.draft_sequence is not None
        text.draft_sequence = None

    def give_draft(self, target_sequence: int, draft_sequence: int) -> None:
        text = self.texts[target_sequence]
        assert text.draft_sequence is None
        assert not any(t is text and drafted for r in self.under_way for t, _, drafted in r)
        cached = self.draft.sequences[draft_sequence]
        assert text.num_told - 2 <= len(cached) <= text.num_told - 1
        assert cached == text.token_ids[: len(cached)]
        text.draft_sequence = draft_sequence
        self.draft.texts[draft_sequence] = text.token_ids

    def launch(self, members: Sequence[Member], readings: Sequence[Reading] = ()) -> None:
        assert members or readings
        assert len(members) <= self.max_members
        assert len({member.target_sequence for member in members}) == len(members)
        most = max((member.num_draft_tokens for member in members), default=0)
        room = self.reading_rooms(members)[-1]
        for reading in readings:
            text = self.texts[reading.target_sequence]
            assert reading.first_position == text.num_read
            assert 0 < reading.num_tokens < len(text.token_ids) - text.num_read
            text.num_read += reading.num_tokens
            room = room.less(reading.num_tokens)
        assert room.num_pieces >= 0
        self.read.append([reading.num_tokens for reading in readings])
        if not members:
            return
        assert len(self.under_way) < MOST_UNDER_WAY
        packing = self.packing(len(members))
        if most > self.most_draft_tokens(len(members)):
            assert packing is not None
            assert all(m.is_copied or not m.num_draft_tokens for m in members)
            assert self._num_places(members) <= max(packing.times)
            self.num_packed += 1
        self.launched.append(list(members))
        self.under_way.append([self._run(member) for member in members])

    def _run(self, member: Member) -> tuple[_Text, RoundResult, int]:
        """Returns what came of it, and how many tokens were drafted."""
        text = self.texts[member.target_sequence]
        assert text.num_read == len(text.token_ids) - 1
        num_drafted = 0 if member.is_copied else member.num_draft_tokens
        if num_drafted:
            assert text.draft_sequence is not None
            assert len(text.token_ids) - 1 + num_drafted <= self.draft.max_seq_len
        asked = Request(
            request_id="r",
            prompt_token_ids=tuple(text.token_ids),
            max_tokens=99,
            sampling=text.sampling,
        )
        drafted = Drafted(new_state(asked))

        def logits(model: HasLogits, num_rows: int) -> torch.Tensor:
            rows = model.logits([*text.token_ids, *drafted.token_ids], num_rows)
            return torch.from_numpy(rows).float()

        if member.is_copied:
            copied = PromptLookup(text.token_ids).copy(member.num_draft_tokens)
            drafted.token_ids.extend(copied)
        for _ in range(num_drafted):
            self.sampler.draft(logits(self.draft.model, 1), [drafted])
        num_rows = member.num_draft_tokens + 1
        (result,) = self.sampler.verify(logits(self.target.model, num_rows), [drafted])
        self._check_room(text, member.num_draft_tokens, num_drafted)
        text.token_ids += result.token_ids or []
        text.num_read = len(text.token_ids) - 1
        assert len(text.token_ids) <= member.num_positions
        return text, result, num_drafted

    def _check_room(self, text: _Text, num_verified: int, num_drafted: int) -> None:
        """A round writes the keys and values of all that it drafts and verifies."""
        length = len(text.token_ids)
        if self.target.paged is not None:
            assert self.target.paged.room(text.target_sequence) >= length + num_verified
        if self.draft.paged is not None and num_drafted:
            assert text.draft_sequence is not None
            assert self.draft.paged.room(text.draft_sequence) >= length + num_drafted - 1

    def take(self) -> list[RoundResult]:
        taken = self.under_way.popleft()
        for text, result, num_drafted in taken:
            num_emitted = len(result.token_ids or [])
            if num_drafted and text.draft_sequence in self.draft.texts:
                num_cached = text.num_told - 1 + min(num_drafted, num_emitted)
                self.draft.num_told[text.draft_sequence] = num_cached
            text.num_told += num_emitted
            if text.target_sequence in self.target.texts:
                self.target.num_told[text.target_sequence] = text.num_told - 1
        return [result for _, result, _ in taken]

    def leave(self, target_sequence: int) -> None:
        del self.texts[target_sequence]

    def drop(self) -> None:
        self.under_way.clear()


def make_pair(
    draft: HasLogits,
    *,
    target: HasLogits | None = None,
    costs: StepCosts | Costs | None = None,
    rounds_type: type[TableRounds] = TableRounds,
    has_rounds: bool = True,
    draft_max_seq_len: int = 500,
    max_members: int = 4,
    max_rows: int = 64,
    short_prompt: int = 0,
    part_seconds: float = 0.0,
    draft_prompt_costs: PromptCosts | None = None,
    num_pages: int = 0,
    draft_pages: int = 0,
    page: int = 8,
    clock: Callable[[], float] | None = None,
    copy_costs: StepCosts = TableRounds.costs_of_copies,
    table: CostTable | None = None,
    **options: Any,
) -> tuple[EnginePair, TableRounds]:
    """costs are those of rounds, of any number of members if they are no function; table is of
    single steps.
    """
    sizes = {
        "max_batch_size": options.get("max_batch_size", 4),
        "page": page,
        "spare": 3 * (options.get("num_draft_tokens", 4) + 1),
    }
    engines = (
        Device(draft, max_seq_len=draft_max_seq_len, num_pages=draft_pages, **sizes),
        Device(target or TableModel(target_rule), num_pages=num_pages, **sizes),
    )
    costs_of = costs if callable(costs) else lambda num_members: costs
    engines[1].part_seconds = part_seconds
    rounds = rounds_type(
        *engines,
        costs_of,
        max_members=max_members,
        max_rows=max_rows,
        short_prompt=short_prompt,
        costs_of_copies=copy_costs,
    )
    rounds.draft_prompt_costs = draft_prompt_costs
    settings = {"max_batch_size": 4, "max_seq_len": 300, "max_num_tokens": 16, **options}
    pair = EnginePair(
        *engines,
        TorchSampler(engines[0].vocab_size),
        PairOptions(adaptive=costs is not None, **settings),
        lambda prompt, **_: WordDetokenizer(),
        costs=(table or CostTable(8, {1: 1.0, 4: 1.0}, {1: 4.0, 36: 4.0})) if costs else None,
        rounds=rounds if has_rounds else None,
        **({"clock": clock} if clock else {}),
    )
    return pair, rounds
