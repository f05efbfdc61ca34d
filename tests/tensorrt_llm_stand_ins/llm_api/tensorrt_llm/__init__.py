"""Stands in for TensorRT-LLM's LLM API, its names, fields and manners, over the torch runtime.

Faithful to TensorRT-LLM (llmapi/llm.py, llmapi/llm_args.py, sampling_params.py, executor/result.py,
_torch/pyexecutor/sampler.py), as far as a caller can tell: unknown arguments and those of another
type are refused, the first step of a request gives one token and each later one up to
max_draft_len + 1, an end id stays in the token ids and an id of stop_token_ids is cut off, an
aborted request ends as cancelled, and results can be awaited only in an event loop that was there
when the request was made. What a release line does otherwise is in llm_api_lines.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from specpipe.checkpoints.parallel_draft import ParallelDraft
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.speculative.request import Chunk, Request, Sampling
from tests.tensorrt_llm_stand_ins.llm_api_lines import UNKNOWN_FAMILIES

from . import engines
from .llmapi import HERE, VERSION
from .llmapi.llm_args import TorchLlmArgs

__version__ = VERSION

ACTIVE_FILE = "FAKE_TENSORRT_LLM_ACTIVE"
"""Names a file that always holds the number of running requests, for another process to read."""


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """The fields of tensorrt_llm.SamplingParams, but for those that need its C++ types."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")

    @property
    def is_greedy(self) -> bool:
        values = (self.temperature, self.top_k, self.top_p)
        return (
            values == (None, None, None) or 0 in (self.temperature, self.top_p) or (self.top_k == 1)
        )


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class SpeculativeDecodingMetrics:
    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass
class RequestPerfMetrics:
    speculative_decoding: SpeculativeDecodingMetrics


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    _last_token_ids_len: int = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]


@dataclass(frozen=True)
class _Response:
    """What the executor sends of one iteration of one request."""

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cut: int = 0
    drafted: tuple[int, int] | None = None


class RequestOutput:
    """One request: an awaitable, and an async iterator over its states."""

    def __init__(self, llm: LLM, request_id: str, prompt_token_ids: list[int]) -> None:
        self.request_id, self.prompt_token_ids = request_id, prompt_token_ids
        self.outputs = [CompletionOutput(0)]
        self.prompt = None
        self.context_logits = None
        self.finished = False
        self._llm = llm
        self._loop = asyncio.get_running_loop()
        self._responses: asyncio.Queue[_Response | Exception] = asyncio.Queue()

    def abort(self) -> None:
        """Ends the request; its last state says "cancelled"."""
        self._llm.abort_request(self.request_id)

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        response = await self._responses.get()
        if isinstance(response, Exception):
            self.finished = True
            raise response
        output = self.outputs[0]
        output._last_token_ids_len = len(output.token_ids)
        output.token_ids.extend(response.token_ids)
        output.logprobs.extend(
            {token_id: Logprob(log_prob, 1)}
            for token_id, log_prob in zip(response.token_ids, response.log_probs, strict=False)
        )
        if response.num_cut:  # the log-probabilities stay as long as they were
            output.token_ids = output.token_ids[: -response.num_cut]
        output.finish_reason, output.stop_reason = response.finish_reason, response.stop_reason
        if response.drafted is not None:
            num_drafted, num_accepted = response.drafted
            output.request_perf_metrics = RequestPerfMetrics(
                SpeculativeDecodingMetrics(
                    num_accepted / num_drafted if num_drafted else 0.0, num_accepted, num_drafted
                )
            )
        self.finished = response.finish_reason is not None
        return self

    def _send(self, response: _Response | Exception) -> None:
        self._loop.call_soon_threadsafe(self._responses.put_nowait, response)


class LLM:
    """tensorrt_llm.LLM with backend pytorch; its executor is a thread."""

    fills_metrics: bool = HERE.fills_metrics
    """Whether the metrics of a request count draft tokens."""

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = TorchLlmArgs(**kwargs)
        if not Path(model).is_dir():
            raise ValueError(f"{model} is neither a folder nor a hub id")
        self.arguments = {"model": model, "skip_tokenizer_init": skip_tokenizer_init, **kwargs}
        self.asked: list[SamplingParams] = []
        self.salts: list[str | None] = []
        self.num_aborted = 0
        self._drafting = speculative = arguments.speculative_config
        _check_family(Path(model), is_drafted_for=speculative is not None)
        if speculative is not None:
            _check_draft(Path(model), Path(speculative.speculative_model))
        self._pair: EnginePair = engines.make_pair(
            Path(model),
            Path(speculative.speculative_model) if speculative else None,
            max_batch_size=kwargs["max_batch_size"],
            max_seq_len=kwargs["max_seq_len"],
            max_num_tokens=kwargs["max_num_tokens"],
            num_draft_tokens=speculative.max_draft_len if speculative else 0,
            schedule=speculative.levels() if speculative else (),
            parallel=_parallel(speculative),
        )
        self._running: dict[str, tuple[RequestOutput, SamplingParams, int]] = {}
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_shut_down = False
        self._note_active()
        self._executor = threading.Thread(target=self._run, name="fake-executor", daemon=True)
        self._executor.start()

    @property
    def num_active(self) -> int:
        """Requests that the executor holds."""
        return len(self._running)

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        if self._is_shut_down:
            raise RuntimeError("LLM is shutting down")
        assert streaming and isinstance(sampling_params, SamplingParams)
        if sampling_params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        max_num_tokens = self.arguments["max_num_tokens"]
        if len(inputs) > max_num_tokens and not self.arguments["enable_chunked_prefill"]:
            raise ValueError(
                f"The sum of prompt length ({len(inputs)}), query length (0) should not exceed "
                f"max_num_tokens ({max_num_tokens})"
            )
        if sampling_params.logprobs and self._drafting and not HERE.has_log_probs:
            raise ValueError(
                "The following output options are not supported with speculative decoding: logprobs"
            )
        output = RequestOutput(self, uuid.uuid4().hex, list(inputs))
        self.asked.append(sampling_params)
        self.salts.append(cache_salt)
        if refusal := self._refusal(sampling_params):
            output._send(ValueError(refusal))
            return output
        request = Request(
            request_id=output.request_id,
            prompt_token_ids=tuple(inputs),
            max_tokens=sampling_params.max_tokens,
            sampling=self._sampling(sampling_params, len(inputs)),
            return_log_probs=bool(sampling_params.logprobs),
        )
        self._inbox.put(partial(self._begin, request, output, sampling_params))
        return output

    def shutdown(self) -> None:
        self._is_shut_down = True
        self._inbox.put(lambda: None)
        self._executor.join()

    def abort_request(self, request_id: str) -> None:
        self._inbox.put(partial(self._abort, request_id))

    def _run(self) -> None:
        """The executor's thread: news before each iteration, as they came."""
        while not self._is_shut_down:
            if not self._pair.has_work():
                self._inbox.get()()
            while not self._inbox.empty():
                self._inbox.get()()
            for chunk in self._pair.step():
                self._take(chunk)

    def _begin(self, request: Request, output: RequestOutput, params: SamplingParams) -> None:
        self._pair.submit(request)
        self._running[output.request_id] = (output, params, 0)
        self._note_active()

    def _abort(self, request_id: str) -> None:
        if request_id in self._running:
            self.num_aborted += 1
            self._pair.cancel(request_id)
            self._end(request_id, _Response(finish_reason="cancelled"))

    def _take(self, chunk: Chunk) -> None:
        if chunk.request_id not in self._running:
            return
        output, params, num_sent = self._running[chunk.request_id]
        end_ids = set() if params.ignore_eos else {params.end_id}
        stop_ids = set(params.stop_token_ids or ())
        token_ids = chunk.token_ids
        reason, stop_reason, num_cut = chunk.finish_reason, None, 0
        for number, token_id in enumerate(token_ids, 1):
            if token_id in end_ids | stop_ids:
                token_ids, reason = token_ids[:number], "stop"
                if token_id in stop_ids:
                    stop_reason, num_cut = token_id, 1
                break
        log_probs = chunk.log_probs[: len(token_ids)]
        if num_sent == 0 and len(token_ids) > 1:  # the step over the prompt gives one token
            output._send(_Response(token_ids[:1], log_probs[:1]))
            token_ids, log_probs = token_ids[1:], log_probs[1:]
        self._running[chunk.request_id] = (output, params, num_sent + len(token_ids))
        if reason is None:
            output._send(_Response(token_ids, log_probs))
            return
        if chunk.finish_reason is None:
            self._pair.cancel(chunk.request_id)
        drafted = (0, 0)
        if self.fills_metrics and chunk.statistics is not None:
            counts = chunk.statistics
            drafted = (counts.total_draft_tokens, counts.total_accepted_draft_tokens)
        last = _Response(token_ids, log_probs, reason, stop_reason, num_cut, drafted)
        self._end(chunk.request_id, last)

    def _end(self, request_id: str, response: _Response) -> None:
        output, _, _ = self._running.pop(request_id)
        self._note_active()
        output._send(response)

    def _note_active(self) -> None:
        if path := os.environ.get(ACTIVE_FILE):
            Path(path).write_text(str(len(self._running)))

    def _refusal(self, params: SamplingParams) -> str | None:
        """What admission says of a request that cannot be honoured with a draft."""
        if self._drafting is None or not HERE.is_one_engine:
            return None
        for name in HERE.refused:
            if getattr(params, name):
                return f"{name} is not supported with one-model speculative decoding."
        if _has_penalties(params) and not self._drafting.enable_penalty:
            return "penalties require enable_penalty with one-model speculative decoding."
        return None

    def _sampling(self, params: SamplingParams, prompt_len: int) -> Sampling:
        """What of the parameters has an effect."""
        applied: dict[str, Any] = {}
        if not params.is_greedy and "temperature" in HERE.applied:
            applied = {
                "temperature": params.temperature or 1.0,
                "top_k": params.top_k or 0,
                "top_p": params.top_p or 1.0,
            }
        if _has_penalties(params) and HERE.has_penalties and self._drafting is not None:
            # The torch runtime counts the output alone, TensorRT-LLM the prompt from there on.
            assert params.prompt_ignore_length == prompt_len
            applied |= {
                "repetition_penalty": params.repetition_penalty or 1.0,
                "presence_penalty": params.presence_penalty or 0.0,
                "frequency_penalty": params.frequency_penalty or 0.0,
            }
        return Sampling(**applied)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty not in (None, 1.0) or any(
        (params.presence_penalty, params.frequency_penalty)
    )


def _parallel(speculative: Any) -> ParallelDraft | None:
    mask_token_id = getattr(speculative, "mask_token_id", None)
    return None if mask_token_id is None else ParallelDraft(mask_token_id)


def _check_family(target: Path, *, is_drafted_for: bool) -> None:
    """Refuses a family that the zoo has not, or that cannot hold a draft; a rule has no config."""
    path = target / "config.json"
    family = json.loads(path.read_text())["architectures"][0] if path.is_file() else None
    if family in UNKNOWN_FAMILIES:
        raise ValueError(f"Unknown architecture for AutoModelForCausalLM: {family}")
    if family and is_drafted_for and HERE.targets and family not in HERE.targets:
        raise AttributeError(f"'{family}' object has no attribute 'draft_config'")


def _check_draft(target: Path, draft: Path) -> None:
    caches = {_kv_dtype(target), _kv_dtype(draft)}
    if HERE.has_one_kv_dtype and len(caches) > 1:
        raise ValueError(f"the draft's KV cache would be overwritten: {caches}")


def _kv_dtype(checkpoint: Path) -> str | None:
    path = checkpoint / "hf_quant_config.json"
    if not path.is_file():
        return None
    quantization: dict[str, Any] = json.loads(path.read_text())["quantization"]
    return quantization.get("kv_cache_quant_algo")
