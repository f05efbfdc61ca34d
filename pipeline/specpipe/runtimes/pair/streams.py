"""Requests whose texts the device goes on with by itself, in rounds of all of them at once.

The device has its next round before the last one has ended. It does not matter when a request joins
or leaves: its text is the same as step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specpipe.runtimes.pair.drafting import Drafting, RunningSequences
from specpipe.runtimes.pair.engine import Engine
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.rounds import MOST_UNDER_WAY, Member, Rounds
from specpipe.runtimes.pair.sampler import RoundResult
from specpipe.speculative.adaptive import most_draft_tokens
from specpipe.speculative.batch_draft_length import BatchDraftLength, Candidate
from specpipe.speculative.state import RequestState

_READ_PER_STEP = 64
"""Tokens of a text that the draft reads in the time of one of its steps: a guess."""


@dataclass(eq=False)
class _Stream:
    """A request that has joined.

    has_draft   the draft has its text
    under_way   its part in rounds under way, the oldest first
    last_round  the number of the last that it was in
    has_left    what rounds under way say of it counts for nothing
    """

    running: RunningSequences
    has_draft: bool = False
    under_way: deque[Member] = field(default_factory=deque)
    last_round: int = 0
    has_left: bool = False

    @property
    def state(self) -> RequestState:
        return self.running.state

    @property
    def is_sure_to_end(self) -> bool:
        """Whether the rounds under way, of one token at least, emit all that is wanted."""
        return self.state.num_tokens_left <= len(self.under_way)

    @property
    def most_ahead(self) -> int:
        """The most tokens that the rounds under way emit."""
        return sum(member.num_draft_tokens + 1 for member in self.under_way)


@dataclass(frozen=True)
class _UnderWay:
    parts: Sequence[tuple[_Stream, Member]]
    is_trial: bool = False


@dataclass(frozen=True)
class StreamRound:
    """What a round said of one request, and what it had in it."""

    running: RunningSequences
    member: Member
    result: RoundResult


class Streams:
    """The requests that have joined, and the rounds under way."""

    def __init__(
        self,
        rounds: Rounds,
        drafting: Drafting,
        target: Engine,
        options: PairOptions,
        *,
        is_adaptive: bool,
    ) -> None:
        self._rounds, self._drafting, self._target = rounds, drafting, target
        self._options = options
        costs = rounds.costs(1)
        self._is_adaptive = is_adaptive and costs is not None
        self._reading = 0.0 if costs is None else (costs.time(1) - 1.0) / _READ_PER_STEP
        self._length = BatchDraftLength()
        self._streams: dict[RunningSequences, _Stream] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._num_launched = 0
        self._unread: dict[_Stream, None] = {}  # that the draft is to read, in this order

    def __contains__(self, running: RunningSequences) -> bool:
        return running in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    @staticmethod
    def can_run(running: RunningSequences) -> bool:
        """Returns whether a request wants tokens alone, chosen by the model's scores alone, and has
        now no better draft tokens than the device's.
        """
        state = running.state
        request = state.request
        return not (
            running.is_draft_suspect
            or request.sampling.changes_scores
            or request.has_log_probs
            or request.return_prompt_log_probs
            or request.guide
            or state.drafts.follows_prediction
        )

    def is_fixed(self, running: RunningSequences) -> bool:
        """Returns whether the draft length of a request is not ours to choose."""
        return not self._is_adaptive or running.state.drafts.names_draft_length

    def join(self, running: RunningSequences) -> bool:
        """Takes a request in, whose text the target has cached but for the last token, if there is
        a place.
        """
        if len(self._streams) >= self._rounds.max_members:
            return False
        state = running.state
        self._rounds.join(running.target_sequence, state.token_ids, state.request.sampling)
        self._streams[running] = _Stream(running, last_round=self._num_launched)
        return True

    def leave(self, running: RunningSequences) -> None:
        """Lets a request go, if it has joined."""
        stream = self._streams.pop(running, None)
        if stream is not None:
            stream.has_left = True
            self._rounds.leave(running.target_sequence)

    def part(self) -> None:
        """Lets those go that now need more than rounds give."""
        for running in [r for r in self._streams if not self.can_run(r)]:
            self.leave(running)

    def close(self) -> None:
        """Forgets the rounds under way."""
        self._rounds.drop()
        self._under_way.clear()

    def launch(self, num_beside: int) -> None:
        """Keeps the device busy, and lets the draft read the texts that it lacks meanwhile.

        num_beside  requests that decode beside, step by step
        """
        self._forget_what_left()
        while len(self._under_way) < MOST_UNDER_WAY:
            under_way = self._next(num_beside)
            if not under_way.parts:
                break
            self._num_launched += 1
            for stream, member in under_way.parts:
                stream.under_way.append(member)
                stream.last_round = self._num_launched
            self._rounds.launch([member for _, member in under_way.parts])
            self._under_way.append(under_way)
        self._read()

    def take(self) -> list[StreamRound]:
        """Waits for the oldest round of requests that are still here; none: returns nothing."""
        self._forget_what_left()
        return self._take() if self._under_way else []

    def _forget_what_left(self) -> None:
        while self._under_way and all(s.has_left for s, _ in self._under_way[0].parts):
            self._take()

    def _take(self) -> list[StreamRound]:
        parts = self._under_way.popleft().parts
        taken = []
        for (stream, member), result in zip(parts, self._rounds.take(), strict=True):
            assert stream.under_way.popleft() is member
            if stream.has_left:
                continue
            if result.token_ids is not None:
                self._count(stream.running, member, len(result.token_ids))
            taken.append(StreamRound(stream.running, member, result))
        return taken

    def _count(self, running: RunningSequences, member: Member, num_tokens: int) -> None:
        """Counts what the engines have cached by a round that emitted so many tokens."""
        self._target.skip(running.target_sequence, num_tokens)
        if member.num_draft_tokens and not member.is_copied:
            # The draft read all of the text and of its own tokens, but the last of those.
            num_new = min(member.num_draft_tokens, num_tokens)
            self._drafting.skip_to(running, len(running.state.token_ids) - 1 + num_new)

    def _next(self, num_beside: int) -> _UnderWay:
        """Returns the round to launch; those go first that have waited the longest."""
        num_decoding = len(self._streams) + num_beside
        most = most_draft_tokens(self._options.schedule, num_decoding)
        waiting = [s for s in self._streams.values() if not s.is_sure_to_end]
        streams: list[_Stream] = []
        lengths: list[int] = []
        for stream in sorted(waiting, key=lambda stream: stream.last_round):
            length = self._fixed_length(stream, most)
            if length is None:
                continue
            if max([length, *lengths]) <= self._rounds.most_draft_tokens(len(streams) + 1):
                streams.append(stream)
                lengths.append(length)
        if num_decoding == 1 and streams and (num_copied := self._num_to_copy(streams[0], most)):
            return _UnderWay([self._part(streams[0], num_copied, is_copied=True)])
        is_trial = self._adapt(streams, lengths, most)
        parts = [self._part(s, k) for s, k in zip(streams, lengths, strict=True)]
        return _UnderWay(parts, is_trial)

    def _part(
        self, stream: _Stream, num_draft_tokens: int, *, is_copied: bool = False
    ) -> tuple[_Stream, Member]:
        num_ahead = stream.most_ahead + num_draft_tokens + 1
        num_positions = len(stream.state.token_ids) + num_ahead
        sequence = stream.running.target_sequence
        return stream, Member(sequence, num_draft_tokens, num_positions, is_copied)

    def _fixed_length(self, stream: _Stream, most: int | None) -> int | None:
        """Returns the draft length of a request where that is not ours to choose, else 0.

        None where it may be less when the rounds under way are taken: so it is near the end of a
        text. Where the accept test rejects draft tokens, what is drawn depends on which tokens are
        drafted: those must be the same ones as in single steps.
        """
        if not self.is_fixed(stream.running):
            return 0
        drafts = stream.state.drafts
        length = drafts.next_num_draft_tokens(most=most)
        if length and not stream.has_draft:
            if self._drafting.catch_up(stream.running):
                self._give_draft(stream)
            else:
                drafts.skip("no_room")
        if not stream.has_draft:
            return 0
        if drafts.next_num_draft_tokens(most=most, num_ahead=stream.most_ahead) != length:
            return None
        return min(length, self._rounds.most_draft_tokens(1))

    def _num_to_copy(self, stream: _Stream, most: int | None) -> int:
        """Returns how many tokens a request that is alone copies in its next round."""
        copying = self._rounds.copy_costs(1) if self._is_adaptive else None
        if copying is None or not self._options.prompt_lookup:
            return 0
        drafting = self._rounds.costs(1) if stream.has_draft else None
        num_copied = stream.state.drafts.next_num_copied_tokens(copying, drafting, most=most)
        return min(num_copied, self._rounds.most_draft_tokens(1))

    def _adapt(self, streams: Sequence[_Stream], lengths: list[int], most: int | None) -> bool:
        """Sets the draft lengths that are ours to choose; returns whether they are a trial."""
        places: list[int] = []
        candidates: list[Candidate] = []
        most_of_round = self._rounds.most_draft_tokens(len(streams)) if streams else 0
        for place, stream in enumerate(streams):
            candidate = None
            if not self.is_fixed(stream.running):
                candidate = self._candidate(stream, most, most_of_round)
            if candidate is not None:
                places.append(place)
                candidates.append(candidate)
        costs = self._rounds.costs(len(streams)) if candidates else None
        if costs is None:
            return False
        choice = self._length.choose(
            candidates,
            len(streams) - len(candidates),
            costs,
            reading=self._reading,
            is_trial_under_way=any(under_way.is_trial for under_way in self._under_way),
        )
        chosen = set(choice.who)
        for number, (place, candidate) in enumerate(zip(places, candidates, strict=True)):
            stream = streams[place]
            if number not in chosen:
                stream.state.drafts.skip("does_not_pay")
            elif not stream.has_draft:
                stream.state.drafts.skip("not_ready")
                self._unread[stream] = None
            else:
                lengths[place] = min(choice.num_draft_tokens, candidate.limit)
                if choice.is_trial:
                    candidate.draft_length.begin_trial()
        return choice.is_trial

    def _candidate(self, stream: _Stream, most: int | None, most_of_round: int) -> Candidate | None:
        """Returns what a request may draft; None where it may not, which it is told."""
        drafts = stream.state.drafts
        limit = drafts.next_num_draft_tokens(
            most=most, num_ahead=stream.most_ahead, num_sure=len(stream.under_way)
        )
        if not limit or drafts.draft_length is None:
            return None
        if not self._drafting.has_room(stream.running):
            drafts.skip("no_room")
            return None
        if not most_of_round:
            drafts.skip("does_not_pay")
            return None
        num_unread = len(stream.state.token_ids) - self._drafting.num_cached(stream.running)
        return Candidate(
            drafts.draft_length, min(limit, most_of_round), stream.has_draft, num_unread
        )

    def _read(self) -> None:
        """Lets the draft read some of the texts that it lacks."""
        unread = {s.running: s for s in self._unread if not s.has_left and not s.has_draft}
        self._unread.clear()
        for running in self._drafting.read(list(unread)):
            self._give_draft(unread[running])

    def _give_draft(self, stream: _Stream) -> None:
        sequence = stream.running.draft_sequence
        assert sequence is not None
        self._rounds.give_draft(stream.running.target_sequence, sequence)
        stream.has_draft = True
