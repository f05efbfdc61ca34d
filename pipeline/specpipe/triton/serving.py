"""The face that clients see: every tensor by name, and tensors turned into requests and back.

Names, types and shapes are those of the `ensemble` of NVIDIA's TensorRT-LLM templates from 0.20 on,
so clients and load tools written for it work unchanged. Added: `messages`, `num_draft_tokens`,
`min_p`, `priority`, `timeout_s`. An input without effect here passes with its neutral value and is
refused by name otherwise. Dims leave out the batch dimension, which is always 1.

`stop_words` and `bad_words` are arrays (a JSON array in HTTP `generate`) or one string; each is a
word as it stands, commas and spaces included. An empty one is ignored, since NVIDIA's examples
send `"stop_words": ""`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from specpipe.chat_messages import check_messages
from specpipe.errors import RequestError, ServerError
from specpipe.speculative.request import Chunk, Request, Sampling, Statistics

_LOGGER = logging.getLogger(__name__)

Tensors = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Tensor:
    """One input or output of a Triton model; -1 in `dims` is any size."""

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(_NUMPY_DTYPES[self.dtype])


@dataclass(frozen=True)
class Input(Tensor):
    """An input of the ensemble.

    `neutral` marks one that nothing here implements, and holds the values that ask for nothing:
    every element must be one of them, so an empty tensor passes.
    """

    neutral: tuple[Any, ...] | None = None


_NUMPY_DTYPES: dict[str, type[Any]] = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
}

ENSEMBLE_INPUTS: tuple[Input, ...] = (
    Input("text_input", "STRING"),
    Input("messages", "STRING"),
    Input("max_tokens", "INT32"),
    Input("num_draft_tokens", "INT32"),
    Input("stream", "BOOL"),
    Input("temperature", "FP32"),
    Input("top_k", "INT32"),
    Input("top_p", "FP32"),
    Input("min_p", "FP32"),
    Input("seed", "UINT64"),
    Input("repetition_penalty", "FP32"),
    Input("presence_penalty", "FP32"),
    Input("frequency_penalty", "FP32"),
    Input("min_tokens", "INT32"),
    Input("bad_words", "STRING", (-1,)),
    Input("stop_words", "STRING", (-1,)),
    Input("end_id", "INT32"),
    Input("pad_id", "INT32"),
    Input("priority", "INT32"),
    Input("timeout_s", "FP32"),
    Input("exclude_input_in_output", "BOOL"),
    Input("return_log_probs", "BOOL"),
    Input("return_perf_metrics", "BOOL"),
    Input("return_num_input_tokens", "BOOL"),
    Input("return_num_output_tokens", "BOOL"),
    Input("return_context_logits", "BOOL", neutral=(False,)),
    Input("return_generation_logits", "BOOL", neutral=(False,)),
    Input("num_return_sequences", "INT32", neutral=(1,)),
    Input("beam_width", "INT32", neutral=(1,)),
    Input("length_penalty", "FP32", neutral=(0.0, 1.0)),
    Input("decoder_text_input", "STRING", neutral=("",)),
    Input("embedding_bias_words", "STRING", (-1,), neutral=("",)),
    Input("embedding_bias_weights", "FP32", (-1,), neutral=(0.0,)),
    Input("prompt_embedding_table", "FP16", (-1, -1), neutral=()),
    Input("prompt_vocab_size", "INT32", neutral=(0,)),
    Input("prompt_table_extra_id", "UINT64", neutral=(0,)),
    Input("lora_task_id", "UINT64", neutral=(0,)),
    Input("lora_weights", "FP16", (-1, -1), neutral=()),
    Input("lora_config", "INT32", (-1, 3), neutral=()),
    Input("guided_decoding_guide_type", "STRING", neutral=("",)),
    Input("guided_decoding_guide", "STRING", neutral=("",)),
)

TEXT_OUTPUT = Tensor("text_output", "STRING", (-1,))

STATISTICS_OUTPUTS: tuple[Tensor, ...] = (
    Tensor("finish_reason", "STRING"),
    Tensor("error", "STRING"),
    Tensor("acceptance_rate", "FP32"),
    Tensor("total_accepted_draft_tokens", "INT32"),
    Tensor("total_draft_tokens", "INT32"),
    Tensor("num_steps", "INT32"),
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32"),
    Tensor("seed_used", "UINT64"),
    Tensor("is_lossless", "BOOL"),
)
"""In the last data response alone; `error` after a failure, `acceptance_rate` if drafted."""

UNFILLED_OUTPUTS: tuple[Tensor, ...] = (
    Tensor("context_logits", "FP32", (-1, -1)),
    Tensor("generation_logits", "FP32", (-1, -1, -1)),
    Tensor("kv_cache_alloc_new_blocks", "INT32"),
    Tensor("kv_cache_reused_blocks", "INT32"),
    Tensor("kv_cache_alloc_total_blocks", "INT32"),
    Tensor("arrival_time_ns", "INT64"),
    Tensor("first_scheduled_time_ns", "INT64"),
    Tensor("first_token_time_ns", "INT64"),
    Tensor("last_token_time_ns", "INT64"),
)
"""Of NVIDIA's ensemble, and never sent: declared so that a client may name them in its request."""

GENERATION_OUTPUTS: tuple[Tensor, ...] = (
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("batch_index", "INT32"),
    Tensor("sequence_index", "INT32"),
    *STATISTICS_OUTPUTS,
    *UNFILLED_OUTPUTS,
)

ENSEMBLE_OUTPUTS: tuple[Tensor, ...] = (TEXT_OUTPUT, *GENERATION_OUTPUTS)

# Between the models of the ensemble.
REQUEST = Tensor("request", "STRING")  # a Generation as JSON
INPUT_IDS = Tensor("input_ids", "INT32", (-1,))  # the prompt's token ids
TEXT = Tensor("text", "STRING")  # one chunk's text
STREAM_ID = Tensor("stream_id", "STRING")  # names the request that a chunk belongs to
OUTPUT_IDS = Tensor("output_ids", "INT32", (-1,))  # one chunk's token ids, where asked for
CANCEL = Tensor("cancel", "STRING")  # the stream id to cancel; such a request has no other input

PREPROCESSING_INPUTS: tuple[Tensor, ...] = ENSEMBLE_INPUTS
PREPROCESSING_OUTPUTS: tuple[Tensor, ...] = (REQUEST, INPUT_IDS)
SPECULATIVE_INPUTS: tuple[Tensor, ...] = (REQUEST, INPUT_IDS, CANCEL)
SPECULATIVE_OUTPUTS: tuple[Tensor, ...] = (TEXT, STREAM_ID, OUTPUT_IDS, *GENERATION_OUTPUTS)
POSTPROCESSING_INPUTS: tuple[Tensor, ...] = (TEXT, STREAM_ID)
POSTPROCESSING_OUTPUTS: tuple[Tensor, ...] = (TEXT_OUTPUT,)

_INPUTS_BY_NAME = {tensor.name: tensor for tensor in ENSEMBLE_INPUTS}
_TENSORS_BY_NAME = {
    tensor.name: tensor
    for tensor in (*PREPROCESSING_OUTPUTS, *SPECULATIVE_OUTPUTS, *ENSEMBLE_OUTPUTS, CANCEL)
}


class Encoder(Protocol):
    """What preprocessing needs of a tokenizer; `specpipe.text.Tokenizer` has it."""

    @property
    def end_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_messages(self, messages: list[dict[str, Any]]) -> list[int]: ...

    def encode_fragment(self, text: str) -> list[int]: ...

    def is_used(self, token_id: int) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A request as preprocessing hands it on: what the pair runs, and how to answer."""

    request: Request
    stream: bool = False
    return_token_ids: bool = False  # for verification, which asks without the ensemble

    def to_tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        """Everything but the request id; the prompt's token ids are a tensor of their own."""
        fields = dataclasses.asdict(self)
        fields["request"]["end_token_ids"] = sorted(self.request.end_token_ids)
        for name in ("request_id", "prompt_token_ids"):
            del fields["request"][name]
        return {
            REQUEST.name: as_array(REQUEST, [json.dumps(fields)]),
            INPUT_IDS.name: as_array(INPUT_IDS, self.request.prompt_token_ids),
        }

    @classmethod
    def from_tensors(cls, tensors: Tensors, *, request_id: str) -> Generation:
        """Reads what `to_tensors` wrote; raises RequestError for anything else."""
        text = _values(REQUEST, tensors)[0]
        prompt_token_ids = tuple(_values(INPUT_IDS, tensors))
        try:
            fields = json.loads(text)
            request = fields.pop("request")
            sampling = request.pop("sampling")
            bad_words = tuple(tuple(word) for word in sampling.pop("bad_words"))
            return cls(
                request=Request(
                    request_id=request_id,
                    prompt_token_ids=prompt_token_ids,
                    sampling=Sampling(bad_words=bad_words, **sampling),
                    end_token_ids=frozenset(request.pop("end_token_ids")),
                    stop_strings=tuple(request.pop("stop_strings")),
                    **request,
                ),
                **fields,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise RequestError(f"request is not what preprocessing writes: {exc!r}") from exc


def input_tensor(name: str) -> Input:
    """Returns an input of the ensemble by name."""
    refuse_unknown((name,))
    return _INPUTS_BY_NAME[name]


def parse_request(
    tensors: Tensors, tokenizer: Encoder, *, parameters: Iterable[str] = (), timeout_us: int = 0
) -> Generation:
    """Turns the inputs of one request into a Generation; raises RequestError with the field's name.

    `parameters` are the names of its request parameters, `timeout_us` the timeout that gRPC clients
    set for Triton (0: none). Greedy unless temperature > 0, top_k > 1, 0 < top_p < 1 or min_p > 0
    is given; temperature is then 1 unless given. A top_k or top_p of 0 is unset, as NVIDIA's
    clients send it.
    """
    _refuse_parameters(parameters)
    inputs = {name: _values(_INPUTS_BY_NAME[name], tensors) for name in tensors}
    for name, values in inputs.items():
        _check(_INPUTS_BY_NAME[name], values)

    def scalar(name: str, default: Any = None) -> Any:
        return inputs[name][0] if name in inputs else default

    max_tokens = scalar("max_tokens")
    if max_tokens is None:
        raise RequestError("max_tokens is missing: say how many tokens the answer may have")
    echo = scalar("exclude_input_in_output") is False
    if echo and "text_input" not in tensors:
        raise RequestError("exclude_input_in_output is false: only a text_input can be echoed")
    request = Request(
        request_id="",
        prompt_token_ids=tuple(_encode_prompt(scalar("text_input"), scalar("messages"), tokenizer)),
        max_tokens=max_tokens,
        sampling=_sampling(scalar, _words("bad_words", inputs), tokenizer),
        num_draft_tokens=scalar("num_draft_tokens"),
        end_token_ids=_end_token_ids(scalar("end_id"), tokenizer),
        stop_strings=tuple(_words("stop_words", inputs)),
        echo=echo,
        starts_text="messages" in tensors,
        return_log_probs=scalar("return_log_probs", False),
        priority=scalar("priority", 0),
        timeout_s=scalar("timeout_s", timeout_us / 1e6 or None),
    )
    return Generation(request=request, stream=scalar("stream", False))


def refuse_unknown(names: Iterable[str]) -> None:
    """Raises RequestError for a name that is no input of the ensemble; it says the nearest one."""
    for name in names:
        if name not in _INPUTS_BY_NAME:
            nearest = difflib.get_close_matches(name, _INPUTS_BY_NAME, n=1)
            advice = f"did you mean '{nearest[0]}'?" if nearest else "leave it out"
            raise RequestError(f"unknown request parameter '{name}': {advice}")


def _refuse_parameters(names: Iterable[str]) -> None:
    """A mistyped key of HTTP `generate` arrives as a request parameter, without a word of Triton.

    So does `id`, which is Triton's own and changes nothing.
    """
    names = [name for name in names if name != "id"]
    refuse_unknown(names)
    if names:
        raise RequestError(f"{names[0]} is an input: send it beside text_input, not as a parameter")


def _check(tensor: Input, values: Sequence[Any]) -> None:
    if tensor.dims == (1,) and len(values) != 1:
        raise RequestError(f"{tensor.name} has {len(values)} values: it takes one")
    for value in values:
        if tensor.neutral is not None and value not in tensor.neutral:
            allowed = " or ".join(str(neutral) for neutral in tensor.neutral if neutral != "")
            advice = f"send {allowed} or leave it out" if allowed else "leave it out"
            raise RequestError(f"{tensor.name} is not supported: {advice}")


def _encode_prompt(text: str | None, messages: str | None, tokenizer: Encoder) -> list[int]:
    if (text is None) == (messages is None):
        given = "neither was" if text is None else "both were"
        raise RequestError(f"text_input and messages: exactly one is needed, {given} given")
    if text is not None:
        if not text:
            raise RequestError("text_input is empty: a prompt needs at least one character")
        return tokenizer.encode(text)
    assert messages is not None
    expected = 'expected a JSON array such as [{"role": "user", "content": "Hello"}]'
    try:
        parsed = json.loads(messages)
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"messages is not JSON ({exc}): {expected}") from exc
    return tokenizer.encode_messages(check_messages(parsed))


def _end_token_ids(end_id: int | None, tokenizer: Encoder) -> frozenset[int]:
    """A given end id replaces the checkpoint's; -1 is none, for benchmarks."""
    if end_id is None:
        return tokenizer.end_token_ids
    if end_id < -1:
        raise RequestError(f"end_id is {end_id}; it must be a token id, or -1 for none")
    if end_id != -1 and not tokenizer.is_used(end_id):
        raise RequestError(f"end_id is {end_id}, which is no token of this model")
    return frozenset(() if end_id == -1 else (end_id,))


def _sampling(scalar: Any, bad_words: Sequence[str], tokenizer: Encoder) -> Sampling:
    top_k, top_p, min_p = scalar("top_k", 0), scalar("top_p", 0.0), scalar("min_p", 0.0)
    is_restricted = top_k > 1 or 0 < top_p < 1 or min_p > 0
    seed = scalar("seed")
    return Sampling(
        temperature=scalar("temperature", 1.0 if is_restricted else 0.0),
        top_k=top_k,
        top_p=top_p or 1.0,
        min_p=min_p,
        repetition_penalty=scalar("repetition_penalty", 1.0),
        presence_penalty=scalar("presence_penalty", 0.0),
        frequency_penalty=scalar("frequency_penalty", 0.0),
        min_tokens=scalar("min_tokens", 0),
        bad_words=tuple(tuple(tokenizer.encode_fragment(word)) for word in bad_words),
        seed=secrets.randbits(64) if seed is None else seed,
        is_seeded=seed is not None,
    )


def _words(name: str, inputs: Mapping[str, Sequence[str]]) -> list[str]:
    words = inputs.get(name, ())
    if not all(words):
        _LOGGER.warning("%s: an empty word is ignored", name)
    return [word for word in words if word]


def as_array(tensor: Tensor, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Returns the values in the tensor's dtype and shape, the batch dimension of 1 included."""
    shape = (1,) * len(tensor.dims) + (len(values),)
    return np.array(values, dtype=tensor.numpy_dtype).reshape(shape)


def _values(tensor: Tensor, tensors: Tensors) -> list[Any]:
    """Returns a tensor's elements as Python values."""
    if tensor.name not in tensors:
        raise RequestError(f"{tensor.name} is missing")
    array = tensors[tensor.name]
    if tensor.dtype == "STRING":
        return [_decode_utf8(tensor, value) for value in array.reshape(-1)]
    if array.dtype == np.float32:
        # The shortest decimal that means this float32: a temperature of 0.7 is 0.7 again, so that a
        # request draws the same tokens through Triton as in process.
        return [float(str(value)) for value in array.reshape(-1)]
    values: list[Any] = array.reshape(-1).tolist()
    return values


def _decode_utf8(tensor: Tensor, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise RequestError(f"{tensor.name} is not UTF-8: {exc}") from exc


@dataclass
class Answer:
    """Turns the chunks of one request into responses: one a chunk, or a single one."""

    generation: Generation
    stream_id: str
    num_responses: int = 0  # after the first one a failure can no longer be a Triton error
    _text: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _log_probs: list[float] = field(default_factory=list)
    _sum_log_probs: float = 0.0

    def add(self, chunk: Chunk) -> dict[str, np.ndarray[Any, Any]] | None:
        """Returns the next response's tensors, None when this chunk is kept for a later one.

        The response of a chunk with a finish_reason is the last. Raises ServerError when the
        request failed before its first response, which is the moment for a Triton error.
        """
        if chunk.finish_reason == "error" and not self.num_responses:
            raise ServerError(chunk.error or "the request failed")
        self._text.append(chunk.text)
        self._token_ids += chunk.token_ids
        self._log_probs += chunk.log_probs
        self._sum_log_probs += sum(chunk.log_probs)
        is_last = chunk.finish_reason is not None
        if not is_last and not (self.generation.stream and any(self._text)):
            return None
        values: dict[str, Sequence[Any]] = {
            "text": ["".join(self._text)],
            "stream_id": [self.stream_id],
            "batch_index": [0],
            "sequence_index": [0],
        }
        if self.generation.return_token_ids:
            values["output_ids"] = self._token_ids
        if self.generation.request.return_log_probs:
            values["output_log_probs"] = self._log_probs
            if is_last:
                values["cum_log_probs"] = [self._sum_log_probs]
        if is_last:
            values |= _last_values(chunk)
        self.num_responses += 1
        self._text, self._token_ids, self._log_probs = [], [], []
        return {name: as_array(_TENSORS_BY_NAME[name], listed) for name, listed in values.items()}


def _last_values(chunk: Chunk) -> dict[str, Sequence[Any]]:
    values: dict[str, Sequence[Any]] = {"finish_reason": [chunk.finish_reason]}
    if chunk.error is not None:
        values["error"] = [chunk.error]
    if chunk.statistics is not None:
        values |= {
            name: [value]
            for name, value in chunk.statistics.to_json().items()
            if name in _TENSORS_BY_NAME and value is not None
        }
    return values


def parse_statistics(values: Mapping[str, Any]) -> Statistics | None:
    """Returns what a last response reports, None when it reports nothing (a failed request)."""
    if "num_output_tokens" not in values:
        return None
    counts = {
        name: int(values[name])
        for name in (
            "num_input_tokens",
            "num_output_tokens",
            "num_steps",
            "total_draft_tokens",
            "total_accepted_draft_tokens",
            "seed_used",
        )
    }
    rate = values.get("acceptance_rate")
    return Statistics(
        **counts,
        acceptance_rate=None if rate is None else float(rate),
        is_lossless=bool(values.get("is_lossless", True)),
    )


def read_cancel(tensors: Tensors) -> str:
    """Returns the stream id of a request to cancel one."""
    stream_id: str = _values(CANCEL, tensors)[0]
    return stream_id
