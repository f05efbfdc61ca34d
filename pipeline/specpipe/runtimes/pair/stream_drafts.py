"""What the requests of a round draft, or copy, and when the draft reads their texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specpipe.runtimes.pair.drafting import Drafting, RunningSequences
from specpipe.runtimes.pair.rounds import Member, Rounds
from specpipe.speculative.adaptive import StepCosts, can_pay, promise
from specpipe.speculative.batch_draft_length import BatchDraftLength, Candidate
from specpipe.speculative.lookup import CopyOdds
from specpipe.speculative.state import RequestState


@dataclass(eq=False)
class Stream:
    """A request that has joined.

    has_draft   the draft has its text
    under_way   its part in rounds under way, the oldest first
    most_ahead  the most tokens that those emit
    last_round  the number of the last that it was in
    has_left    what rounds under way say of it counts for nothing
    """

    running: RunningSequences
    has_draft: bool = False
    under_way: deque[Member] = field(default_factory=deque)
    most_ahead: int = 0
    last_round: int = 0
    has_left: bool = False

    def __post_init__(self) -> None:
        self.state: RequestState = self.running.state

    @property
    def may_get_draft(self) -> bool:
        """Whether no round under way drafts with a sequence that it has lost."""
        for member in self.under_way:  # rather than any(): it is asked of many in each round
            if member.num_draft_tokens and not member.is_copied:
                return False
        return True

    @property
    def is_sure_to_end(self) -> bool:
        """Whether the rounds under way, of one token at least, emit all that is wanted."""
        return self.state.num_tokens_left <= len(self.under_way)

    def launch(self, member: Member) -> None:
        """Takes note of a round with this part of it."""
        self.under_way.append(member)
        self.most_ahead += member.num_draft_tokens + 1

    def take(self) -> Member:
        """Returns its part in the oldest round, which has been taken."""
        member = self.under_way.popleft()
        self.most_ahead -= member.num_draft_tokens + 1
        return member


_RESTS_FROM = 16
"""Requests for each round that may pass, where nothing pays, before that is asked again: going
through many takes the host as long as a part of a round.
"""


class Share(NamedTuple):
    """What a request has of a round: so many draft tokens, of its text if is_copied."""

    num_draft_tokens: int
    is_copied: bool = False


PLAIN = Share(0)
"""That of a request without draft tokens."""


class StreamDrafts:
    """Chooses the draft lengths of rounds, and whose draft tokens are copied from their texts.

    Requests that name theirs, or all where nothing adapts, draft from their first round on. Of the
    others the draft reads nothing before it is to draft for them; it reads while rounds go on.
    """

    def __init__(
        self,
        rounds: Rounds,
        drafting: Drafting,
        *,
        is_adaptive: bool,
        copy_odds: CopyOdds | None,
    ) -> None:
        """copy_odds  of draft tokens that are copied; None: none are"""
        self._rounds, self._drafting, self._copy_odds = rounds, drafting, copy_odds
        costs = rounds.costs(1) if is_adaptive else None
        self._is_adaptive = costs is not None
        self._length = BatchDraftLength()
        self._num_resting = 0
        self._unread: dict[Stream, None] = {}  # that the draft is to read, in this order

    def is_fixed(self, running: RunningSequences) -> bool:
        """Returns whether the draft length of a request is not ours to choose."""
        return not self._is_adaptive or running.state.drafts.names_draft_length

    def holds(self, running: RunningSequences) -> bool:
        """Returns whether rounds have as many draft tokens as a request is to have."""
        most = running.state.drafts.max_num_draft_tokens
        return not self.is_fixed(running) or most <= self._rounds.most_draft_tokens(1)

    def fixed_length(self, stream: Stream, most: int | None) -> int | None:
        """Returns the draft length of a request where that is not ours to choose, else 0.

        None where it may be less when the rounds under way are taken: so it is near the end of a
        text. Where the accept test rejects draft tokens, what is drawn depends on which tokens are
        drafted: those must be the same ones as in single steps.
        """
        drafts = stream.state.drafts
        if not drafts.is_speculative or not self.is_fixed(stream.running):
            return 0
        length = drafts.next_num_draft_tokens(most=most)
        if length and not stream.has_draft:
            if stream.may_get_draft and self._drafting.catch_up(stream.running):
                self._give_draft(stream)
            else:
                drafts.skip("no_room")
        if not stream.has_draft:
            return 0
        if drafts.next_num_draft_tokens(most=most, num_ahead=stream.most_ahead) != length:
            return None
        return length

    def adapt(
        self,
        streams: Sequence[Stream],
        shares: list[Share],
        most: int | None,
        *,
        is_trial_under_way: bool,
    ) -> bool:
        """Sets the shares that are ours to choose; returns whether they are a trial."""
        num_members = len(streams)
        most_of_round = self._rounds.most_draft_tokens(num_members) if streams else 0
        copying = self._copying(num_members, most_of_round)
        if self._num_resting and copying is None and most_of_round:
            self._num_resting -= 1
            self._length.rest()
            most_of_round = 0
        copied = self._copied(streams) if copying is not None else {}
        costs = self._rounds.costs(num_members) if self._is_adaptive and streams else None
        has_room = bool(most_of_round) and self._drafting.has_room_for_any
        candidates: dict[int, Candidate] = {}  # by place
        for place, stream in enumerate(streams):
            if self.is_fixed(stream.running):
                if place in copied and copying is not None and costs is not None:
                    shares[place] = self._copied_instead(
                        stream, shares[place], copied[place], most_of_round, copying, costs
                    )
            elif not most_of_round:  # soon said: there are many of them
                stream.state.drafts.skip("does_not_pay", most=most)
            elif candidate := self._candidate(
                stream, most, most_of_round, copied.get(place), has_room=has_room
            ):
                candidates[place] = candidate
        if costs is None or not candidates:
            return False
        packing = None
        if copying is not None and not any(share.num_draft_tokens for share in shares):
            packing = self._rounds.packing(num_members)
        choice = self._length.choose(
            list(candidates.values()),
            num_members - len(candidates),
            costs,
            copying=copying,
            packing=packing,
            draft_step=self._draft_step(costs),
            is_trial_under_way=is_trial_under_way,
        )
        if not (choice.who or choice.copied):
            self._num_resting = num_members // _RESTS_FROM
        who = set(choice.who)
        for number, (place, candidate) in enumerate(candidates.items()):
            stream = streams[place]
            is_ready = stream.has_draft or number not in who
            if not is_ready:
                self._unread[stream] = None
            if num_copied := choice.copied.get(number):
                shares[place] = Share(num_copied, is_copied=True)
            elif number not in who:
                stream.state.drafts.skip("does_not_pay")
            elif not is_ready:
                stream.state.drafts.skip("not_ready")
            else:
                shares[place] = Share(min(choice.num_draft_tokens, candidate.limit))
                if choice.is_trial:
                    candidate.draft_length.begin_trial()
        return choice.is_trial

    def _copying(self, num_members: int, most_of_round: int) -> StepCosts | None:
        """Returns what rounds of so many cost that copy; None where that can never pay."""
        if self._copy_odds is None or not most_of_round:
            return None
        costs = self._rounds.copy_costs(num_members)
        return costs if costs is not None and can_pay(most_of_round, costs) else None

    def _copied(self, streams: Sequence[Stream]) -> dict[int, npt.NDArray[np.float64]]:
        """Returns what those should emit that may copy, by place and the number of copied tokens.

        Of more than a request may copy it should emit what it does of the most that it may.
        The device copies what follows the text as it is then. Of that the host does not know yet
        what rounds under way emit.
        """
        assert self._copy_odds is not None
        places: list[int] = []
        limits: list[int] = []
        num_matched: list[int] = []
        num_ahead: list[int] = []
        for place, stream in enumerate(streams):
            drafts = stream.state.drafts
            if limit := drafts.copy_limit(len(stream.under_way)):
                places.append(place)
                limits.append(limit)
                num_matched.append(drafts.num_matched())
                num_ahead.append(stream.most_ahead)
        if not places:
            return {}
        most = min(max(limits), self._rounds.most_draft_tokens(1))
        expected = self._copy_odds.expected_tokens(num_matched, num_ahead, most)
        lengths = np.minimum(np.arange(most + 1), np.array(limits)[:, None])
        return dict(zip(places, np.take_along_axis(expected, lengths, axis=1), strict=True))

    def _copied_instead(
        self,
        stream: Stream,
        share: Share,
        copied: npt.NDArray[np.float64],
        most_of_round: int,
        copying: StepCosts,
        costs: StepCosts,
    ) -> Share:
        """Returns a request's share that names its draft length: it copies where that is better."""
        drafts, drafted = stream.state.drafts, share.num_draft_tokens
        limit = min(drafts.copy_limit(len(stream.under_way)), most_of_round)
        promised = 0.0
        if drafted and drafts.draft_length is not None:
            promised = promise(drafts.draft_length.acceptance_probability, drafted, costs)
        better = copied[limit] > promised * copying.time(limit)
        return Share(limit, is_copied=True) if better else share

    def _draft_step(self, costs: StepCosts) -> float:
        """Returns what a step of the draft for one request takes, in rounds of these costs."""
        alone = self._rounds.costs(1)
        assert alone is not None
        step = alone.time(1) - 1.0
        if alone.seconds is None or costs.seconds is None:
            return step
        return step * alone.seconds / costs.seconds

    def _candidate(
        self,
        stream: Stream,
        most: int | None,
        most_of_round: int,
        copied: npt.NDArray[np.float64] | None,
        *,
        has_room: bool,
    ) -> Candidate | None:
        """Returns what a request may draft and copy; None where it may neither.

        Where it may not draft it is told so.
        has_room  whether the draft has room for any request
        """
        running, drafts = stream.running, stream.state.drafts
        limit = drafts.next_num_draft_tokens(
            most=most, num_ahead=stream.most_ahead, num_sure=len(stream.under_way)
        )
        if limit and not (
            (stream.has_draft or stream.may_get_draft)
            and (has_room or self._drafting.has_room(running))
        ):
            drafts.skip("no_room")
            limit = 0
        if drafts.draft_length is None or not (limit or copied is not None):
            return None
        request = stream.state.request
        return Candidate(
            drafts.draft_length,
            min(limit, most_of_round),
            stream.has_draft,
            len(stream.state.token_ids) - self._drafting.num_cached(running),
            len(request.prompt_token_ids),
            request.max_tokens,
            (1.0,) if copied is None else copied,
        )

    def read(self) -> None:
        """Lets the draft read some of the texts that it lacks."""
        unread = {s.running: s for s in self._unread if not s.has_left and not s.has_draft}
        self._unread.clear()
        for running in self._drafting.read(list(unread)):
            self._give_draft(unread[running])

    def keeps_draft(self, stream: Stream, num_positions: int) -> bool:
        """Returns whether the draft of a request has room for so many tokens; else it is lost."""
        if self._drafting.grow(stream.running, num_positions):
            return True
        self._rounds.lose_draft(stream.running.target_sequence)
        stream.has_draft = False
        return False

    def _give_draft(self, stream: Stream) -> None:
        sequence = stream.running.draft_sequence
        assert sequence is not None
        self._rounds.give_draft(stream.running.target_sequence, sequence)
        stream.has_draft = True
