"""What a round launches: drafting, verification and the accept test, as one CUDA graph.

Everything about its members is data, on the GPU: who they are, how many draft tokens each has and
where from, how long their texts are. A round is recorded for a RoundKey alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specpipe.runtimes.torch.fused import round_rows
from specpipe.runtimes.torch.fused.decoder import Rows
from specpipe.runtimes.torch.fused.drawing import Drawing, Settings
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.graphs import Graphs
from specpipe.runtimes.torch.fused.host import pinned
from specpipe.runtimes.torch.fused.streams import Members, Streams
from specpipe.runtimes.torch.fused_sizes import RESULT, ROWS, power_of_2_above
from specpipe.runtimes.torch.round_sizes import Form, RoundKey, RoundSizes

Place = tuple[int, int, int]
"""The three numbers of a place: streams.Members."""

_NOBODY: Place = (-1, 0, 0)
_STRETCH = ROWS
"""Tokens of one text that the draft catches up with side by side."""


@dataclass(frozen=True)
class _RowBuffers:
    """positions, texts and slots of rows of launches, int32: Rows."""

    positions: Tensor
    texts: Tensor
    slots: Tensor

    @classmethod
    def make(cls, num_rows: int, device: torch.device) -> _RowBuffers:
        return cls(*torch.zeros(3, num_rows, dtype=torch.int32, device=device))


class RoundGraphs:
    """Launches of rounds on the engines of a pair, and the state that they move on."""

    def __init__(
        self,
        draft: FusedEngine,
        target: FusedEngine,
        sizes: RoundSizes,
        *,
        vocab_size: int,
        copies: bool,
        mask_token_id: int | None = None,
    ) -> None:
        """copies         there will be rounds whose draft tokens are copied from the text
        mask_token_id  what a parallel draft reads in place of draft tokens; None: it is not one
        """
        self._draft, self._target, self._has_copies = draft, target, copies
        self._sizes, self._mask_token_id = sizes, mask_token_id
        self._device = device = target.spec.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        capacity = max(draft.capacity, target.capacity) + 2 * ROWS
        num_streams = target.max_batch_size
        self.streams = Streams(zeros(num_streams, capacity), zeros(num_streams), zeros(num_streams))
        self.settings = Settings(num_streams, device)
        self._draft_drawing, self._target_drawing = (
            Drawing(
                engine.decoder, self.settings, self.streams, engine.decoder.is_unused[:vocab_size]
            )
            for engine in (draft, target)
        )
        self.result = zeros(sizes.most_places, RESULT)
        """What the last round tells, by place: scoring.move_on."""
        self._members = zeros(len(_NOBODY) * sizes.most_places).fill_(-1)
        self._written: list[Place] = []
        self._most_stretches = sizes.rows // _STRETCH
        self._stretches = zeros(2 * self._most_stretches).fill_(-1)
        self._target_rows, self._draft_rows = (
            _RowBuffers.make(sizes.rows, device) for _ in range(2)
        )
        self.graphs = Graphs(device)

    def on_host(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Returns numbers from which the device copies when it comes to it."""
        return pinned(torch.tensor(values, dtype=torch.int32), self._device)

    def minds_length(self, places: int, most: int) -> bool:
        """Returns whether a round of long texts is other launches than one of short ones."""
        return not (
            self._target.decoder.lists_blocks(places * (most + 1), most + 1)
            and all(
                self._draft.decoder.lists_blocks(places * group, group)
                for group in self._sizes.draft_groups(most)
            )
        )

    def run(self, key: RoundKey, places: Sequence[Place]) -> None:
        """Launches a round; places that are not given are nobody's."""
        filled = [*places, *[_NOBODY] * (key.places - len(places))]
        if filled != self._written:
            by_kind = self.on_host([list(kind) for kind in zip(*filled, strict=True)])
            self._members[: by_kind.numel()].copy_(by_kind.flatten(), non_blocking=True)
            self._written = filled
        self.graphs.run(key, lambda: self._round(key))

    def launches(self, keys: Collection[RoundKey]) -> Iterator[tuple[Hashable, Callable[[], None]]]:
        """Yields what rounds of these keys may launch, by the key of each recording.

        Before there was a round it is of nobody, and changes nothing.
        """
        for key in keys:
            yield key, partial(self._round, key)
        counts = [1 << i for i in range(self._most_stretches.bit_length())]
        for is_long in sorted({key.is_long for key in keys if key.drafts}):
            for count in counts:
                if is_long and self._lists_blocks(count):
                    continue
                yield _catching_up(count, is_long), partial(self._read_stretches, count, is_long)

    def catch_up(
        self, num_unread: Sequence[tuple[int, int]], *, num_read: int, is_long: bool
    ) -> None:
        """Lets the draft read tokens of streams, at least all before the last num_read.

        num_unread  of each stream, those among them; they may be more than there are
        """
        stretches = [
            (stream, age)
            for stream, num in num_unread
            for age in range(num - 1, num_read - 1, -_STRETCH)  # how far before the last token
        ]
        for first in range(0, len(stretches), self._most_stretches):
            self._read(stretches[first : first + self._most_stretches], is_long=is_long)

    def _read(self, stretches: Sequence[tuple[int, int]], *, is_long: bool) -> None:
        count = power_of_2_above(len(stretches))
        filled = [*stretches, *[(-1, 0)] * (count - len(stretches))]
        by_kind = self.on_host([list(kind) for kind in zip(*filled, strict=True)])
        self._stretches[: 2 * count].copy_(by_kind.flatten(), non_blocking=True)
        is_long = is_long and not self._lists_blocks(count)
        key = _catching_up(count, is_long)
        self.graphs.run(key, lambda: self._read_stretches(count, is_long))

    def _lists_blocks(self, num_stretches: int) -> bool:
        return self._draft.decoder.lists_blocks(num_stretches * _STRETCH, _STRETCH)

    def _read_stretches(self, count: int, is_long: bool) -> None:
        draft, streams, rows = self._draft.decoder, self.streams, self._draft_rows
        of_streams, ages = self._stretches[: 2 * count].view(2, count)
        draft.launch(
            round_rows.plan_catch_up, (count,),
            of_streams, ages, streams.last, streams.draft_slots,
            rows.positions, rows.texts, rows.slots,
            ROWS=_STRETCH, num_warps=1,
        )  # fmt: skip
        draft.layers(self._rows(rows, 0, count * _STRETCH, _STRETCH, is_long))

    def _round(self, key: RoundKey) -> None:
        target = self._target.decoder
        members = self._members_of(key)
        self._plan(members)
        if key.drafts:
            self._draft_tokens(key, members)
        # That a single member copies is known; of several that draft one may.
        if key.most and not (key.drafts and (key.places == 1 or not self._has_copies)):
            target.copy(self.streams, members)
        rows = self._rows(self._target_rows, 0, key.num_rows, key.most + 1, key.is_long)
        target.layers(rows)
        is_drawn = key.form is not Form.GREEDY
        target.score(rows.num_rows, writes_logits=is_drawn, width=rows.width)
        if is_drawn:
            self._target_drawing.draw(members, key.form)
            self._target_drawing.accept(self._draft_drawing, members, self.result)
        else:
            target.accept(rows, self.streams, members, self.result)

    def _members_of(self, key: RoundKey) -> Members:
        size = len(_NOBODY) * key.places
        streams, num_draft, is_copied = self._members[:size].view(-1, key.places)
        return Members(
            streams,
            num_draft,
            is_copied,
            most=key.most,
            is_packed=key.is_packed,
            is_parallel=self._sizes.is_parallel,
        )

    def _plan(self, members: Members) -> None:
        streams, rows, draft_rows = self.streams, self._target_rows, self._draft_rows
        self._target.decoder.launch(
            round_rows.plan_round, (members.num_places,),
            members.streams, members.num_draft, members.is_copied, streams.last,
            streams.draft_slots, streams.history, rows.positions, rows.texts, draft_rows.positions,
            draft_rows.texts, draft_rows.slots, members.most, streams.history.stride(0),
            self._mask_token_id or 0,
            ROWS=ROWS, IS_PARALLEL=members.is_parallel, num_warps=1,
        )  # fmt: skip

    def _draft_tokens(self, key: RoundKey, members: Members) -> None:
        draft, places, drawing = self._draft.decoder, key.places, self._draft_drawing
        is_drawn = key.form is not Form.GREEDY
        last = key.most if members.is_parallel else 1
        first = 0
        for step, each in enumerate(self._sizes.draft_groups(key.most)):
            rows = self._rows(self._draft_rows, first, each * places, each, key.is_long)
            first += rows.num_rows
            draft.layers(rows)
            draft.score(
                places * last, writes_logits=is_drawn, width=rows.width, group=each, last=last,
                first_out=drawing.first_out(members, step),
            )  # fmt: skip
            if is_drawn:
                drawing.draw_draft(members, key.form, step)
            else:
                draft.propose(rows, self.streams.history, last=last)

    def _rows(
        self, buffers: _RowBuffers, first: int, num_rows: int, group: int, is_long: bool
    ) -> Rows:
        here = slice(first, first + num_rows)
        is_target = buffers is self._target_rows
        return Rows(
            positions=buffers.positions[here],
            slots=(buffers.texts if is_target else buffers.slots)[here],
            tokens=self.streams.history,
            num_rows=num_rows,
            group=group,
            is_long=is_long,
            texts=buffers.texts[here],
            has_reading=is_target,
        )


def _catching_up(num_stretches: int, is_long: bool) -> Hashable:
    return "catch up", num_stretches, is_long
