"""A pair of two engines: continuous batching, chunked prefill and the draft-verify round.

It knows nothing of tensors: engines return logits and a sampler reads them, whatever array they
are. B requests in a step, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from specpipe.runtimes.pair.admission import OVERDUE, Waiting, WaitingRequests
from specpipe.runtimes.pair.costs import CostTable, Role
from specpipe.runtimes.pair.engine import Engine, Logits, SequenceId
from specpipe.runtimes.pair.pair import DetokenizerFactory, KVUse, Occupancy, PairOptions
from specpipe.runtimes.pair.single_stream import Rounds, SingleStream
from specpipe.speculative.adaptive import MIN_GAIN, DraftLength, most_draft_tokens
from specpipe.speculative.decode import UNUSABLE_LOGITS
from specpipe.speculative.request import Chunk, Limits, Request
from specpipe.speculative.state import RequestState


@dataclass(frozen=True)
class Drafted:
    """The draft tokens of one request in one step, and what the accept test needs of their rows."""

    state: RequestState
    token_ids: list[int] = field(default_factory=list)
    probs: list[Any] = field(default_factory=list)
    """The probabilities [V] that each token was drawn from; empty for requests verified by
    matching.
    """
    is_copied: bool = False
    """The tokens are the text's own and not the draft's."""


@dataclass(frozen=True)
class Outcome:
    """What the verification of one request lets out; token_ids is None when the first row is
    unusable.
    """

    token_ids: Sequence[int] | None
    log_probs: Sequence[float] = ()
    num_draft_tokens: int = 0
    """Those that were judged: fewer than drafted when a later row was unusable."""


class Sampler(Protocol):
    """Chooses tokens from logits, for many requests at once."""

    def draft(self, logits: Logits, drafted: Sequence[Drafted]) -> list[bool]:
        """Adds one draft token to each request from its row of logits [B, V].

        False where there is none to be had (a NaN): the request drafts no further in this step.
        """

    def verify(self, logits: Logits, drafted: Sequence[Drafted]) -> list[Outcome]:
        """Runs the accept test of each request on its K + 1 rows of logits [sum(K + 1), V]."""


@dataclass(eq=False)
class _Running:
    state: RequestState
    deadline: float
    target_sequence: SequenceId
    draft_sequence: SequenceId | None = None
    is_draft_suspect: bool = False
    """The last step gave no usable row; the next shows whether its draft tokens were to blame."""


class EnginePair:
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
        clock: Callable[[], float] = time.monotonic,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """costs decides the draft length of adaptive requests; None keeps it fixed.

        rounds are how a request runs while it runs alone; None: as any other does.
        on_close gives back what the engines hold outside this process's own memory.
        """
        self._draft, self._target, self._sampler = draft, target, sampler
        self._options, self._detokenizer, self._clock = options, detokenizer, clock
        self._on_close = on_close
        self.costs = costs if options.adaptive else None
        self._copies = options.prompt_lookup and self.costs is not None
        self._stream: SingleStream | None = None
        if rounds is not None:
            self._stream = SingleStream(rounds, options, is_adaptive=self.costs is not None)
        self._limits = Limits(
            max_num_draft_tokens=options.num_draft_tokens,
            max_seq_len=min(options.max_seq_len, target.max_seq_len),
            draft_max_seq_len=draft.max_seq_len,
            vocab_size=min(draft.vocab_size, target.vocab_size),
        )
        self._max_batch_size = min(options.max_batch_size, target.max_batch_size)
        self._waiting = WaitingRequests(options, clock=clock)
        self._running: list[_Running] = []
        self._ended: list[Chunk] = []
        self.num_steps = 0

    @property
    def engines(self) -> dict[Role, Engine]:
        """Both engines, which may be timed while no request runs."""
        return {"draft": self._draft, "target": self._target}

    def submit(self, request: Request) -> str:
        self._limits.check(request)
        self._waiting.put(request, num_running=len(self._running))
        return request.request_id

    def cancel(self, request_id: str) -> None:
        for running in self._running:
            if running.state.request.request_id == request_id:
                self._end(running, running.state.finish("cancelled"))
                return
        waiting = self._waiting.take(request_id)
        if waiting is not None:
            self._ended.append(self._new_state(waiting).finish("cancelled"))

    def has_work(self) -> bool:
        return bool(self._running or len(self._waiting) or self._ended)

    def step(self) -> list[Chunk]:
        self._end_overdue()
        self._admit()
        if self._running:
            self._round()
            self.num_steps += 1
        chunks, self._ended = self._ended, []
        return chunks

    def interrupt(self) -> None:
        """Nothing to do: a step does not wait."""

    def close(self) -> None:
        self._on_close()

    def occupancy(self) -> Occupancy:
        """Positions of a sequence stay with it until it ends: an engine has slots for sequences."""
        tokens = {
            "target": sum(self._target.length(r.target_sequence) for r in self._running),
            "draft": sum(self._draft_length(r) for r in self._running),
        }
        return Occupancy(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_caches={
                role: KVUse(tokens[role], engine.max_batch_size * engine.max_seq_len)
                for role, engine in self.engines.items()
            },
        )

    def _end_overdue(self) -> None:
        now = self._clock()
        for running in [r for r in self._running if r.deadline <= now]:
            self._end(running, running.state.finish("error", OVERDUE))
        for waiting in self._waiting.take_overdue(now):
            state = self._new_state(waiting)
            self._ended.append(state.finish("error", waiting.overdue(now)))

    def _admit(self) -> None:
        while len(self._waiting) and len(self._running) < self._max_batch_size:
            request = self._waiting.first.request
            num_prompt = len(request.prompt_token_ids)
            max_tokens = min(num_prompt + request.max_tokens, self._limits.max_seq_len)
            if not self._target.can_admit(max_tokens):
                return
            waiting = self._waiting.pop()
            sequence = self._target.allocate(prompt_length=num_prompt, max_tokens=max_tokens)
            self._running.append(_Running(self._new_state(waiting), waiting.deadline, sequence))

    def _new_state(self, waiting: Waiting) -> RequestState:
        request = waiting.request
        return RequestState(
            request,
            self._limits,
            self._detokenizer(request.text_token_ids),
            draft_length=DraftLength() if self.costs is not None else None,
            has_lookup=self._copies,
            queue_s=waiting.waited_s(self._clock()),
        )

    def _round(self) -> None:
        """One forward of the target over all that runs, and up to K of the draft before it."""
        if self._stream is not None:
            running = self._alone()
            if running is not None and len(self._missing(running)) == 1:
                self._stream_step(self._stream, running)
                return
            self._stream.end()
        decoding, prefill = self._schedule()
        drafted = self._run_draft(decoding)
        batch: list[tuple[SequenceId, Sequence[int]]] = []
        num_logits = []
        for running, draft in zip(decoding, drafted, strict=True):
            batch.append((running.target_sequence, [*self._missing(running), *draft.token_ids]))
            num_logits.append(len(draft.token_ids) + 1)
        for running, token_ids in prefill:
            batch.append((running.target_sequence, token_ids))
            num_logits.append(0)
        num_cached = [self._draft_length(r) for r in decoding]
        num_rows = len(num_logits) * max(num_logits)
        with self._timing("target", None if prefill else num_rows):
            logits = self._target.forward(batch, num_logits)
            outcomes = self._sampler.verify(logits, drafted) if decoding else []
        for running, draft, outcome, cached in zip(
            decoding, drafted, outcomes, num_cached, strict=True
        ):
            self._take(running, draft, outcome, cached)

    def _alone(self) -> _Running | None:
        """The request that runs alone, if the device can run it by itself."""
        if len(self._running) != 1:
            return None
        running = self._running[0]
        if running.is_draft_suspect or not SingleStream.can_run(running.state):
            return None
        return running

    def _stream_step(self, stream: SingleStream, running: _Running) -> None:
        """Takes in a round of a request that the device runs by itself."""
        state = running.state
        if not stream.runs(state):
            stream.end()
            fits_draft = len(state.token_ids) <= self._draft.max_seq_len
            may_draft = stream.may_draft(state) and fits_draft
            has_draft = may_draft and self._has_draft_sequence(running)
            # Rounds want all of the text but its last two tokens.
            is_behind = has_draft and self._draft_length(running) < len(state.token_ids) - 2
            stream.begin(
                state,
                target_sequence=running.target_sequence,
                draft_sequence=running.draft_sequence if has_draft else None,
                reads_meanwhile=is_behind,
            )
            if is_behind:
                self._catch_up(running)
        taken = stream.step()
        if taken.token_ids is None:
            stream.end()
            if taken.drafted:
                running.is_draft_suspect = True
            else:
                self._end(running, state.finish("error", UNUSABLE_LOGITS))
            return
        if taken.drafted and not taken.judged:
            state.skip_draft("draft_failed")
        self._target.skip(running.target_sequence, len(taken.token_ids))
        if taken.num_draft_cached is not None and running.draft_sequence is not None:
            num_new = taken.num_draft_cached - self._draft_length(running)
            self._draft.skip(running.draft_sequence, num_new)
        chunk = state.accept(
            taken.token_ids, num_draft_tokens=taken.judged, is_copied=taken.is_copied
        )
        if chunk.finish_reason is not None:
            self._end(running, chunk)
        elif chunk.token_ids or chunk.text:
            self._ended.append(chunk)

    def _catch_up(self, running: _Running) -> None:
        """Lets the draft read what it lacks of a text, but for the last token."""
        assert running.draft_sequence is not None
        token_ids = running.state.token_ids
        while (start := self._draft_length(running)) < len(token_ids) - 1:
            piece = token_ids[start : min(start + self._options.max_num_tokens, len(token_ids) - 1)]
            self._draft.forward([(running.draft_sequence, piece)], [0])

    def _schedule(self) -> tuple[list[_Running], list[tuple[_Running, list[int]]]]:
        """Who decodes in this step, and which piece of whose prompt is cached in it instead."""
        decoding: list[_Running] = []
        prefill: list[tuple[_Running, list[int]]] = []
        budget = self._options.max_num_tokens
        for running in self._running:
            missing = self._missing(running)
            if len(missing) > 1:
                piece = missing[:budget]
                budget -= len(piece)
                if len(piece) < len(missing):
                    if piece:
                        prefill.append((running, piece))
                    continue
            decoding.append(running)
        self._prefill_draft([running for running, _ in prefill])
        return decoding, prefill

    def _prefill_draft(self, running: Sequence[_Running]) -> None:
        """Lets the draft read along while the target still reads the prompt."""
        batch = []
        for r in running:
            if r.state.is_speculative and self._has_draft_sequence(r):
                assert r.draft_sequence is not None
                end = self._target.length(r.target_sequence) + self._options.max_num_tokens
                # The last token stays for the first draft step, which needs a row to score.
                end = min(end, self._draft.max_seq_len, len(r.state.token_ids) - 1)
                piece = r.state.token_ids[self._draft_length(r) : end]
                if piece:
                    batch.append((r.draft_sequence, piece[: self._options.max_num_tokens]))
        if batch:
            self._draft.forward(batch, [0] * len(batch))

    def _run_draft(self, decoding: Sequence[_Running]) -> list[Drafted]:
        drafted = [Drafted(r.state) for r in decoding]
        most = most_draft_tokens(self._options.schedule, len(decoding))
        if self._stream is not None and self.costs is not None:
            alone = self._alone()
            if alone is not None and not alone.state.names_draft_length:
                # This step is that of a prompt: its token need not wait for the draft, which reads
                # the prompt while the device is busy with the rounds that come next.
                alone.state.skip_draft("not_ready", most=most)
                return drafted
        costs = self.costs.at(len(decoding)) if self.costs is not None and decoding else None
        if (
            self._copies
            and costs is not None
            and len(decoding) == 1
            and not decoding[0].is_draft_suspect
        ):
            state = decoding[0].state
            copying = replace(costs, draft_step=0.0)
            num_copied = state.next_num_copied_tokens(copying, costs, most=most)
            if num_copied:
                return [Drafted(state, state.copy(num_copied), is_copied=True)]
        feeds: list[tuple[_Running, Drafted, int, list[int]]] = []
        catching_up = []
        for running, draft in zip(decoding, drafted, strict=True):
            if running.is_draft_suspect:
                running.is_draft_suspect = False
                running.state.skip_draft("draft_failed", most=most)
                continue
            num_draft_tokens = running.state.next_num_draft_tokens(costs, most=most)
            if num_draft_tokens == 0:
                continue
            if not self._has_draft_sequence(running):
                running.state.skip_draft("no_room")
                continue
            assert running.draft_sequence is not None
            feed = running.state.token_ids[self._draft_length(running) :]
            if len(feed) > self._options.max_num_tokens:
                running.state.skip_draft("not_ready")
                catching_up.append((running.draft_sequence, feed[: self._options.max_num_tokens]))
            else:
                feeds.append((running, draft, num_draft_tokens, feed))
        if self.costs is not None and len(decoding) > 1:
            proposals = [(running.state, k) for running, _, k, _ in feeds]
            cap = self._draft_cap(self.costs, proposals, len(decoding))
            capped = [(r, draft, _capped(r.state, k, cap), feed) for r, draft, k, feed in feeds]
            feeds = [feed for feed in capped if feed[2] > 0]
            for running, _, k, _ in capped:
                if k == 0:
                    running.state.skip_draft("does_not_pay")
        if costs is not None and self.costs is not None and not feeds and most != 0:
            self.costs.hope()
        if catching_up:
            self._draft.forward(catching_up, [0] * len(catching_up))
        while feeds:
            batch = [(running.draft_sequence or 0, feed) for running, _, _, feed in feeds]
            is_plain = all(len(feed) == 1 for _, feed in batch)
            with self._timing("draft", len(batch) if is_plain else None):
                logits = self._draft.forward(batch, [1] * len(batch))
                has_token = self._sampler.draft(logits, [draft for _, draft, _, _ in feeds])
            for running, draft, _, _ in feeds:
                if not draft.token_ids:
                    running.state.skip_draft("draft_failed")
            feeds = [
                (running, draft, limit, [draft.token_ids[-1]])
                for (running, draft, limit, _), has in zip(feeds, has_token, strict=True)
                if has and len(draft.token_ids) < limit
            ]
        return drafted

    @staticmethod
    def _draft_cap(
        costs: CostTable, proposals: Sequence[tuple[RequestState, int]], batch_size: int
    ) -> int:
        """The draft length to stop at so that the whole batch emits most tokens in a given time.

        Each request proposes what would pay if all did as it does. But a draft step for a few of
        them costs nearly what it costs for all, and those that do not draft wait for it. Those that
        name their draft length are not stopped.
        """
        num_plain = batch_size - len(proposals)

        def rate(cap: int) -> float:
            lengths = [_capped(state, length, cap) for state, length in proposals]
            expected = sum(
                state.expected_tokens(length)
                for (state, _), length in zip(proposals, lengths, strict=True)
            )
            return (num_plain + expected) / costs.step_seconds([*lengths, *[0] * num_plain])

        longest = max((length for _, length in proposals), default=0)
        best = max(range(longest + 1), key=rate)
        return best if rate(best) >= MIN_GAIN * rate(0) else 0

    @contextmanager
    def _timing(self, role: Role, num_rows: int | None) -> Iterator[None]:
        """Lets the costs learn from a forward of num_rows single tokens; None: not one."""
        start = time.perf_counter()
        yield
        if self.costs is not None and num_rows is not None:
            self.costs.observe(role, num_rows, time.perf_counter() - start)

    def _take(
        self, running: _Running, drafted: Drafted, outcome: Outcome, num_draft_cached: int
    ) -> None:
        """Hands the outcome to the request and cuts both caches back to what it accepted."""
        state = running.state
        num_before = len(state.token_ids)
        if outcome.token_ids is None and not drafted.token_ids:
            self._end(running, state.finish("error", UNUSABLE_LOGITS))
            return
        if outcome.token_ids is None:
            # Attention gives later positions the weight 0, but 0 times the NaN of a draft token's
            # values is NaN: only a step without draft tokens tells what the target thinks.
            running.is_draft_suspect = True
            self._cut_back(running, num_before - 1, num_draft_cached)
            return
        if drafted.token_ids and not outcome.num_draft_tokens:
            state.skip_draft("draft_failed")
        chunk = state.accept(
            outcome.token_ids,
            outcome.log_probs,
            num_draft_tokens=outcome.num_draft_tokens,
            is_copied=drafted.is_copied,
        )
        if chunk.finish_reason is not None:
            self._end(running, chunk)
            return
        if chunk.token_ids or chunk.text:
            self._ended.append(chunk)
        self._cut_back(running, num_before + len(outcome.token_ids) - 1, num_draft_cached)

    def _cut_back(self, running: _Running, num_valid: int, num_draft_cached: int) -> None:
        """Forgets what both caches hold beyond the first num_valid tokens."""
        self._target.truncate(running.target_sequence, num_valid)
        if running.draft_sequence is not None and num_draft_cached > num_valid:
            self._draft.truncate(running.draft_sequence, num_valid)

    def _missing(self, running: _Running) -> list[int]:
        """The accepted tokens that the target has not cached yet; one in a running decode."""
        return running.state.token_ids[self._target.length(running.target_sequence) :]

    def _draft_length(self, running: _Running) -> int:
        if running.draft_sequence is None:
            return 0
        return self._draft.length(running.draft_sequence)

    def _has_draft_sequence(self, running: _Running) -> bool:
        """Makes the draft's sequence when it is first wanted; False when there is no room."""
        if running.draft_sequence is None:
            prompt_length = len(running.state.request.prompt_token_ids)
            max_tokens = min(
                prompt_length + running.state.request.max_tokens, self._draft.max_seq_len
            )
            if not self._draft.can_admit(max_tokens):
                return False
            running.draft_sequence = self._draft.allocate(
                prompt_length=prompt_length, max_tokens=max_tokens
            )
        return True

    def _end(self, running: _Running, chunk: Chunk) -> None:
        if self._stream is not None and self._stream.runs(running.state):
            self._stream.end()
        self._running.remove(running)
        self._target.free(running.target_sequence)
        if running.draft_sequence is not None:
            self._draft.free(running.draft_sequence)
        self._ended.append(chunk)


def _capped(state: RequestState, num_draft_tokens: int, cap: int) -> int:
    return num_draft_tokens if state.names_draft_length else min(num_draft_tokens, cap)
