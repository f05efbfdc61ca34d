"""Requests whose texts the device goes on with by itself, in rounds of all of them at once.

The device has its next round before the last one has ended. It does not matter when a request joins
or leaves: its text is the same as step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from specpipe.runtimes.pair.drafting import Drafting, RunningSequences
from specpipe.runtimes.pair.engine import Engine
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.readings import Readings
from specpipe.runtimes.pair.rounds import MOST_UNDER_WAY, Member, Rounds
from specpipe.runtimes.pair.sampler import RoundResult
from specpipe.runtimes.pair.scheduling import num_uncached
from specpipe.runtimes.pair.stream_drafts import PLAIN, Share, Stream, StreamDrafts
from specpipe.speculative.adaptive import most_draft_tokens
from specpipe.speculative.lookup import CopyOdds

MakeRoom = Callable[[RunningSequences, int], None]
"""Lets a request have so many tokens; to that end others may leave, or itself."""


@dataclass(frozen=True)
class _UnderWay:
    parts: Sequence[tuple[Stream, Member]]
    is_trial: bool = False


class StreamRound(NamedTuple):
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
        copy_odds: CopyOdds | None = None,
    ) -> None:
        """copy_odds  of draft tokens that are copied; None: none are"""
        self._rounds, self._drafting, self._target = rounds, drafting, target
        self._options = options
        self._drafts = StreamDrafts(rounds, drafting, is_adaptive=is_adaptive, copy_odds=copy_odds)
        self._readings = Readings(rounds, target, options.max_num_tokens, begins=self._begins)
        self._streams: dict[RunningSequences, Stream] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._num_launched = 0

    def __contains__(self, running: RunningSequences) -> bool:
        return running in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    def can_run(self, running: RunningSequences) -> bool:
        """Returns whether a request wants tokens alone, chosen by the model's scores alone, with no
        more draft tokens than rounds have, and has now no better ones than the device's.
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
            or not self._drafts.holds(running)
        )

    def reads_along(self, running: RunningSequences) -> bool:
        """Returns whether the draft reads a prompt along, as it will draft in any case."""
        return not self.can_run(running) or self._drafts.is_fixed(running)

    def join(self, requests: Sequence[RunningSequences]) -> None:
        """Takes in those whose texts the target has cached but for the last token, or for what
        rounds read, and that rounds can run, as long as there are places.
        """
        for running in [r for r in requests if r not in self._streams]:
            if len(self._streams) >= self._rounds.max_members:
                return
            state, sequence = running.state, running.target_sequence
            if not self.can_run(running):
                continue
            is_read = num_uncached(running, self._target) == 1
            if not is_read and not self._rounds.can_read(sequence):
                continue
            self._rounds.join(sequence, state.token_ids, state.request.sampling)
            stream = self._streams[running] = Stream(running, last_round=self._num_launched)
            if not is_read:
                self._readings.add(stream)

    def leave(self, running: RunningSequences) -> None:
        """Lets a request go, if it has joined."""
        stream = self._streams.pop(running, None)
        if stream is not None:
            stream.has_left = True
            self._readings.remove(stream)
            self._rounds.leave(running.target_sequence)

    def part(self) -> None:
        """Lets those go that now need more than rounds give."""
        for running in list(self._streams):
            if running.is_draft_suspect or running.state.drafts.follows_prediction:
                self.leave(running)  # what else it asks for was known when it joined

    def close(self) -> None:
        """Forgets the rounds under way."""
        self._rounds.drop()
        self._under_way.clear()

    @property
    def round_seconds(self) -> float | None:
        """What the round takes that was launched last, or one of one request; None: not known."""
        last = self._under_way[-1] if self._under_way else _UnderWay(())
        costs = self._rounds.costs(max(len(last.parts), 1))
        if costs is None or costs.seconds is None:
            return None
        drafted = (member.num_draft_tokens for _, member in last.parts if not member.is_copied)
        return costs.seconds * costs.time(max(drafted, default=0))

    def launch(self, num_beside: int, make_room: MakeRoom) -> None:
        """Keeps the device busy, and lets the draft read the texts that it lacks meanwhile.

        num_beside  requests that decode beside, step by step
        """
        self._forget_what_left()
        while len(self._under_way) < MOST_UNDER_WAY:
            under_way = _UnderWay([]) if self._readings.are_next else self._next(num_beside)
            parts = self._with_room(under_way.parts, make_room)
            readings, beginning = self._readings.choose([member for _, member in parts])
            parts += [self._part(stream, Share(0)) for stream in beginning]
            if not parts and not readings:
                break
            self._num_launched += 1
            for stream, member in parts:
                stream.launch(member)
                stream.last_round = self._num_launched
            self._rounds.launch([member for _, member in parts], readings)
            if parts:  # else there is nothing to take
                self._under_way.append(replace(under_way, parts=parts))
        self._drafts.read()

    def _with_room(
        self, parts: Sequence[tuple[Stream, Member]], make_room: MakeRoom
    ) -> list[tuple[Stream, Member]]:
        """Returns the parts of those that find room for all that they may emit."""
        found = []
        for stream, member in parts:
            drafts = member.num_draft_tokens and not member.is_copied
            if drafts and not self._drafts.keeps_draft(stream, member.num_positions):
                found.append(self._part(stream, PLAIN))
            else:
                found.append((stream, member))
        for stream, member in found:
            if not stream.has_left:
                make_room(stream.running, member.num_positions)
        return [(stream, member) for stream, member in found if not stream.has_left]

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
            assert stream.take() is member
            if stream.has_left:
                continue
            if result.token_ids is not None:
                self._count(stream, member, len(result.token_ids))
            taken.append(StreamRound(stream.running, member, result))
        return taken

    def _count(self, stream: Stream, member: Member, num_tokens: int) -> None:
        """Counts what the engines have cached by a round that emitted so many tokens."""
        running = stream.running
        self._target.skip(running.target_sequence, num_tokens)
        if member.num_draft_tokens and not member.is_copied and stream.has_draft:
            # The draft read all of the text and of its own tokens, but the last of those; or in one
            # pass none of them.
            is_parallel = self._options.parallel is not None
            num_new = min(1 if is_parallel else member.num_draft_tokens, num_tokens)
            self._drafting.skip_to(running, len(running.state.token_ids) - 1 + num_new)

    def _next(self, num_beside: int) -> _UnderWay:
        """Returns the round to launch; those go first that have waited the longest."""
        num_decoding = len(self._streams) + num_beside
        most = most_draft_tokens(self._options.schedule, num_decoding)
        waiting = [
            s for s in self._streams.values() if not s.is_sure_to_end and s not in self._readings
        ]
        streams: list[Stream] = []
        shares: list[Share] = []
        longest = 0
        for stream in sorted(waiting, key=attrgetter("last_round")):
            length = self._drafts.fixed_length(stream, most)
            if length is None:
                continue
            longer = max(longest, length)
            if not longer or longer <= self._rounds.most_draft_tokens(len(streams) + 1):
                streams.append(stream)
                shares.append(Share(length) if length else PLAIN)
                longest = longer
        is_trial = self._drafts.adapt(
            streams,
            shares,
            most,
            is_trial_under_way=any(under_way.is_trial for under_way in self._under_way),
        )
        parts = [self._part(*part) for part in zip(streams, shares, strict=True)]
        return _UnderWay(parts, is_trial)

    def _begins(self, stream: Stream) -> bool:
        """Returns whether a request may begin without draft tokens: it names no other number, and
        nobody has to give way for it.
        """
        if stream.state.drafts.is_speculative and self._drafts.is_fixed(stream.running):
            return False
        pages, num_tokens = self._target.pages, len(stream.state.token_ids) + 1
        return pages is None or pages.grow(stream.running.target_sequence, num_tokens)

    def _part(self, stream: Stream, share: Share) -> tuple[Stream, Member]:
        num_draft_tokens, is_copied = share
        num_positions = len(stream.state.token_ids) + stream.most_ahead + num_draft_tokens + 1
        sequence = stream.running.target_sequence
        return stream, Member(sequence, num_draft_tokens, num_positions, is_copied)
