"""A pair of two engines: continuous batching, chunked prefill and the draft-verify round.

It knows nothing of tensors: engines return logits and a sampler reads them, whatever array they
are. B requests in a step, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from specpipe.machine.callables import Clock
from specpipe.roles import Role
from specpipe.runtimes.pair.admission import Waiting
from specpipe.runtimes.pair.costs import CostTable, timed
from specpipe.runtimes.pair.drafting import Drafting, RunningSequences
from specpipe.runtimes.pair.engine import Engine, SequenceId
from specpipe.runtimes.pair.pair import (
    DetokenizerFactory,
    KVUse,
    LateWork,
    Occupancy,
    PairOptions,
)
from specpipe.runtimes.pair.queued_pair import QueuedPair
from specpipe.runtimes.pair.sampler import Drafted, RoundResult, Sampler
from specpipe.runtimes.pair.scheduling import schedule, score, uncached
from specpipe.runtimes.pair.single_stream import Rounds, SingleStream
from specpipe.speculative.adaptive import most_draft_tokens
from specpipe.speculative.decode import UNUSABLE_LOGITS
from specpipe.speculative.guide import Guides
from specpipe.speculative.request import Chunk, Request, RequestLimits

_HONOURED = ("logit_bias_ids", "num_top_log_probs", "return_prompt_log_probs", "prediction")
"""Of `FEATURES`."""


class EnginePair(QueuedPair[RunningSequences]):
    """The `Pair` of runtimes that run both engines themselves.

    A step gives each running request one draft-verify round. A request whose prompt is not yet
    cached gets at most what is left of max_num_tokens instead, so that a long prompt does not stall
    the others.
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

        rounds are how a request runs while it runs alone; None: as any other does.
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
        super().__init__(
            options,
            limits,
            detokenizer,
            max_batch_size=min(options.max_batch_size, target.max_batch_size),
            has_lookup=options.prompt_lookup and self.costs is not None,
            honours=_HONOURED,
            guides=guides,
            clock=clock,
        )
        self._draft, self._target, self._sampler = draft, target, sampler
        self._drafting = Drafting(draft, sampler, options, self.costs)
        self._late_work, self._on_close = late_work, on_close
        self._stream: SingleStream | None = None
        if rounds is not None:
            self._stream = SingleStream(rounds, options, is_adaptive=self.costs is not None)

    @property
    def engines(self) -> dict[Role, Engine]:
        """Both engines, which may be timed while no request runs."""
        return {"draft": self._draft, "target": self._target}

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
        self._on_close()

    def occupancy(self) -> Occupancy:
        """Returns what the pair holds; a sequence keeps all positions of its slot to its end."""
        num_tokens = {
            "target": sum(self._target.length(r.target_sequence) for r in self._running),
            "draft": sum(self._drafting.num_cached(r) for r in self._running),
        }
        kv_caches = {
            role: KVUse(num_tokens[role], engine.max_batch_size * engine.max_seq_len)
            for role, engine in self.engines.items()
        }
        return replace(super().occupancy(), kv_caches=kv_caches, late_work=self._late_work())

    def _adapts(self, request: Request) -> bool:
        return self.costs is not None

    def _has_room(self, request: Request) -> bool:
        return self._target.can_admit(self._max_tokens(request))

    def _start(self, waiting: Waiting) -> None:
        request = waiting.request
        sequence = self._target.allocate(
            prompt_length=len(request.prompt_token_ids), max_tokens=self._max_tokens(request)
        )
        state = self._new_state(waiting)
        self._running.append(RunningSequences(state, waiting.deadline, sequence))

    def _max_tokens(self, request: Request) -> int:
        """Returns the most tokens that the target may have to hold for a request."""
        return min(len(request.prompt_token_ids) + request.max_tokens, self._limits.max_seq_len)

    def _round(self) -> None:
        """Runs one forward of the target over all requests, and up to K of the draft before it."""
        if self._stream is not None:
            running = self._alone()
            if running is not None and len(uncached(running, self._target)) == 1:
                self._stream_step(self._stream, running)
                return
            self._stream.end()
        decoding, prefill = schedule(self._running, self._target, self._options)
        # The draft reads along while the target still reads the prompt.
        self._drafting.read_along(
            [(p.running, self._target.length(p.running.target_sequence)) for p in prefill]
        )
        drafted = self._drafted(decoding)
        batch: list[tuple[SequenceId, Sequence[int]]] = []
        num_logits = []
        for running, draft in zip(decoding, drafted, strict=True):
            unread = uncached(running, self._target)
            batch.append((running.target_sequence, [*unread, *draft.token_ids]))
            num_logits.append(len(draft.token_ids) + 1)
        num_verified = sum(num_logits)
        for piece in prefill:
            batch.append((piece.running.target_sequence, piece.token_ids))
            num_logits.append(len(piece.token_ids) if piece.is_scored else 0)
        num_cached = [self._drafting.num_cached(r) for r in decoding]
        num_rows = len(num_logits) * max(num_logits)
        with timed(self.costs, "target", None if prefill else num_rows):
            logits = self._target.forward(batch, num_logits)
            results = self._sampler.verify(logits[:num_verified], drafted) if decoding else []
        for running in score(prefill, logits[num_verified:], self._sampler):
            self._end(running, "error", UNUSABLE_LOGITS)
        for verified in zip(decoding, drafted, results, num_cached, strict=True):
            self._take(*verified)

    def _alone(self) -> RunningSequences | None:
        """Returns the request that runs alone, if the device can run it by itself."""
        if len(self._running) != 1:
            return None
        running = self._running[0]
        if running.is_draft_suspect or not SingleStream.can_run(running.state):
            return None
        return running

    def _drafted(self, decoding: Sequence[RunningSequences]) -> list[Drafted]:
        """Returns the draft tokens of those that decode in this step, in their order."""
        streams = self._stream is not None and self.costs is not None
        alone = self._alone() if streams else None
        if alone is None or alone.state.drafts.names_draft_length:
            return self._drafting.draft(decoding)
        # This step is that of a prompt: its token need not wait for the draft, which reads the
        # prompt while the device is busy with the rounds that come next.
        most = most_draft_tokens(self._options.schedule, len(decoding))
        alone.state.drafts.skip("not_ready", most=most)
        return [Drafted(r.state) for r in decoding]

    def _stream_step(self, stream: SingleStream, running: RunningSequences) -> None:
        """Takes in a round of a request that the device runs by itself."""
        state = running.state
        if not stream.runs(state):
            stream.end()
            fits_draft = len(state.token_ids) <= self._draft.max_seq_len
            may_draft = stream.may_draft(state) and fits_draft
            draft_sequence = self._drafting.sequence(running) if may_draft else None
            # Rounds want all of the text but its last two tokens.
            num_unread = len(state.token_ids) - self._drafting.num_cached(running)
            is_behind = draft_sequence is not None and num_unread > 2
            stream.begin(
                state,
                target_sequence=running.target_sequence,
                draft_sequence=draft_sequence,
                reads_meanwhile=is_behind,
            )
            if is_behind:
                self._drafting.catch_up(running)
        taken = stream.step()
        result = taken.result
        if result.token_ids is None:
            stream.end()
            if taken.num_drafted:
                running.is_draft_suspect = True
            else:
                self._end(running, "error", UNUSABLE_LOGITS)
            return
        if taken.num_drafted and not result.num_draft_tokens:
            state.drafts.skip("draft_failed")
        self._target.skip(running.target_sequence, len(result.token_ids))
        if taken.num_draft_cached is not None and running.draft_sequence is not None:
            num_new = taken.num_draft_cached - self._drafting.num_cached(running)
            self._draft.skip(running.draft_sequence, num_new)
        chunk = state.accept(
            result.token_ids, num_draft_tokens=result.num_draft_tokens, is_copied=taken.is_copied
        )
        self._emit(running, chunk)

    def _end_scored(self) -> None:
        """Ends requests that ask for the log-probabilities of their prompt alone, and have them."""
        for running in list(self._running):
            state = running.state
            if state.request.max_tokens == 0 and not state.num_unscored_tokens:
                self._end(running, "length")

    def _take(
        self,
        running: RunningSequences,
        drafted: Drafted,
        result: RoundResult,
        num_draft_cached: int,
    ) -> None:
        """Hands the result to the request and cuts both caches back to what it accepted."""
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
            self._cut_back(running, num_before - 1, num_draft_cached)
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
            self._cut_back(running, num_before + len(result.token_ids) - 1, num_draft_cached)

    def _cut_back(self, running: RunningSequences, num_valid: int, num_draft_cached: int) -> None:
        """Forgets what both caches hold beyond the first num_valid tokens."""
        self._target.truncate(running.target_sequence, num_valid)
        if running.draft_sequence is not None and num_draft_cached > num_valid:
            self._draft.truncate(running.draft_sequence, num_valid)

    def _leave(self, running: RunningSequences, chunk: Chunk) -> None:
        if self._stream is not None and self._stream.runs(running.state):
            self._stream.end()
        super()._leave(running, chunk)
        self._target.free(running.target_sequence)
        if running.draft_sequence is not None:
            self._draft.free(running.draft_sequence)
