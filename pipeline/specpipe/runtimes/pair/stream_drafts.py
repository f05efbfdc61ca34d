"""What the requests of a round draft, or copy, and when the draft reads their texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specpipe.runtimes.pair.drafting import Drafting, RunningSequences
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.rounds import Member, Rounds
from specpipe.speculative.adaptive import StepCosts
from specpipe.speculative.batch_draft_length import BatchDraftLength, Candidate
from specpipe.speculative.state import RequestState


@dataclass(eq=False)
class Stream:
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
    def may_get_draft(self) -> bool:
        """Whether no round under way drafts with a sequence that it has lost."""
        return not any(m.num_draft_tokens and not m.is_copied for m in self.under_way)

    @property
    def is_sure_to_end(self) -> bool:
        """Whether the rounds under way, of one token at least, emit all that is wanted."""
        return self.state.num_tokens_left <= len(self.under_way)

    @property
    def most_ahead(self) -> int:
        """The most tokens that the rounds under way emit."""
        return sum(member.num_draft_tokens + 1 for member in self.under_way)


class StreamDrafts:
    """Chooses the draft lengths of rounds.

    Requests that name theirs, or all where nothing adapts, draft from their first round on. Of the
    others the draft reads nothing before it is to draft for them; it reads while rounds go on.
    """

    def __init__(
        self, rounds: Rounds, drafting: Drafting, options: PairOptions, *, is_adaptive: bool
    ) -> None:
        self._rounds, self._drafting, self._options = rounds, drafting, options
        costs = rounds.costs(1) if is_adaptive else None
        self._is_adaptive = costs is not None
        self._length = BatchDraftLength()
        self._unread: dict[Stream, None] = {}  # that the draft is to read, in this order

    def is_fixed(self, running: RunningSequences) -> bool:
        """Returns whether the draft length of a request is not ours to choose."""
        return not self._is_adaptive or running.state.drafts.names_draft_length

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
        return min(length, self._rounds.most_draft_tokens(1))

    def num_to_copy(self, stream: Stream, most: int | None) -> int:
        """Returns how many tokens a request that is alone copies in its next round."""
        copying = self._rounds.copy_costs(1) if self._is_adaptive else None
        if copying is None or not self._options.prompt_lookup:
            return 0
        drafting = self._rounds.costs(1) if stream.has_draft else None
        num_copied = stream.state.drafts.next_num_copied_tokens(copying, drafting, most=most)
        return min(num_copied, self._rounds.most_draft_tokens(1))

    def adapt(
        self,
        streams: Sequence[Stream],
        lengths: list[int],
        most: int | None,
        *,
        is_trial_under_way: bool,
    ) -> bool:
        """Sets the draft lengths that are ours to choose; returns whether they are a trial."""
        places: list[int] = []
        candidates: list[Candidate] = []
        most_of_round = self._rounds.most_draft_tokens(len(streams)) if streams else 0
        for place, stream in enumerate(streams):
            if self.is_fixed(stream.running):
                continue
            if not most_of_round:  # soon said: there are many of them
                stream.state.drafts.skip("does_not_pay", most=most)
            elif candidate := self._candidate(stream, most, most_of_round):
                places.append(place)
                candidates.append(candidate)
        costs = self._rounds.costs(len(streams)) if candidates else None
        if costs is None:
            return False
        choice = self._length.choose(
            candidates,
            len(streams) - len(candidates),
            costs,
            draft_step=self._draft_step(costs),
            is_trial_under_way=is_trial_under_way,
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

    def _draft_step(self, costs: StepCosts) -> float:
        """Returns what a step of the draft for one request takes, in rounds of these costs."""
        alone = self._rounds.costs(1)
        assert alone is not None
        step = alone.time(1) - 1.0
        if alone.seconds is None or costs.seconds is None:
            return step
        return step * alone.seconds / costs.seconds

    def _candidate(self, stream: Stream, most: int | None, most_of_round: int) -> Candidate | None:
        """Returns what a request may draft; None where it may not, which it is told."""
        drafts = stream.state.drafts
        limit = drafts.next_num_draft_tokens(
            most=most, num_ahead=stream.most_ahead, num_sure=len(stream.under_way)
        )
        if not limit or drafts.draft_length is None:
            return None
        may_have_draft = stream.has_draft or stream.may_get_draft
        if not may_have_draft or not self._drafting.has_room(stream.running):
            drafts.skip("no_room")
            return None
        request = stream.state.request
        return Candidate(
            drafts.draft_length,
            min(limit, most_of_round),
            stream.has_draft,
            num_unread=len(stream.state.token_ids) - self._drafting.num_cached(stream.running),
            num_read=len(request.prompt_token_ids),
            num_wanted=request.max_tokens,
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
