"""Draft-verify rounds of many sequences, each round a single CUDA graph; their state is on the GPU.

A round drafts K tokens for each member, verifies them, accepts and moves on without the host, which
is told afterwards and, meanwhile, has given the GPU the next round already. What it launches:
round_graphs.py.

The draft begins each round with two tokens, the last one and the one before: of a round whose
draft tokens were all accepted, it never read the last. Reading one twice changes nothing. What it
lacks beyond that, after rounds without it, it reads before it drafts again.

A parallel draft (PARD, arXiv:2504.18583) has no steps. It has read mask tokens where a round's
draft tokens came to stand, so it begins the next one with as many as that one may have emitted.
What it has cached of masks is written over by those, before any of them sees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specpipe.runtimes.pair.costs import PromptCosts
from specpipe.runtimes.pair.engine import PromptParts, SequenceId
from specpipe.runtimes.pair.rounds import MOST_UNDER_WAY, Member, Reading, ReadingRoom
from specpipe.runtimes.pair.sampler import RoundResult
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.graphs import Recording
from specpipe.runtimes.torch.fused.prompt_costs import measured_prompt_costs
from specpipe.runtimes.torch.fused.round_costs import measured_costs
from specpipe.runtimes.torch.fused.round_graphs import Place, RoundGraphs
from specpipe.runtimes.torch.fused_sizes import RESULT
from specpipe.runtimes.torch.round_sizes import (
    PACKED,
    Form,
    RoundKey,
    RoundSizes,
    form_of,
    places_of,
)
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.batch_draft_length import Packing
from specpipe.speculative.request import Sampling


@dataclass
class _Stream:
    """A sequence that has joined.

    form        what rounds it takes part in must be able to do
    num_unread  the most tokens that the draft may lack of the text as rounds taken have left it
    """

    number: int
    form: Form
    has_draft: bool = False
    num_unread: int = 0


@dataclass
class _Part:
    """What a member of a round under way leaves unread of its tokens, at most."""

    stream: _Stream
    num_unread: int


@dataclass(frozen=True)
class _UnderWay:
    """What a round tells by place, when, and its parts with their places."""

    told: Tensor
    done: torch.cuda.Event | None
    parts: list[_Part]
    places: list[int]


def _places(stream: int, member: Member, most: int) -> list[Place]:
    """Returns what Members has of a member: a place, or as many as its draft tokens take."""
    num = member.num_draft_tokens
    return [
        (stream, num, int(member.is_copied)),
        *(
            (-2 - stream, min(most, num - first), -first)
            for first in range(most + 1, num + 1, most + 1)
        ),
    ]


class FusedRounds:
    """The `Rounds` of a pair of fused engines."""

    def __init__(
        self,
        draft: FusedEngine,
        target: FusedEngine,
        *,
        num_draft_tokens: int,
        vocab_size: int,
        unused: Sequence[tuple[int, int]],
        copies: bool = False,
        mask_token_id: int | None = None,
    ) -> None:
        """num_draft_tokens  the most that a round drafts, up to MAX_DRAFT_TOKENS
        unused            ranges of ids that are neither proposed nor emitted
        copies            there will be rounds whose draft tokens are copied from the text
        mask_token_id     what a parallel draft reads in place of draft tokens, and never proposes;
                          None: it is not one
        """
        self._draft, self._target, self._has_copies = draft, target, copies
        mask = [] if mask_token_id is None else [(mask_token_id, mask_token_id + 1)]
        target.decoder.use_tokens(vocab_size, list(unused))
        draft.decoder.use_tokens(vocab_size, [*unused, *mask])
        rows = min(engine.decoder.most_rows for engine in (draft, target))
        self.prompts: PromptParts | None = target
        self.max_members = min(target.max_batch_size, rows)
        self.sizes = RoundSizes(
            self.max_members, rows, num_draft_tokens, is_parallel=mask_token_id is not None
        )
        # Asked for each request in each step.
        self._most_draft_tokens = [
            self.sizes.most_draft_tokens(max(num, 1)) for num in range(self.max_members + 1)
        ]
        self._graphs = RoundGraphs(
            draft,
            target,
            self.sizes,
            vocab_size=vocab_size,
            copies=copies,
            mask_token_id=mask_token_id,
        )
        self._vocab_size = vocab_size
        self._is_cuda = target.spec.device.type == "cuda"
        self._told = [
            torch.zeros(self.sizes.most_places, RESULT, dtype=torch.int32, pin_memory=self._is_cuda)
            for _ in range(MOST_UNDER_WAY)
        ]
        self._num_launched = 0
        self._streams: dict[SequenceId, _Stream] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._costs: dict[int, StepCosts] = {}
        self._copy_costs: dict[int, StepCosts] = {}
        self._packed_costs: Mapping[int, float] = {}

    @property
    def num_under_way(self) -> int:
        """Rounds that were launched and not yet taken."""
        return len(self._under_way)

    @property
    def draft_prompt_costs(self) -> PromptCosts | None:
        return self._draft.prompt_costs

    def most_draft_tokens(self, num_members: int) -> int:
        return self._most_draft_tokens[num_members]

    def costs(self, num_members: int) -> StepCosts | None:
        return self._costs.get(num_members)

    def copy_costs(self, num_members: int) -> StepCosts | None:
        return self._copy_costs.get(num_members)

    def reading_rooms(self, members: Sequence[Member]) -> list[ReadingRoom]:
        num_draft = [member.num_draft_tokens for member in members]
        if packed := self._packed(members):
            most, num_used = PACKED, sum(map(places_of, num_draft))
            nums_pieces = [places - num_used for places in packed]
        else:
            most, nums_pieces = self.sizes.reading(len(members), max(num_draft, default=0))
        return [ReadingRoom(num_pieces, most + 1) for num_pieces in nums_pieces]

    def _packed(self, members: Sequence[Member], num_pieces: int = 0) -> list[int]:
        """Returns the places of rounds that pack what these copy, and pieces that are read beside
        them; none where a draft token is not copied, or there is none at all.
        """
        are_copied = {member.is_copied for member in members if member.num_draft_tokens}
        if are_copied != {True}:
            return []
        return self.sizes.packed_for([m.num_draft_tokens for m in members], num_pieces)

    def can_read(self, target_sequence: SequenceId) -> bool:
        return not self._target.num_left(target_sequence)

    def packing(self, num_members: int) -> Packing | None:
        costs = self._costs.get(num_members)
        if costs is None or costs.seconds is None:
            return None
        seconds = self._packed_costs.items()
        times = {num: each / costs.seconds for num, each in seconds if num >= num_members}
        return Packing(PACKED + 1, times) if times else None

    @torch.inference_mode()
    def join(
        self, target_sequence: SequenceId, token_ids: Sequence[int], sampling: Sampling
    ) -> None:
        number = self._target.slot(target_sequence)
        self._streams[target_sequence] = _Stream(number, form_of(sampling, self._vocab_size))
        self._graphs.settings.write(number, sampling, self._vocab_size)
        streams, num_tokens = self._graphs.streams, len(token_ids)
        text = self._graphs.on_host(token_ids)
        streams.history[number, :num_tokens].copy_(text, non_blocking=True)
        streams.last[number].fill_(num_tokens - 1)  # to assign it would wait for the device

    @torch.inference_mode()
    def give_draft(self, target_sequence: SequenceId, draft_sequence: SequenceId) -> None:
        stream = self._streams[target_sequence]
        stream.has_draft, stream.num_unread = True, 2
        self._graphs.streams.draft_slots[stream.number].fill_(self._draft.slot(draft_sequence))

    def lose_draft(self, target_sequence: SequenceId) -> None:
        self._streams[target_sequence].has_draft = False

    @torch.inference_mode()
    def launch(self, members: Sequence[Member], readings: Sequence[Reading] = ()) -> None:
        assert not members or len(self._under_way) < MOST_UNDER_WAY, "take a round first"
        streams = [self._streams[member.target_sequence] for member in members]
        is_drafting = [m.num_draft_tokens > 0 and not m.is_copied for m in members]
        num_positions = [m.num_positions for m in members] + [r.stop for r in readings]
        is_long = self._target.is_long(max(num_positions))
        num_draft = [member.num_draft_tokens for member in members]
        pieces: list[Place] = []
        packed = self._pieces(readings, PACKED + 1)
        if readings and (fitting := self._packed(members, len(packed))):
            places, most, pieces = fitting[0], PACKED, packed
        elif readings or any(is_drafting):
            most = self.sizes.length(len(members) + bool(readings), max(num_draft, default=0))
            unread = self._take_unread(
                [stream for stream, drafts in zip(streams, is_drafting, strict=True) if drafts]
            )
            if unread and not readings:  # whose pieces are made for a number of draft tokens
                most = self.sizes.reaching(len(members), most, max(num for _, num in unread))
            self._graphs.catch_up(unread, num_read=self.sizes.num_read(most), is_long=is_long)
            pieces = self._pieces(readings, most + 1)
            places = self.sizes.places(len(members) + len(pieces), most)
        else:
            places, most = self.sizes.copying(num_draft)
        form = max((stream.form for stream in streams), default=Form.GREEDY)
        of_members = [
            place
            for stream, member in zip(streams, members, strict=True)
            for place in _places(stream.number, member, most)
        ]
        self._graphs.run(
            RoundKey(
                places,
                most,
                any(is_drafting),
                is_long and self._graphs.minds_length(places, most),
                self.sizes.form(places, form),
            ),
            [*of_members, *pieces],
        )
        if not members:
            return
        first_places = [place for place, (stream, *_) in enumerate(of_members) if stream >= 0]
        told, done = self._tell(len(of_members))
        parts = [
            _Part(stream, 2 if drafts and not self.sizes.is_parallel else num + 1)
            for stream, num, drafts in zip(streams, num_draft, is_drafting, strict=True)
        ]
        told = told[:, : 2 + max(num_draft) + 1]
        self._under_way.append(_UnderWay(told, done, parts, first_places))

    def _pieces(self, readings: Sequence[Reading], most: int) -> list[Place]:
        """Divides what is read into places of so many tokens."""
        return [
            (-2 - self._streams[of.target_sequence].number, min(most, of.stop - first) - 1, first)
            for of in readings
            for first in range(of.first_position, of.stop, most)
        ]

    def _tell(self, num_places: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Has the host told what a round says of so many, and when that is done."""
        told = self._told[self._num_launched % MOST_UNDER_WAY][:num_places]
        self._num_launched += 1
        told.copy_(self._graphs.result[:num_places], non_blocking=True)
        if not self._is_cuda:
            return told, None
        done = torch.cuda.Event()
        done.record()
        return told, done

    def take(self) -> list[RoundResult]:
        under_way = self._under_way.popleft()
        if under_way.done is not None:
            under_way.done.synchronize()
        told = under_way.told.tolist()
        results = []
        for part, place in zip(under_way.parts, under_way.places, strict=True):
            numbers = told[place]
            num_emitted, num_judged, *token_ids = numbers
            part.stream.num_unread += min(part.num_unread, num_emitted)
            emitted = token_ids[:num_emitted] if num_emitted else None
            results.append(RoundResult(emitted, num_judged))
        return results

    def leave(self, target_sequence: SequenceId) -> None:
        del self._streams[target_sequence]

    def drop(self) -> None:
        while self._under_way:
            self.take()

    def _take_unread(self, streams: Sequence[_Stream]) -> list[tuple[int, int]]:
        """Returns the most tokens that the draft lacks of each text, which it is to read now."""
        unread = []
        for stream in streams:
            assert stream.has_draft, "who drafts has a draft"
            parts = [p for r in self._under_way for p in r.parts if p.stream is stream]
            num_unread = stream.num_unread + sum(part.num_unread for part in parts)
            unread.append((stream.number, num_unread))
            stream.num_unread = 0
            for part in parts:
                part.num_unread = 0
        return unread

    def keys(self) -> list[RoundKey]:
        """Returns what rounds may be asked for, those of few places first."""
        keys = []
        is_ever_long = self._target.is_long(max(self._draft.capacity, self._target.capacity))
        # What drafts may copy as well; what only copies runs without the draft.
        kinds = {shape: [shape[1] > 0] for shape in self.sizes.shapes()}
        if self._has_copies:
            for shape in [s for s in kinds if s[1]]:
                kinds[shape].append(False)
            for places in self.sizes.packed:
                kinds.setdefault((places, PACKED), [False])
        for (places, most), of_shape in sorted(kinds.items()):
            for drafts in of_shape:
                minds = is_ever_long and self._graphs.minds_length(places, most)
                for is_long in (False, True)[: 1 + minds]:
                    for form in self.sizes.forms(places):
                        keys.append(RoundKey(places, most, drafts, is_long, form))
        return keys

    def recordings(self) -> list[Recording]:
        """Returns all that rounds may launch."""
        graphs = self._graphs.graphs
        return [Recording(graphs, *each) for each in self._graphs.launches(self.keys())]

    @torch.inference_mode()
    def measure(self) -> None:
        """Times rounds, and launches of prompts; on a GPU, while no sequence runs."""
        if not self._is_cuda:
            return
        for engine in (self._draft, self._target):
            engine.prompt_costs = measured_prompt_costs(engine)
        self._costs, self._copy_costs, self._packed_costs = measured_costs(
            self,
            self.sizes,
            self._draft,
            self._target,
            self._graphs.streams,
            copies=self._has_copies,
        )
