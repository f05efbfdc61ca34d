"""What TensorRT-LLM's C++ Triton backend does with a request, over any model that has logits.

Its tensors are those of `contract.py`, its rules those that the sources cited there and in
`engine_calls.py` state; a request that would be refused, or do harm unnoticed, is refused here. One
request is one `Generation`, advanced a step at a time, as in-flight batching does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from specpipe.runtimes.tensorrt_llm.engines import contract
from specpipe.runtimes.tensorrt_llm.engines.engine_calls import EngineCallError
from specpipe.speculative.request import Sampling
from specpipe.speculative.warp import softmax, warp

Tensors = Mapping[str, "np.ndarray[Any, Any]"]

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "FP16": np.float16,
}
_HONOURED = {
    "input_ids",
    "input_lengths",
    "request_output_len",
    "exclude_input_in_output",
    "end_id",
    "min_tokens",
    "draft_input_ids",
    "draft_logits",
    "bad_words_list",
    "runtime_top_k",
    "runtime_top_p",
    "temperature",
    "repetition_penalty",
    "seed",
    "return_generation_logits",
    "streaming",
    "stop",
}


Drops = Literal["none", "some", "all", "random"]


class Refused(Exception):
    """The backend's answer is an error."""


class Scorer(Protocol):
    """The model of an engine."""

    @property
    def vocab_size(self) -> int: ...

    def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray[Any, Any]:
        """Raw logits [num_rows, V] that follow each of the last num_rows tokens."""


@dataclass(frozen=True)
class EngineLimits:
    """What an engine was built for, from its config.json; max_draft_len 0: it cannot verify.

    drops  which draft tokens the scheduler takes away, the last ones first, as it does where they
           do not fit (cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp, fitDraftTokens)
    """

    max_seq_len: int
    max_draft_len: int = 0
    logits_dtype: str = "FP32"
    gathers_logits: bool = False
    is_decoupled: bool = False
    drops: Drops = "none"
    drop_seed: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], *, is_decoupled: bool) -> EngineLimits:
        """Raises Refused for an engine that TensorRT-LLM would not load."""
        build = config["build_config"]
        if not build["plugin_config"]["use_paged_context_fmha"]:
            raise Refused("KV cache block reuse needs paged context FMHA")
        verifies = build["speculative_decoding_mode"] == 2
        if verifies and build["max_draft_len"] == 0:
            raise Refused("max_draft_len must be above 0 for draft_tokens_external")
        return cls(
            max_seq_len=build["max_seq_len"],
            max_draft_len=build["max_draft_len"] if verifies else 0,
            logits_dtype=contract.logits_type(config["pretrained_config"]["logits_dtype"]),
            gathers_logits=build["gather_generation_logits"],
            is_decoupled=is_decoupled,
            **config.get("stand_in", {}),
        )

    def num_kept(self, most: int, *seeds: int) -> int:
        """How many draft tokens the scheduler leaves to a request, whichever tokens they are."""
        random = np.random.default_rng([self.drop_seed, most, *seeds])
        kept = {
            "none": most,
            "some": int(random.integers(1, max(most, 2))),
            "all": 0,
            "random": int(random.integers(0, most + 1)),
        }
        return min(kept[self.drops], most)


@dataclass
class Generation:
    """A request to one engine while it runs."""

    prompt: list[int]
    num_tokens: int
    sampling: Sampling
    end_id: int
    draft_ids: list[int]
    draft_logits: np.ndarray[Any, Any] | None
    returns_logits: bool
    is_streaming: bool
    echoes: bool
    seed: int
    output: list[int] = field(default_factory=list)
    logits: list[np.ndarray[Any, Any]] = field(default_factory=list)
    is_done: bool = False
    num_sent: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def step(self, model: Scorer) -> None:
        """One pass over the model: a token, or the verification of all draft tokens."""
        context = [*self.prompt, *self.output, *self.draft_ids]
        rows = model.logits(context, len(self.draft_ids) + 1)
        for row, logits in enumerate(rows):
            if not np.isfinite(logits.max()):
                raise Refused("the logits are not finite")
            token_id, is_accepted = self._decide(logits, row)
            if token_id == self.end_id:
                self.is_done = True  # and the length does not grow
                return
            self.output.append(token_id)
            self.logits.append(logits)
            if len(self.output) == self.num_tokens:
                self.is_done = True
                return
            if not is_accepted:
                break
        if self.draft_ids:
            self.is_done = True

    def _decide(self, logits: np.ndarray[Any, Any], row: int) -> tuple[int, bool]:
        """The token of one row, and whether it is the draft's."""
        scores = warp(
            logits,
            self.sampling,
            prompt=self.prompt,
            output=self.output,
            end_token_ids=(self.end_id,),
        )
        if row < len(self.draft_ids) and self.draft_logits is not None:
            return self._compare(scores, row)
        token_id = int(scores.argmax()) if self.sampling.is_greedy else self._draw(softmax(scores))
        return token_id, row < len(self.draft_ids) and token_id == self.draft_ids[row]

    def _compare(self, scores: np.ndarray[Any, Any], row: int) -> tuple[int, bool]:
        assert self.draft_logits is not None
        draft_id = self.draft_ids[row]
        target = softmax(scores)
        draft = softmax(self.draft_logits[row].astype(np.float64))
        if self._random.random() * draft[draft_id] < target[draft_id]:
            return draft_id, True
        return self._draw(np.maximum(target - draft, 0.0)), False

    def _draw(self, weights: np.ndarray[Any, Any]) -> int:
        return int(self._random.choice(len(weights), p=weights / weights.sum()))

    def response(self) -> dict[str, np.ndarray[Any, Any]]:
        """What was not sent yet, or at the end all of a request that does not stream."""
        new = self.output[self.num_sent :] if self.is_streaming else self.output
        self.num_sent = len(self.output)
        shown = [*self.prompt, *new] if self.echoes and not self.is_streaming else new
        tensors = {
            "output_ids": np.array([[shown]], np.int32).reshape(1, 1, len(shown)),
            "sequence_length": np.array([[len(shown)]], np.int32),
        }
        if self.returns_logits:
            logits = np.array(self.logits, np.float32).reshape(1, 1, len(self.logits), -1)
            tensors["generation_logits"] = logits
        return tensors


def is_stop(tensors: Tensors) -> bool:
    return "stop" in tensors and bool(tensors["stop"].reshape(-1)[0])


def read(tensors: Tensors, limits: EngineLimits, vocab_size: int) -> Generation:
    """The generation that a request asks for; raises Refused."""
    inputs = {tensor.name: tensor for tensor in contract.inputs("1.2.1")}
    for name, array in tensors.items():
        if name not in inputs:
            raise Refused(f"unexpected inference input '{name}'")
        expected = inputs[name].dtype
        expected = limits.logits_dtype if expected == contract.LOGITS else expected
        if array.dtype != _DTYPES[expected]:
            raise Refused(f"{name} is {array.dtype}, the model has {expected}")
        dims = () if inputs[name].is_scalar else inputs[name].dims
        if array.shape[0] != 1 or array.ndim != len(dims) + 1:
            raise Refused(f"{name} has shape {array.shape}, the model has [1, {dims}]")
        if any(want not in (-1, has) for want, has in zip(dims, array.shape[1:], strict=True)):
            raise Refused(f"{name} has shape {array.shape}, the model has [1, {dims}]")
        if name not in _HONOURED:
            raise Refused(f"the stand-in does not know what {name} does")

    def scalar(name: str, default: Any) -> Any:
        return tensors[name].reshape(-1)[0].item() if name in tensors else default

    for name in ("input_ids", "input_lengths", "request_output_len"):
        if name not in tensors:
            raise Refused(f"{name} is not present in the request")
    prompt = tensors["input_ids"].reshape(-1).tolist()
    num_tokens = scalar("request_output_len", 0)
    if not prompt or scalar("input_lengths", 0) != len(prompt) or num_tokens < 1:
        raise Refused("input_ids, input_lengths and request_output_len do not go together")
    if not all(0 <= i < vocab_size for i in prompt):
        raise Refused("a token id is outside the vocabulary")
    is_streaming = scalar("streaming", False)
    if is_streaming and not limits.is_decoupled:
        raise Refused("Streaming is only supported if model is deployed using decoupled mode.")
    draft_ids = _draft_ids(tensors, limits)
    if len(prompt) + num_tokens > limits.max_seq_len:
        raise Refused(f"{len(prompt)} + {num_tokens} tokens, max_seq_len {limits.max_seq_len}")
    returns_logits = scalar("return_generation_logits", False)
    if returns_logits and not limits.gathers_logits:
        raise Refused("To return generation logits, gather_generation_logits must be enabled")
    end_id, min_tokens = scalar("end_id", -1), scalar("min_tokens", 0)
    if min_tokens and end_id < 0:
        raise Refused("min_tokens without an end id writes outside the logits")
    top_k, top_p = scalar("runtime_top_k", 0), scalar("runtime_top_p", 0.0)
    is_greedy = top_k == 1 or (top_k == 0 and top_p == 0.0)
    if not is_greedy and "seed" not in tensors:
        raise Refused("all requests without a seed draw the same random numbers")
    draft_logits = None
    if "draft_logits" in tensors:
        draft_logits = tensors["draft_logits"][0]
        if draft_logits.shape != (len(draft_ids), vocab_size):
            raise Refused(f"draft_logits are {draft_logits.shape}")
    del draft_ids[limits.num_kept(len(draft_ids), scalar("seed", 0), *prompt) :]
    return Generation(
        prompt=prompt,
        num_tokens=num_tokens,
        sampling=Sampling(
            temperature=0.0 if is_greedy else scalar("temperature", 1.0),
            top_k=top_k,
            top_p=top_p or 1.0,
            repetition_penalty=scalar("repetition_penalty", 1.0),
            min_tokens=min_tokens,
            bad_words=_words(tensors),
        ),
        end_id=end_id,
        draft_ids=draft_ids,
        draft_logits=draft_logits,
        returns_logits=returns_logits,
        is_streaming=is_streaming,
        echoes=not scalar("exclude_input_in_output", False),
        seed=scalar("seed", 0),
    )


def _draft_ids(tensors: Tensors, limits: EngineLimits) -> list[int]:
    if "draft_input_ids" not in tensors:
        return []
    draft_ids: list[int] = tensors["draft_input_ids"].reshape(-1).tolist()
    if not draft_ids:
        raise Refused("a request with an empty list of draft tokens")
    if len(draft_ids) > limits.max_draft_len:
        raise Refused(
            f"Draft tokens length ({len(draft_ids)}) exceeds maximum draft tokens length "
            f"({limits.max_draft_len})."
        )
    return draft_ids


def _words(tensors: Tensors) -> tuple[tuple[int, ...], ...]:
    if "bad_words_list" not in tensors:
        return ()
    ids, ends = tensors["bad_words_list"][0].tolist()
    words, start = [], 0
    for end in ends:
        if end < 0:
            break
        words.append(tuple(ids[start:end]))
        start = end
    if start != len(ids):
        raise Refused("bad_words_list has ids that belong to no word")
    return tuple(words)


def _reshaped(tensors: Tensors) -> Tensors:
    """What Triton makes of [1, 1] on its way into the backend, as the model's config asks."""
    scalars = {tensor.name for tensor in contract.inputs("1.2.1") if tensor.is_scalar}
    return {n: a[:, 0] if n in scalars and a.ndim == 2 else a for n, a in tensors.items()}


class StandInModel:
    """An `EngineModel` in this process, which shows what it was asked for and what it runs."""

    def __init__(self, name: str, model: Scorer, limits: EngineLimits) -> None:
        self.name, self.model, self.limits = name, model, limits
        self.requests: list[Tensors] = []
        self.running: dict[str, Generation] = {}
        self._lock = threading.Lock()

    def generate(
        self, request_id: str, tensors: Tensors, outputs: Sequence[str]
    ) -> Iterator[Tensors]:
        assert {"output_ids", "sequence_length"} <= {*outputs}
        try:
            with self._lock:
                self.requests.append(tensors)
                if request_id in self.running:
                    raise Refused(f"request {request_id} runs already")
                generation = read(_reshaped(tensors), self.limits, self.model.vocab_size)
                self.running[request_id] = generation
            while not generation.is_done:
                with self._lock:
                    generation.step(self.model)
                if generation.is_streaming or generation.is_done:
                    yield {k: v for k, v in generation.response().items() if k in outputs}
        except Refused as exc:
            raise EngineCallError(f"the {self.name} model failed: {exc}") from exc
        finally:
            self.running.pop(request_id, None)

    def stop(self, request_id: str) -> None:
        with self._lock:
            if request_id in self.running:
                self.running[request_id].is_done = True
