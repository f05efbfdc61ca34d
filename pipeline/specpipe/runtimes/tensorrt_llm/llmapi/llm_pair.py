"""The pair behind TensorRT-LLM's LLM API, which drafts and verifies by itself.

What it promises less than the pairs whose loop is specpipe's own, and why.

Sources for 1.0 to 1.2 are TensorRT-LLM, tensorrt_llm/_torch/pyexecutor/sampler.py and
sampling_utils.py (`TorchSampler`, which draws for both models whenever there is a draft model), and
tensorrt_llm/sampling_params.py:

- Greedy output equals that of the target alone, up to numerical ties: a draft token counts where
  it equals the target's own.
- Sampled output is not lossless with a draft. Draft tokens are then accepted by probabilities, but
  a draft that was drawn greedily is weighed with the softmax of its logits instead of certainty,
  and so too much of it is accepted. Such requests are refused unless `acceptance: logits` asks for
  them.
- One random generator serves all requests, so no seed can be honoured.
- Penalties, bad words and min_p are not applied; min_tokens counts the prompt's tokens, too. 1.0
  applies no temperature.
- All requests draft max_draft_len tokens in every step.

Sources from 1.3.0rc23 on, where both models are one engine, are the `SpecSampler` of all such modes
(tensorrt_llm/_torch/speculative, id 57364433433) and llmapi/llm_args.py (id 55143598664):

- The target samples every position and drafts that match count, so sampled output is lossless, too.
  `acceptance: logits` is TensorRT-LLM's use_rejection_sampling, a prototype: not called lossless.
- Log-probabilities are refused with a draft (pull request 18401), as are min_p, bad words and
  min_tokens. Penalties need `enable_penalty` (pull request 17701).
- All requests of a batch draft alike, as many as draft_len_schedule says.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specpipe.errors import RequestError
from specpipe.machine.callables import Clock
from specpipe.runtimes.pair.admission import Waiting
from specpipe.runtimes.pair.pair import DetokenizerFactory, PairOptions
from specpipe.runtimes.pair.queued_pair import QueuedPair, Running
from specpipe.runtimes.tensorrt_llm.llmapi.model_yaml import spelling
from specpipe.speculative.adaptive import most_draft_tokens
from specpipe.speculative.request import Chunk, Request, RequestLimits, Sampling

_NO_END_ID = -1  # what TensorRT-LLM itself puts in for ignore_eos

_DEFAULTS = Sampling()
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NEVER_APPLIED = ("min_tokens", "bad_words")


@dataclass(eq=False)
class _Running(Running):
    output: Any = None
    """TensorRT-LLM's handle, once it has the request; only the event loop's thread uses it."""
    is_abandoned: bool = False
    """Nobody wants more of it; only the event loop's thread uses this."""
    has_prefilled: bool = False


@dataclass(frozen=True)
class _Part:
    """What one step of TensorRT-LLM added to one request."""

    running: _Running
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str | None
    drafted: tuple[int, int] | None
    """Draft tokens and accepted ones of the whole request, in a last part that counts them."""


@dataclass(frozen=True)
class _Failure:
    """A request that ended without a last part."""

    running: _Running
    message: str


class LlmPair(QueuedPair[_Running]):
    """A `Pair` over `tensorrt_llm.LLM.generate_async`; its steps wait for what TensorRT-LLM does.

    Requests run in an event loop on a thread of its own, as the LLM API wants it, and what they
    bring comes to `step` through a queue. `num_steps` counts the parts that came: each is a
    draft-verify round of one request, since TensorRT-LLM streams once an iteration.

    Counts of draft tokens are those of TensorRT-LLM's request metrics where it fills them in: the
    PyTorch flow does so since pull request 17082 (2026-07-30, about 1.3.0rc23), and before has
    zeros. Else every step but the first counts as num_draft_tokens drafted, or as many as the
    schedule has for the requests that run and as could still be emitted, and what it gave beyond
    one token as accepted.
    """

    def __init__(
        self,
        llm: Any,
        sampling_params: Callable[..., Any],
        options: PairOptions,
        detokenizer: DetokenizerFactory,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """llm is a `tensorrt_llm.LLM`, sampling_params the class of that name."""
        settings = options.runtime_settings
        vocab_sizes = (settings["draft_vocab_size"], settings["target_vocab_size"])
        limits = RequestLimits(
            max_num_draft_tokens=options.num_draft_tokens,
            max_seq_len=options.max_seq_len,
            draft_max_seq_len=options.max_seq_len,
            vocab_size=min(vocab_sizes),
        )
        # Since 1.1 (pull request 7106); before, prompts of all are shared.
        has_salt = "cache_salt" in inspect.signature(llm.generate_async).parameters
        super().__init__(
            options,
            limits,
            detokenizer,
            max_batch_size=options.max_batch_size,
            honours=("cache_salt",) if has_salt else (),
            clock=clock,
        )
        self._llm, self._sampling_params = llm, sampling_params
        self._version: str = settings["tensorrt_llm"]
        self._spelling = spelling(self._version)
        self._acceptance: str = settings["acceptance"]
        self._enables_penalty: bool = settings.get("enable_penalty", False)
        self._has_one_vocab_size = len(set(vocab_sizes)) == 1
        self._events: queue.SimpleQueue[_Part | _Failure | Exception | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="specpipe-llm", daemon=True
        )
        self._thread.start()

    def step(self) -> list[Chunk]:
        self._end_overdue()
        self._admit()
        if self._running and not self._chunks:
            self._take_events()
        return self._take_chunks()

    def interrupt(self) -> None:
        self._events.put(None)

    def close(self) -> None:
        """Ends the event loop and TensorRT-LLM with its workers; running requests get no answer."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_tasks(), self._loop).result()
        self._llm.shutdown()  # before the loop, which its threads send to
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _check_request(self, request: Request) -> None:
        """Raises RequestError for an input that would be ignored, or change what it should not."""
        sampling = request.sampling
        num_draft_tokens = self._options.num_draft_tokens
        if request.num_draft_tokens not in (None, num_draft_tokens):
            raise RequestError(
                f"num_draft_tokens is {request.num_draft_tokens}: TensorRT-LLM's pytorch backend "
                f"drafts {num_draft_tokens} tokens in every step (speculation.num_draft_tokens); "
                "leave it out"
            )
        for name in _NEVER_APPLIED if self._enables_penalty else (*_PENALTIES, *_NEVER_APPLIED):
            self._check_default(sampling, name)
        is_one_engine = self._spelling.is_one_engine and num_draft_tokens > 0
        if request.return_log_probs and is_one_engine:
            raise RequestError(
                f"return_log_probs: TensorRT-LLM {self._version} gives no log-probabilities with a "
                "draft; leave it out"
            )
        if sampling.is_greedy:
            return
        if sampling.is_seeded:
            raise RequestError(
                "seed: TensorRT-LLM's pytorch backend draws for all requests from one generator; "
                "leave it out"
            )
        for name in ("temperature", "top_k", "top_p", "min_p"):
            if name not in self._spelling.sampling:
                self._check_default(sampling, name)
        if request.return_log_probs:
            raise RequestError(
                "return_log_probs: TensorRT-LLM's pytorch backend gives the log-probabilities of "
                "greedy tokens only; send temperature 0 or leave it out"
            )
        if num_draft_tokens == 0 or (is_one_engine and self._acceptance == "exact"):
            return
        if self._acceptance != "logits":
            raise RequestError(
                f"temperature is {sampling.temperature}: TensorRT-LLM's pytorch backend samples "
                "with a draft from another distribution than the target's; send temperature 0, or "
                "set engine.tensorrt_llm.acceptance to logits to have it all the same"
            )
        if not self._has_one_vocab_size:
            raise RequestError(
                f"temperature is {sampling.temperature}: TensorRT-LLM's pytorch backend samples "
                "only where draft and target have as many embedding rows; send temperature 0"
            )

    def _check_default(self, sampling: Sampling, name: str) -> None:
        value = getattr(sampling, name)
        if value != getattr(_DEFAULTS, name):
            shown = "given" if name == "bad_words" else value
            raise RequestError(
                f"{name} is {shown}: the pytorch backend of TensorRT-LLM {self._version} does not "
                "apply it; leave it out"
            )

    def _start(self, waiting: Waiting) -> bool:
        running = _Running(self._state_of(waiting), waiting.deadline)
        self._running.append(running)
        asyncio.run_coroutine_threadsafe(self._generate(running, waiting.request), self._loop)
        return True

    def _new_sampling_params(self, request: Request) -> Any:
        """A `SamplingParams`; what it leaves out is greedy. Text is decoded here, not there."""
        sampling = request.sampling
        end_ids = sorted(request.end_token_ids)
        num_left = self._limits.max_seq_len - len(request.prompt_token_ids)
        arguments: dict[str, Any] = {
            "max_tokens": min(request.max_tokens, num_left),
            "end_id": end_ids[0] if end_ids else _NO_END_ID,
            "pad_id": end_ids[0] if end_ids else 0,
            "ignore_eos": not end_ids,
            "stop_token_ids": end_ids[1:] or None,
            "detokenize": False,
            "return_perf_metrics": True,
        }
        if request.return_log_probs:
            arguments["logprobs"] = 1
        if not sampling.is_greedy:
            arguments["temperature"] = sampling.temperature
            arguments["top_k"] = sampling.top_k or None
            arguments["top_p"] = sampling.top_p
        penalties = {name: getattr(sampling, name) for name in _PENALTIES}
        if penalties != {name: getattr(_DEFAULTS, name) for name in _PENALTIES}:
            arguments |= penalties
            # Presence and frequency are of the output alone; repetition counts the prompt as well.
            arguments["prompt_ignore_length"] = len(request.prompt_token_ids)
        return self._sampling_params(**arguments)

    async def _generate(self, running: _Running, request: Request) -> None:
        """Runs one request to its end; what it brings goes into the queue of events."""
        if running.is_abandoned:
            return
        try:
            salt = {"cache_salt": request.cache_salt} if request.cache_salt else {}
            running.output = self._llm.generate_async(
                list(request.prompt_token_ids),
                self._new_sampling_params(request),
                streaming=True,
                **salt,
            )
        except (TypeError, ValueError) as exc:
            self._events.put(_Failure(running, f"TensorRT-LLM refuses the request: {exc}"))
            return
        except Exception as exc:  # it is shutting down, or its workers are gone
            self._events.put(exc)
            return
        num_seen = 0
        try:
            async for output in running.output:
                part = _part(running, output.outputs[0], num_seen, request.return_log_probs)
                num_seen += len(part.token_ids)
                self._events.put(part)
        except Exception as exc:
            message = f"TensorRT-LLM failed: {type(exc).__name__}: {exc}"
            self._events.put(_Failure(running, message))
        else:
            running.output = None
            self._events.put(_Failure(running, "TensorRT-LLM gave no end of the request"))

    def _take_events(self) -> None:
        """Waits until something happens or a deadline comes, then takes all that happened."""
        with contextlib.suppress(queue.Empty):
            self._take_event(self._events.get(timeout=self._time_left_s()))
            while True:
                self._take_event(self._events.get_nowait())

    def _take_event(self, event: _Part | _Failure | Exception | None) -> None:
        if event is None:
            return
        if isinstance(event, Exception):
            raise RuntimeError(f"TensorRT-LLM takes no more requests: {event}") from event
        running = event.running
        if running.state.is_finished:
            return
        if isinstance(event, _Failure):
            self._end(running, "error", event.message)
            return
        self.num_steps += 1
        self._take_part(running, event)

    def _take_part(self, running: _Running, part: _Part) -> None:
        state = running.state
        token_ids, log_probs = list(part.token_ids), list(part.log_probs)
        end_ids = state.request.end_token_ids
        if part.finish_reason == "stop" and end_ids and not end_ids.intersection(token_ids[-1:]):
            # Ids of stop_token_ids are cut off; the request must see what ended it.
            token_ids.append(min(end_ids))
            log_probs += [0.0] if log_probs else []  # is not emitted either
        for token_id in token_ids:
            if any(start <= token_id < stop for start, stop in self._options.unused_token_ids):
                error = f"the target gave token id {token_id}, which no tokenizer entry uses"
                self._end(running, "error", error)
                return
        for ids, probs in _steps(token_ids, log_probs, self._options.num_draft_tokens + 1):
            is_plain = not running.has_prefilled and len(ids) == 1
            running.has_prefilled = True
            if is_plain:
                state.drafts.skip("too_short")
            most = most_draft_tokens(self._options.schedule, len(self._running))
            planned = state.drafts.next_num_draft_tokens(most=most)
            num_drafted = 0 if is_plain else max(planned, len(ids) - 1)
            chunk = state.accept(ids, probs, num_draft_tokens=num_drafted)
            self._emit(running, _with_counts(chunk, part))
            if state.is_finished:
                return
        if part.finish_reason == "length":
            self._emit(running, _with_counts(state.finish("length"), part))
        elif part.finish_reason is not None:
            error = f"TensorRT-LLM ended the request: {part.finish_reason}"
            self._end(running, "error", error)

    def _leave(self, running: _Running, chunk: Chunk) -> None:
        statistics = chunk.statistics
        is_sampled = not running.state.request.sampling.is_greedy
        drafts_by_logits = self._options.num_draft_tokens > 0 and self._acceptance == "logits"
        if statistics is not None and is_sampled and drafts_by_logits:
            statistics = replace(statistics, is_lossless=False)
        is_inferred = chunk.counts is not None
        if statistics is not None and is_inferred and statistics.draft_status == "drafted":
            statistics = replace(statistics, draft_status="decided_by_engine")
        super()._leave(running, replace(chunk, statistics=statistics))
        self._loop.call_soon_threadsafe(_abandon, running)


def _with_counts(chunk: Chunk, part: _Part) -> Chunk:
    """A last chunk, with TensorRT-LLM's own counts where it has them; others as they are."""
    if chunk.statistics is None or part.drafted is None:
        return chunk
    num_drafted, num_accepted = part.drafted
    statistics = replace(
        chunk.statistics,
        acceptance_histogram=None,
        total_draft_tokens=num_drafted,
        total_accepted_draft_tokens=num_accepted,
        acceptance_rate=num_accepted / num_drafted,
    )
    # How the counts fall on steps it does not tell.
    return replace(chunk, statistics=statistics, counts=None)


def _abandon(running: _Running) -> None:
    """Frees what TensorRT-LLM still holds of a request; nothing where it has ended by itself."""
    running.is_abandoned = True
    if running.output is not None:
        running.output.abort()


def _part(running: _Running, completion: Any, num_seen: int, with_log_probs: bool) -> _Part:
    """Reads a `CompletionOutput`, whose token ids and log-probabilities are those from the start on
    and grow while they are read.
    """
    token_ids = list(completion.token_ids[num_seen:])
    log_probs: list[float] = []
    if with_log_probs:
        entries = completion.logprobs[num_seen : num_seen + len(token_ids)]
        for token_id, entry in zip(token_ids, entries, strict=True):
            log_probs.append(float(entry[token_id].logprob if isinstance(entry, dict) else entry))
    return _Part(
        running,
        token_ids,
        log_probs,
        completion.finish_reason,
        _drafted(getattr(completion, "request_perf_metrics", None)),
    )


def _drafted(metrics: Any) -> tuple[int, int] | None:
    """Draft tokens and accepted ones; None where the metrics do not count them (zeros)."""
    counts = getattr(metrics, "speculative_decoding", None)
    if counts is None or not counts.total_draft_tokens:
        return None
    return int(counts.total_draft_tokens), int(counts.total_accepted_draft_tokens)


def _steps(
    token_ids: Sequence[int], log_probs: Sequence[float], max_len: int
) -> Iterator[tuple[Sequence[int], Sequence[float]]]:
    """Cuts what came at once into what single steps can have given."""
    for start in range(0, len(token_ids), max_len):
        yield token_ids[start : start + max_len], log_probs[start : start + max_len]


async def _cancel_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
