"""The pair over TensorRT-LLM's C++ backend: it calls the Triton models `draft` and `target`.

(BLS, business logic scripting, is Triton's name for a model that calls others.) The engines batch
requests by themselves, so every running request has a thread of its own that takes its rounds one
by one: a request to `draft` for K tokens, then one to `target` that verifies them. Without draft
tokens the target, which is decoupled, streams many tokens in answer to one request: an engine that
can verify ends a request after one step only if it has draft tokens (TensorRT-LLM,
cpp/tensorrt_llm/batch_manager/trtGptModelInflightBatching.cpp@00825c4e).

Greedy output is that of the target alone. Sampled output has the target's distribution in both
modes of acceptance (engine_calls.py). Given a seed, the same request returns the same tokens if the
engine does; they differ from those of another draft length, since a round draws its tokens from one
random sequence, and so a seeded request has a fixed one, which neither load nor acceptance changes.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from specpipe.errors import FAULT, EngineMismatch, RuntimeUnavailable
from specpipe.machine.callables import Clock
from specpipe.runtimes.pair.admission import Waiting
from specpipe.runtimes.pair.pair import DetokenizerFactory, PairOptions
from specpipe.runtimes.pair.queued_pair import QueuedPair, Running
from specpipe.runtimes.tensorrt_llm.engines import contract
from specpipe.runtimes.tensorrt_llm.engines.call_times import MIN_TIMED_TOKENS, CallTimes
from specpipe.runtimes.tensorrt_llm.engines.engine_calls import (
    BackendTensors,
    DraftTokens,
    EngineCall,
    EngineCallError,
    EngineCalls,
    EngineModel,
    TargetTokens,
    check_request,
    read_tokens,
    read_verified,
    stop_tensors,
)
from specpipe.runtimes.tensorrt_llm.engines.engine_config import AcceptTest
from specpipe.speculative.adaptive import most_draft_tokens
from specpipe.speculative.guide import Guides
from specpipe.speculative.request import Chunk, FinishReason, Request, RequestLimits

_LOGGER = logging.getLogger(__name__)

_NUM_PLAIN_TOKENS = 16
"""Tokens of one request without drafting, while drafting may pay again after it."""

_MAX_WAIT_S = 1.0

_KEEP_S = 1.0


@dataclass(eq=False)
class _Running(Running):
    """A request with its thread. Whoever ends it, its thread or the pair's, holds the lock."""

    calls: EngineCalls
    engine_request_id: str
    draft_length_is_fixed: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    active: EngineModel | None = None
    """The model that runs a request of ours."""
    has_draft_prompt: bool = False
    has_target_prompt: bool = False
    """The engine has read the prompt, so the time of its next request is that of a step."""


class BlsPair(QueuedPair[_Running]):
    """A `Pair` of two Triton models. `step` returns when any request has something to emit."""

    def __init__(
        self,
        draft: EngineModel,
        target: EngineModel,
        options: PairOptions,
        limits: RequestLimits,
        detokenizer: DetokenizerFactory,
        *,
        acceptance: AcceptTest = "exact",
        clock: Clock = time.monotonic,
    ) -> None:
        """limits are those of the engines; a pair that adapts learns from the calls' times."""
        super().__init__(
            options, limits, detokenizer, max_batch_size=options.max_batch_size, clock=clock
        )
        self._draft, self._target = draft, target
        self._acceptance = acceptance
        self._times: CallTimes | None = None
        if options.adaptive and limits.max_num_draft_tokens > 0:
            self._times = CallTimes(limits.max_num_draft_tokens)
        self._unused = tuple(i for r in options.unused_token_ids for i in range(*r))
        self._left: queue.SimpleQueue[_Running] = queue.SimpleQueue()
        self._news = threading.Event()
        self._engine_request_ids = count(1)
        self._steps_lock = threading.Lock()

    def step(self) -> list[Chunk]:
        self._admit()
        if not self._chunks and self._left.empty():
            self._news.wait(min(self._time_left_s(), _MAX_WAIT_S))
        self._news.clear()
        while not self._left.empty():
            self._running.remove(self._left.get())
        self._end_overdue()
        self._admit()
        return self._take_chunks()

    def interrupt(self) -> None:
        self._news.set()

    def close(self) -> None:
        """Nothing to do: the engines are Triton's."""

    def _check_request(self, request: Request) -> None:
        check_request(request)

    def _adapts(self, request: Request) -> bool:
        return self._times is not None and not _has_one_length(request)

    def _start(self, waiting: Waiting) -> bool:
        request = waiting.request
        running = _Running(
            self._state_of(waiting),
            waiting.deadline,
            EngineCalls(
                request=request, acceptance=self._acceptance, unused_token_ids=self._unused
            ),
            # A number: TensorRT-LLM reads an id's leading digits as its own (src/utils.cc).
            str(next(self._engine_request_ids)),
            draft_length_is_fixed=not self._adapts(request),
        )
        self._running.append(running)
        threading.Thread(
            target=self._run, args=(running,), name="specpipe-request", daemon=True
        ).start()
        return True

    def _end(self, running: _Running, reason: FinishReason, error: str | None = None) -> None:
        """Ends a request unless it just ended; it leaves with its thread, when its engine stops."""
        with running.lock:
            if running.state.is_finished:
                return
            self._chunks.append(running.state.finish(reason, error))
            model = running.active
        if model is not None:
            # Not here: a model that hangs would take the pair's thread with it.
            threading.Thread(target=self._stop, args=(running, model), daemon=True).start()

    def _stop(self, running: _Running, model: EngineModel) -> None:
        try:
            model.stop(running.engine_request_id)
        except EngineCallError as exc:
            _LOGGER.warning("a request to an engine could not be cancelled: %s", exc)

    # What follows runs on the thread of a request.

    def _run(self, running: _Running) -> None:
        try:
            while not running.state.is_finished:
                self._round(running)
        except EngineCallError as exc:
            self._end(running, "error", str(exc))
        except Exception:
            # Of this request, as far as anybody can tell: engines that are broken fail them all.
            _LOGGER.exception("request %s failed", running.state.request.request_id)
            self._end(running, "error", FAULT)
        finally:
            self._left.put(running)
            self._news.set()

    def _round(self, running: _Running) -> None:
        state = running.state
        num_banned_end = running.calls.num_banned_end(state.num_output_tokens)
        num_draft_tokens = self._num_draft_tokens(running)
        if num_banned_end is not None:
            num_draft_tokens = min(num_draft_tokens, num_banned_end - 1)
            if not num_draft_tokens:
                state.drafts.skip("too_short")
        if num_draft_tokens:
            drafted = self._ask_draft(running, num_draft_tokens)
            if drafted.token_ids:
                self._verify(running, drafted)
            else:
                state.drafts.skip("nothing_proposed")
                self._continue(running, 1)
            return
        num_tokens = state.request.max_tokens - state.num_output_tokens
        follows_load = bool(self._options.schedule) and not _has_one_length(state.request)
        if state.drafts.is_speculative and (follows_load or not running.draft_length_is_fixed):
            num_tokens = min(num_tokens, _NUM_PLAIN_TOKENS)
        num_tokens = min(num_tokens, self._limits.max_seq_len - len(state.token_ids))
        self._continue(running, min(num_tokens, num_banned_end or num_tokens))

    def _num_draft_tokens(self, running: _Running) -> int:
        most = None
        if not _has_one_length(running.state.request):
            most = most_draft_tokens(self._options.schedule, len(self._running))
        if self._times is None or running.draft_length_is_fixed:
            return running.state.drafts.next_num_draft_tokens(most=most)
        num_left = running.state.request.max_tokens - running.state.num_output_tokens
        if self._times.lacks_plain_step and num_left >= MIN_TIMED_TOKENS:
            running.state.drafts.skip("not_ready", most=most)
            return 0
        return running.state.drafts.next_num_draft_tokens(self._times.costs(), most=most)

    def _ask_draft(self, running: _Running, num_draft_tokens: int) -> DraftTokens:
        call = running.calls.draft(running.state.token_ids, num_draft_tokens)
        drafted = DraftTokens()
        start = time.perf_counter()
        for response in self._responses(running, self._draft, call):
            seconds = time.perf_counter() - start
            drafted = running.calls.read_draft(response, num_draft_tokens)
            is_whole = len(drafted.token_ids) == num_draft_tokens
            if self._times is not None and running.has_draft_prompt and is_whole:
                self._times.observe_draft(num_draft_tokens, seconds)
        running.has_draft_prompt = True
        return drafted

    def _verify(self, running: _Running, drafted: DraftTokens) -> None:
        call = running.calls.verify(running.state.token_ids, drafted)
        start = time.perf_counter()
        for response in self._responses(running, self._target, call):
            seconds = time.perf_counter() - start
            taken = read_verified(response, drafted)
            if self._times is not None and running.has_target_prompt and not taken.num_unverified:
                self._times.observe_verify(len(drafted.token_ids), seconds)
            self._accept(running, taken, len(drafted.token_ids))
        running.has_target_prompt = True

    def _continue(self, running: _Running, num_tokens: int) -> None:
        """Lets the target run by itself, token by token as it comes."""
        call = running.calls.plain(running.state.token_ids, num_tokens)
        arrivals: list[float] = []
        for response in self._responses(running, self._target, call):
            token_ids = read_tokens(response)
            arrivals += [time.perf_counter()] * len(token_ids)
            for token_id in token_ids:
                self._accept(running, TargetTokens([token_id], 0, 0), 0)
        running.has_target_prompt = True
        if self._times is not None:
            self._times.observe_stream(arrivals)
        if not arrivals and not running.state.is_finished:
            raise EngineCallError(f"the target was asked for {num_tokens} tokens, returned none")

    def _accept(self, running: _Running, taken: TargetTokens, num_draft_tokens: int) -> None:
        with running.lock:
            if running.state.is_finished:
                return
            chunk = running.state.accept(
                taken.token_ids,
                num_draft_tokens=num_draft_tokens - taken.num_unverified,
                num_accepted=taken.num_accepted,
                num_unverified=taken.num_unverified,
            )
            if chunk.token_ids or chunk.text or chunk.finish_reason is not None:
                self._chunks.append(chunk)
        with self._steps_lock:
            self.num_steps += 1
        self._news.set()

    def _responses(
        self, running: _Running, model: EngineModel, call: EngineCall
    ) -> Iterator[BackendTensors]:
        """The responses to one request; those after the end of ours are read and dropped."""
        with running.lock:
            if running.state.is_finished:
                return
            running.active = model
        is_stopped = False
        try:
            for response in model.generate(running.engine_request_id, call.tensors, call.outputs):
                if not running.state.is_finished:
                    yield response
                elif not is_stopped:
                    # Also when `_end` sent a stop: it may have come before the request.
                    self._stop(running, model)
                    is_stopped = True
        finally:
            with running.lock:
                running.active = None


def _has_one_length(request: Request) -> bool:
    """True where the draft length must not change: for a request that names it, and for one that is
    to draw the same text again.
    """
    is_drawn_again = request.sampling.is_seeded and not request.sampling.is_greedy
    return request.num_draft_tokens is not None or is_drawn_again


class TritonModel:
    """An `EngineModel` in this Triton server, called from one of its Python models."""

    def __init__(self, pb_utils: Any, name: str, *, is_decoupled: bool) -> None:
        """pb_utils is the module `triton_python_backend_utils`."""
        self._pb_utils, self._name, self._is_decoupled = pb_utils, name, is_decoupled
        self._ended: deque[tuple[float, Any]] = deque()
        self._ended_lock = threading.Lock()

    def generate(
        self, request_id: str, tensors: BackendTensors, outputs: Sequence[str]
    ) -> Iterator[BackendTensors]:
        request = self._pb_utils.InferenceRequest(
            model_name=self._name,
            request_id=request_id,
            requested_output_names=list(outputs),
            inputs=[self._pb_utils.Tensor(name, array) for name, array in tensors.items()],
        )
        try:
            # Not decoupled, it returns one response instead of an iterator.
            responses = request.exec(decoupled=True) if self._is_decoupled else [request.exec()]
        except self._pb_utils.TritonModelException as exc:
            raise EngineCallError(f"the {self._name} model could not be called: {exc}") from exc
        try:
            for response in responses:
                if response.has_error():
                    raise EngineCallError(
                        f"the {self._name} model failed: {response.error().message()}"
                    )
                found = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
                if found:  # the last response of a stream may be empty
                    yield found
        finally:
            self._keep(responses)

    def _keep(self, responses: Any) -> None:
        """Keeps an iterator that ended until Triton, too, has let go of it.

        Triton before 25.01 drops its own reference on a thread that does not hold Python's lock; as
        the last one, that corrupts memory (python_backend, pull request 390).
        """
        now = time.monotonic()
        with self._ended_lock:
            self._ended.append((now, responses))
            while self._ended[0][0] < now - _KEEP_S:
                self._ended.popleft()

    def stop(self, request_id: str) -> None:
        for _ in self.generate(request_id, stop_tensors(), ("output_ids", "sequence_length")):
            pass


def load_pair(
    draft: Path,
    target: Path,
    options: PairOptions,
    detokenizer: DetokenizerFactory,
    guides: Guides | None = None,  # which it cannot follow
) -> BlsPair:
    """A pair of two models of this server; the folders hold the configs of their engines.

    What the models are called, the parameters of `speculative` say, which come with the settings.
    Raises RuntimeUnavailable outside Triton, and EngineMismatch when the engines were built for
    less than the options ask.
    """
    limits = read_limits(draft, target, options)
    try:
        import triton_python_backend_utils as pb_utils
    except ImportError as exc:
        raise RuntimeUnavailable(
            "runtime 'tensorrt_llm' runs engines inside Triton only: use `specpipe serve`"
        ) from exc
    settings = options.runtime_settings
    # Repositories of older releases do not name them.
    names = {role: settings.get(key, role) for role, key in contract.MODEL_NAMES.items()}
    return BlsPair(
        TritonModel(pb_utils, names[contract.DRAFT], is_decoupled=False),
        TritonModel(pb_utils, names[contract.TARGET], is_decoupled=True),
        options,
        limits,
        detokenizer,
        acceptance=settings["acceptance"],
    )


def read_limits(draft: Path, target: Path, options: PairOptions) -> RequestLimits:
    """What the engines can hold, from the `config.json` in each folder."""
    configs = [json.loads((folder / "config.json").read_bytes()) for folder in (draft, target)]
    draft_build, target_build = (config["build_config"] for config in configs)
    for role, build, name, wanted in (
        ("draft", draft_build, "max_batch_size", options.max_batch_size),
        ("target", target_build, "max_batch_size", options.max_batch_size),
        ("target", target_build, "max_draft_len", options.num_draft_tokens),
        ("target", target_build, "max_seq_len", options.max_seq_len),
    ):
        if build[name] < wanted:
            raise EngineMismatch(
                f"the {role} engine was built for {name} {build[name]}, the pair is to serve "
                f"{wanted}; build it again"
            )
    return RequestLimits(
        max_num_draft_tokens=options.num_draft_tokens,
        max_seq_len=options.max_seq_len,
        # An engine counts every token that it is asked for, also the last draft token, which it
        # never reads.
        draft_max_seq_len=draft_build["max_seq_len"] - 1,
        vocab_size=min(config["pretrained_config"]["vocab_size"] for config in configs),
    )
