"""The draft's part of a step: who drafts, how many tokens, and the forwards that give them.

B requests that decode in a step, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specpipe.runtimes.pair.admission import Waiting
from specpipe.runtimes.pair.costs import CostTable
from specpipe.runtimes.pair.engine import Engine, SequenceId
from specpipe.runtimes.pair.pace import Pace
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.proposals import (
    Proposal,
    draft_in_pass,
    draft_in_steps,
    worthwhile,
)
from specpipe.runtimes.pair.queued_pair import Running
from specpipe.runtimes.pair.room import Room
from specpipe.runtimes.pair.sampler import Drafted, Sampler
from specpipe.speculative.adaptive import StepCosts, most_draft_tokens


@dataclass(eq=False)
class RunningSequences(Running):
    """A request that runs, with its sequence in each engine.

    waiting     as what it waited, and will again if it has to give way
    num_begun   tokens of its text when it was started
    num_reused  those that the target then had cached
    gave_way    it waits again, and has no sequences any more
    """

    target_sequence: SequenceId
    waiting: Waiting
    num_begun: int = 0
    num_reused: int = 0
    gave_way: bool = False
    draft_sequence: SequenceId | None = None
    is_draft_suspect: bool = False
    """The last step gave no usable row; the next shows whether its draft tokens were to blame."""

    @property
    def has_gone_on(self) -> bool:
        """Whether it has more tokens than when it gave way, if it ever did."""
        return self.waiting.state is None or len(self.state.token_ids) > self.num_begun


class Drafting:
    """The draft engine of a pair and its sequences.

    Requests get a sequence when they are first to draft, and those that do not draft learn why.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        options: PairOptions,
        costs: CostTable | None,
        pace: Pace | None = None,
    ) -> None:
        """costs decides the draft length of adaptive requests; None keeps it fixed.

        pace  bounds what is read of prompts in a step; None: max_num_tokens do
        """
        self._engine, self._sampler = engine, sampler
        self._options, self._costs = options, costs
        self._pace = Pace() if pace is None else pace
        self.room = Room(engine, max_seq_len=engine.max_seq_len, reuses=options.prefix_reuse)
        self._num_sequences = 0

    def num_cached(self, running: RunningSequences) -> int:
        """Returns how many tokens of a request the draft has cached."""
        if running.draft_sequence is None:
            return 0
        return self._engine.length(running.draft_sequence)

    def has_room(self, running: RunningSequences) -> bool:
        """Returns whether a request has a sequence or can have one."""
        if running.draft_sequence is not None:
            return True
        state = running.state
        return self.room.holds(state.request, len(state.token_ids), num_beside=self._num_beside)

    @property
    def has_room_for_any(self) -> bool:
        """Whether a request has room for a sequence, however long it is."""
        return self.room.holds_any(num_beside=self._num_beside)

    @property
    def _num_beside(self) -> int:
        """Positions that those that have a sequence are about to take."""
        return Room.AHEAD * self._num_sequences

    def sequence(self, running: RunningSequences) -> SequenceId | None:
        """Returns a request's sequence, made when first needed, with room for its next step.

        None when there is no room; then it has none any more.
        """
        request, num_tokens = running.state.request, len(running.state.token_ids)
        if running.draft_sequence is None and self.has_room(running):
            running.draft_sequence = self.room.make(
                request, num_tokens, num_beside=self._num_beside
            )
            self._num_sequences += running.draft_sequence is not None
        if running.draft_sequence is not None:
            self.grow(running, num_tokens + self._options.num_draft_tokens)
        return running.draft_sequence

    def grow(self, running: RunningSequences, num_tokens: int) -> bool:
        """Lets a request's sequence have so many tokens.

        Where there is no room for them it is freed, for others to draft more.
        """
        sequence = running.draft_sequence
        assert sequence is not None
        if self.room.grow(sequence, num_tokens):
            return True
        running.state.drafts.skip("no_room")
        self.free(running)
        return False

    def free(self, running: RunningSequences) -> None:
        """Frees a request's sequence, if it has one."""
        if running.draft_sequence is not None:
            self._engine.free(running.draft_sequence)
            running.draft_sequence = None
            self._num_sequences -= 1

    def read_along(
        self, prefill: Iterable[tuple[RunningSequences, int]], *, may_wait: bool = False
    ) -> bool:
        """Reads prompts of which the target has cached that many tokens, and a piece of no more
        than max_num_tokens further.

        may_wait  for a step that has time for it, by the pace of prompts: then False is returned
        """
        batch = []
        for running, num_target_cached in prefill:
            can_draft = running.state.drafts.is_speculative and running.state.request.max_tokens > 1
            if not can_draft or (sequence := self.sequence(running)) is None:
                continue
            token_ids = running.state.token_ids
            end = num_target_cached + self._options.max_num_tokens
            # The last token stays for the first draft step, which needs a row to score.
            end = min(end, self._engine.max_seq_len, len(token_ids) - 1)
            piece = token_ids[self.num_cached(running) : end]
            if piece:
                batch.append((sequence, piece[: self._options.max_num_tokens]))
        if may_wait and batch and not self._pace.allows_draft(*self._size(batch)):
            return False
        self._read(batch)
        return True

    def read(self, requests: Sequence[RunningSequences]) -> list[RunningSequences]:
        """Reads texts but for their last tokens, no more in all than the pace of prompts allows.

        Returns those of which nothing else is left.
        """
        batch, read = [], []
        start = max(map(self.num_cached, requests), default=0)
        num_tokens = self._pace.most_drafts_tokens(self._options.max_num_tokens, start)
        for running in requests:
            sequence = self.sequence(running)
            if sequence is None:
                running.state.drafts.skip("no_room")
                continue
            unread = running.state.token_ids[self.num_cached(running) : -1]
            piece = unread[:num_tokens]
            num_tokens -= len(piece)
            if piece:
                batch.append((sequence, piece))
            if len(piece) == len(unread):
                read.append(running)
        self._read(batch)
        return read

    def _read(self, batch: Sequence[tuple[SequenceId, Sequence[int]]]) -> None:
        if batch:
            self._pace.spend_on_draft(*self._size(batch))
            self._engine.forward(batch, [0] * len(batch))

    def _size(self, batch: Sequence[tuple[SequenceId, Sequence[int]]]) -> tuple[int, int]:
        """Returns how many tokens are to be read, and how many positions they look back at."""
        lengths = [(self._engine.length(sequence), len(tokens)) for sequence, tokens in batch]
        num_looks = sum(num * start + num * (num - 1) // 2 for start, num in lengths)
        return sum(num for _, num in lengths), num_looks

    def catch_up(self, running: RunningSequences) -> bool:
        """Reads all of a text but its last token; False where there is no room for it."""
        while self.sequence(running) is not None:
            if self.read([running]):
                return True
        return False

    def skip_to(self, running: RunningSequences, num_cached: int) -> None:
        """Takes as many tokens of a request as cached, which rounds have cached."""
        assert running.draft_sequence is not None
        self._engine.skip(running.draft_sequence, num_cached - self.num_cached(running))

    def draft(self, decoding: Sequence[RunningSequences], *, num_beside: int = 0) -> list[Drafted]:
        """Returns the draft tokens of those that decode in this step, in their order.

        num_beside  others that decode meanwhile, so that the time of a forward says nothing
        """
        batch_size = len(decoding)
        most = most_draft_tokens(self._options.schedule, batch_size + num_beside)
        costs = self._costs.at(batch_size) if self._costs is not None and decoding else None
        drafted = [self._copy(r, costs, most) for r in decoding]
        copied = [d for d in drafted if d.is_copied]
        proposals, late = self._propose(decoding, drafted, costs, most)
        if self._costs is not None and decoding:
            if batch_size > 1:
                proposals = worthwhile(proposals, copied, self._costs, batch_size)
            if not proposals and not copied and most != 0:
                self._costs.favour_draft()
        if late:
            self._engine.forward(late, [0] * len(late))
        self._run(proposals, None if num_beside else self._costs)
        return drafted

    def _copy(
        self, running: RunningSequences, costs: StepCosts | None, most: int | None
    ) -> Drafted:
        """Returns draft tokens that the request's guide forces, or from its prediction or its own
        text; none where none pay more than drafting.
        """
        state = running.state
        drafted = Drafted(state)
        if running.is_draft_suspect or drafted.add_forced():
            return drafted
        copying = None if costs is None else costs.copying
        predicted = state.drafts.predict(copying, costs, most=most)
        if predicted:
            return Drafted(state, predicted, is_copied=True, is_predicted=True)
        if copying is None:
            return drafted
        num_copied = state.drafts.next_num_copied_tokens(copying, costs, most=most)
        copied = state.drafts.copy(num_copied) if num_copied else []
        return Drafted(state, copied, is_copied=bool(copied))

    def _propose(
        self,
        decoding: Sequence[RunningSequences],
        drafted: Sequence[Drafted],
        costs: StepCosts | None,
        most: int | None,
    ) -> tuple[list[Proposal], list[tuple[SequenceId, list[int]]]]:
        """Returns who would draft how many tokens, and pieces of text for those too far behind."""
        proposals = []
        late = []
        for running, draft in zip(decoding, drafted, strict=True):
            state = running.state
            if draft.is_copied:
                continue
            if running.is_draft_suspect:
                running.is_draft_suspect = False
                state.drafts.skip("draft_failed", most=most)
                continue
            num_draft_tokens = state.drafts.num_after_forced(len(draft.forced), costs, most=most)
            if num_draft_tokens == 0:
                continue
            sequence = self.sequence(running)
            if sequence is None:
                state.drafts.skip("no_room")
                continue
            unread = state.token_ids[self.num_cached(running) :]
            if len(unread) > self._options.max_num_tokens:
                state.drafts.skip("not_ready")
                late.append((sequence, unread[: self._options.max_num_tokens]))
            else:
                unread += draft.token_ids
                if self._options.parallel is not None:  # masks are read, too
                    num_left = self._options.max_num_tokens - len(unread)
                    num_draft_tokens = min(num_draft_tokens, max(num_left, 0) + 1)
                proposals.append(Proposal(sequence, draft, num_draft_tokens, unread))
        return proposals, late

    def _run(self, proposals: Sequence[Proposal], costs: CostTable | None) -> None:
        parallel = self._options.parallel
        if parallel is None:
            draft_in_steps(proposals, self._engine, self._sampler, costs)
        else:
            draft_in_pass(
                proposals,
                self._engine,
                self._sampler,
                costs,
                mask_token_id=parallel.mask_token_id,
            )
