"""A pair of two engines: continuous batching, chunked prefill and the draft-verify round.

It knows nothing of tensors: engines return logits and a sampler reads them, whatever array they
are. B requests in a step, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

from specpipe.machine.callables import Clock
from specpipe.roles import Role
from specpipe.runtimes.pair.admission import Waiting
from specpipe.runtimes.pair.costs import CostTable
from specpipe.runtimes.pair.drafting import Drafting, RunningSequences
from specpipe.runtimes.pair.engine import Engine
from specpipe.runtimes.pair.features import FEATURES
from specpipe.runtimes.pair.pace import Pace
from specpipe.runtimes.pair.pair import (
    DetokenizerFactory,
    LateWork,
    Occupancy,
    PairOptions,
)
from specpipe.runtimes.pair.preemption import TargetMemory, youngest
from specpipe.runtimes.pair.prompt_reading import PromptReader
from specpipe.runtimes.pair.queued_pair import QueuedPair
from specpipe.runtimes.pair.rounds import Rounds
from specpipe.runtimes.pair.sampler import Sampler
from specpipe.runtimes.pair.scheduling import Gathering, Piece, num_uncached, schedule
from specpipe.runtimes.pair.single_steps import SingleSteps, Verified
from specpipe.runtimes.pair.streams import StreamRound, Streams
from specpipe.speculative.adaptive import Prior
from specpipe.speculative.decode import UNUSABLE_LOGITS
from specpipe.speculative.guide import Guides
from specpipe.speculative.lookup import CopyOdds
from specpipe.speculative.request import Chunk, Request, RequestLimits

_HONOURED = tuple(name for name in FEATURES if name != "guided_decoding_guide")
"""Without reuse a salt has nothing to do."""


class EnginePair(QueuedPair[RunningSequences]):
    """The `Pair` of runtimes that run both engines themselves.

    A step gives each running request one draft-verify round. A request whose prompt is not yet
    cached gets at most what is left of max_num_tokens instead, so that a long prompt does not stall
    the others. Where the device makes rounds by itself it has those of all requests that want no
    more than rounds give, and the others go on step by step beside them.
    """

    def __init__(
        self,
        draft: Engine,
        target: Engine,
        sampler: Sampler,
        options: PairOptions,
        detokenizer: DetokenizerFactory,
        *,
        costs: CostTable | None = None,
        rounds: Rounds | None = None,
        guides: Guides | None = None,
        clock: Clock = time.monotonic,
        late_work: Callable[[], LateWork] = LateWork,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """costs decides the draft length of adaptive requests; None keeps it fixed.

        rounds are how all run that can; None: step by step.
        guides are of the pair's tokenizer; None: requests have none.
        late_work tells what the engines had to make ready while requests waited.
        on_close gives back what the engines hold outside this process's own memory.
        """
        self.costs = costs if options.adaptive else None
        limits = RequestLimits(
            max_num_draft_tokens=options.num_draft_tokens,
            max_seq_len=min(options.max_seq_len, target.max_seq_len),
            draft_max_seq_len=draft.max_seq_len,
            vocab_size=min(draft.vocab_size, target.vocab_size),
        )
        copy_odds = CopyOdds() if options.prompt_lookup and self.costs is not None else None
        super().__init__(
            options,
            limits,
            detokenizer,
            max_batch_size=min(options.max_batch_size, target.max_batch_size),
            honours=_HONOURED,
            guides=guides,
            prior=None if rounds is None else Prior(),
            copy_odds=copy_odds,
            clock=clock,
        )
        self._draft, self._target, self._sampler = draft, target, sampler
        self._memory = TargetMemory(target, limits.max_seq_len, reuses=options.prefix_reuse)
        self._pace = Pace(None if rounds is None else rounds.draft_prompt_costs)
        self._drafting = Drafting(draft, sampler, options, self.costs, self._pace)
        self._steps = SingleSteps(draft, target, sampler, self._drafting, self.costs)
        self._late_work, self._on_close = late_work, on_close
        self._gathering = Gathering()
        self._streams: Streams | None = None
        if rounds is not None:
            self._reader = PromptReader(target, self._drafting, self._pace, rounds.prompts)
            self._streams = Streams(
                rounds,
                self._drafting,
                target,
                options,
                is_adaptive=self.costs is not None,
                copy_odds=copy_odds,
            )

    @property
    def engines(self) -> dict[Role, Engine]:
        """Both engines, which may be timed while no request runs."""
        return {"draft": self._draft, "target": self._target}

    @property
    def is_parallel(self) -> bool:
        """Whether the draft proposes all of its tokens in one pass."""
        return self._options.parallel is not None

    def step(self) -> list[Chunk]:
        self._end_overdue()
        self._admit()
        self._end_scored()
        if self._running:
            self._round()
            self.num_steps += 1
        return self._take_chunks()

    def interrupt(self) -> None:
        """Does nothing: a step does not wait."""

    def close(self) -> None:
        if self._streams is not None:
            self._streams.close()
        self._on_close()

    def occupancy(self) -> Occupancy:
        of_target = sum(self._target.length(r.target_sequence) for r in self._running)
        of_draft = sum(self._drafting.num_cached(r) for r in self._running)
        rooms = self._memory.room, self._drafting.room
        return replace(
            super().occupancy(),
            kv_caches={"target": rooms[0].use(of_target), "draft": rooms[1].use(of_draft)},
            late_work=self._late_work(),
            preempted=self._memory.preempted,
        )

    def _adapts(self, request: Request) -> bool:
        return self.costs is not None

    def _waits_for_others(self, waiting: Waiting) -> bool:
        return self._memory.is_being_read(waiting, self._running)

    def _start(self, waiting: Waiting) -> bool:
        sequence = self._memory.make(waiting, self._running)
        if sequence is None:
            return False
        running = RunningSequences(self._state_of(waiting), waiting.deadline, sequence, waiting)
        self._memory.start(running)
        insort(self._running, running, key=attrgetter("waiting"))
        return True

    def _make_room(self, running: RunningSequences, num_tokens: int) -> None:
        """Lets the target have so many tokens of a request, for which the youngest gives way."""
        room = self._memory.room
        while not (running.gave_way or room.grow(running.target_sequence, num_tokens)):
            leaving = youngest(self._running, running)
            self._waiting.put_back(self._memory.give_way(leaving))
            self._running.remove(leaving)
            self._free(leaving)

    def _free(self, running: RunningSequences) -> None:
        if self._streams is not None:
            self._streams.leave(running)
        self._target.free(running.target_sequence)
        self._drafting.free(running)

    def _round(self) -> None:
        """Gives every request a part of its prompt, or a round."""
        if self._streams is None:
            self._step_by_step(*schedule(self._running, self._target, self._options))
            return
        self._streams.part()
        self._streams.join(self._running)
        others = self._others(self._streams)
        decoding, prefill = schedule(
            others, self._target, self._options, joins=self._streams.can_run
        )
        # Where the draft may turn out not to pay it reads nothing before it is asked for.
        pieces = [piece for piece in prefill if not piece.is_scored]
        along = [p.running for p in pieces if self._streams.reads_along(p.running)]
        self._reader.begin(pieces, along)
        self._streams.join(others)
        decoding = [r for r in decoding if r not in self._streams]
        self._streams.launch(len(decoding), self._make_room)
        for taken in self._streams.take():
            self._take_round(taken)
        # Behind the next round, so that the device was busy while the host took in the last one.
        scored = [piece for piece in prefill if piece.is_scored]
        if decoding or scored:
            self._step_by_step(decoding, scored, num_beside=len(self._streams))

    def _others(self, streams: Streams) -> list[RunningSequences]:
        """Goes on with prompts; returns those that this step has more work for, besides rounds."""
        others = []
        if len(streams) < len(self._running):
            others = [r for r in self._running if r not in streams]
        num_reading = sum(num_uncached(r, self._target) > 1 for r in others)
        self._pace.begin(
            streams.round_seconds,
            num_reading=num_reading,
            num_decoding=len(self._running) - num_reading,
        )
        self._reader.go_on()
        others = [r for r in others if r not in self._reader]
        new = [
            r
            for r in others
            if len(r.state.token_ids) - r.num_reused > 1
            and self._target.length(r.target_sequence) == r.num_reused
        ]
        num_tokens = [len(r.state.token_ids) - r.num_reused for r in new]
        is_busy = self._reader.is_busy
        if self._gathering.holds(num_tokens, len(streams), self._options, is_busy=is_busy):
            return [r for r in others if r not in new]
        return others

    def _step_by_step(
        self,
        decoding: Sequence[RunningSequences],
        prefill: Sequence[Piece],
        *,
        num_beside: int = 0,
    ) -> None:
        for running in decoding:
            num_tokens = len(running.state.token_ids) + self._options.num_draft_tokens
            self._make_room(running, num_tokens)
        decoding = [r for r in decoding if not r.gave_way]
        prefill = [piece for piece in prefill if not piece.running.gave_way]
        if not decoding and not prefill:
            return
        stepped = self._steps.run(decoding, prefill, num_beside=num_beside)
        for running in stepped.failed:
            self._end(running, "error", UNUSABLE_LOGITS)
        for verified in stepped.verified:
            self._take(verified)

    def _take_round(self, taken: StreamRound) -> None:
        """Hands what a round said of a request to it."""
        running, member, result = taken.running, taken.member, taken.result
        state = running.state
        if result.token_ids is None and not member.num_draft_tokens:
            self._end(running, "error", UNUSABLE_LOGITS)
            return
        if result.token_ids is None:
            running.is_draft_suspect = True
            return
        if member.num_draft_tokens and not result.num_draft_tokens:
            state.drafts.skip("draft_failed")
        chunk = state.accept(
            result.token_ids, num_draft_tokens=result.num_draft_tokens, is_copied=member.is_copied
        )
        self._emit(running, chunk)

    def _end_scored(self) -> None:
        """Ends requests that ask for the log-probabilities of their prompt alone, and have them."""
        for running in list(self._running):
            state = running.state
            if state.request.max_tokens == 0 and not state.num_unscored_tokens:
                self._end(running, "length")

    def _take(self, verified: Verified) -> None:
        """Hands the result to the request and cuts both caches back to what it accepted."""
        running, drafted, result = verified.running, verified.drafted, verified.result
        state = running.state
        num_before = len(state.token_ids)
        if result.token_ids is None and not drafted.token_ids:
            fault = None if state.matcher is None else state.matcher.fault
            error = UNUSABLE_LOGITS if fault is None else f"guided_decoding_guide: {fault}"
            self._end(running, "error", error)
            return
        if result.token_ids is None:
            # Attention gives later positions the weight 0, but 0 times the NaN of a draft token's
            # values is NaN: only a step without draft tokens shows what the target scores.
            running.is_draft_suspect = True
            self._steps.cut_back(verified, num_before - 1)
            return
        if drafted.token_ids and not result.num_draft_tokens:
            state.drafts.skip("draft_failed")
        chunk = state.accept(
            result.token_ids,
            result.log_probs,
            result.top_log_probs,
            num_draft_tokens=result.num_draft_tokens,
            is_copied=drafted.is_copied,
            is_predicted=drafted.is_predicted,
            forced=drafted.forced,
        )
        self._emit(running, chunk)
        if chunk.finish_reason is None:
            self._steps.cut_back(verified, num_before + len(result.token_ids) - 1)

    def _leave(self, running: RunningSequences, chunk: Chunk) -> None:
        self._free(running)
        super()._leave(running, chunk)
