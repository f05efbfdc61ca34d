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
from typing import Any, ClassVar, Protocol

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from specpipe.errors import RequestError, ServerError, show, to_sentence
from specpipe.limits import ServedLimits
from specpipe.speculative.request import Chunk, Request, Sampling, Statistics, check_prompt_length
from specpipe.triton.messages import parse_messages
from specpipe.triton.request_sizes import check_bytes, check_sizes
from specpipe.triton.secret import Signer

_LOGGER = logging.getLogger(__name__)

_LONGEST_ID = 64  # characters of a stream id, and of a signature

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
    Tensor("draft_status", "STRING"),
    Tensor("total_accepted_draft_tokens", "INT32"),
    Tensor("total_draft_tokens", "INT32"),
    Tensor("num_steps", "INT32"),
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32"),
    Tensor("seed_used", "UINT64"),
    Tensor("is_lossless", "BOOL"),
)
"""In the last data response alone; `error` after a failure."""

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
CANCEL = Tensor("cancel", "STRING")  # the stream id to cancel, in a request that has no other
SIGNATURE = Tensor("signature", "STRING")  # says that a model of the ensemble made the rest

PREPROCESSING_INPUTS: tuple[Tensor, ...] = ENSEMBLE_INPUTS
PREPROCESSING_OUTPUTS: tuple[Tensor, ...] = (REQUEST, INPUT_IDS, SIGNATURE)
SPECULATIVE_INPUTS: tuple[Tensor, ...] = (REQUEST, INPUT_IDS, CANCEL, SIGNATURE)
SPECULATIVE_OUTPUTS: tuple[Tensor, ...] = (TEXT, STREAM_ID, OUTPUT_IDS, *GENERATION_OUTPUTS)
POSTPROCESSING_INPUTS: tuple[Tensor, ...] = (TEXT, STREAM_ID)
POSTPROCESSING_OUTPUTS: tuple[Tensor, ...] = (TEXT_OUTPUT,)

_INPUTS_BY_NAME = {tensor.name: tensor for tensor in ENSEMBLE_INPUTS}
_MESSAGES = _INPUTS_BY_NAME["messages"]
_TENSORS_BY_NAME = {
    tensor.name: tensor
    for tensor in (*PREPROCESSING_OUTPUTS, *SPECULATIVE_OUTPUTS, *ENSEMBLE_OUTPUTS, CANCEL)
}


class Encoder(Protocol):
    """What preprocessing needs of a tokenizer; `specpipe.text.Tokenizer` has it."""

    @property
    def end_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_messages(
        self, messages: list[dict[str, Any]], *, max_bytes: int | None = None
    ) -> list[int]: ...

    def encode_fragment(self, text: str) -> list[int]: ...

    def is_used(self, token_id: int) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A request as preprocessing hands it on: what the pair runs, and how to answer."""

    request: Request
    stream: bool = False
    return_token_ids: bool = False  # for verification, which asks without the ensemble

    # For reading it: nothing is converted, and nothing is passed over.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    def to_tensors(self, signer: Signer) -> dict[str, np.ndarray[Any, Any]]:
        """Everything but the request id; the prompt's token ids are a tensor of their own."""
        request = dataclasses.replace(self.request, request_id="", prompt_token_ids=_STAND_IN)
        fields = dataclasses.asdict(dataclasses.replace(self, request=request))
        fields["request"]["end_token_ids"] = sorted(request.end_token_ids)
        text = json.dumps(fields)
        input_ids = as_array(INPUT_IDS, self.request.prompt_token_ids)
        signature = signer.sign(REQUEST.name, text.encode(), input_ids.tobytes())
        return {
            REQUEST.name: as_array(REQUEST, [text]),
            INPUT_IDS.name: input_ids,
            SIGNATURE.name: as_array(SIGNATURE, [signature]),
        }

    @classmethod
    def from_tensors(
        cls, tensors: Tensors, *, request_id: str, signer: Signer, max_seq_len: int
    ) -> Generation:
        """Reads what `to_tensors` wrote; raises RequestError for anything else.

        max_seq_len bounds what is looked at of a prompt.
        """
        text = _single(REQUEST, tensors)
        input_ids = _array(INPUT_IDS, tensors)
        signer.check(_signature(tensors), REQUEST.name, text, input_ids.tobytes())
        check_prompt_length(input_ids.size, max_seq_len)
        try:
            read = _GENERATION.validate_json(text)
        except (ValidationError, UnicodeDecodeError) as exc:
            raise RequestError(
                f"request is not what preprocessing writes: {_first_fault(exc)}"
            ) from exc
        request = dataclasses.replace(
            read.request,
            request_id=request_id,
            prompt_token_ids=tuple(input_ids.reshape(-1).tolist()),
        )
        return dataclasses.replace(read, request=request)


_GENERATION = TypeAdapter(Generation)

_STAND_IN = (0,)
"""For the prompt, where it travels as a tensor of its own."""


def _first_fault(error: ValidationError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(key) for key in first["loc"])
    return f"{show(where)}: {show(first['msg'])}" if where else show(first["msg"])


def input_tensor(name: str) -> Input:
    """Returns an input of the ensemble by name."""
    refuse_unknown((name,))
    return _INPUTS_BY_NAME[name]


def parse_request(
    tensors: Tensors,
    tokenizer: Encoder,
    *,
    limits: ServedLimits,
    parameters: str = "",
    timeout_us: int = 0,
) -> Generation:
    """Turns the inputs of one request into a Generation; raises RequestError with the field's name.

    What is too large is refused before anything is done with it. `parameters` are the request's, as
    the JSON that Triton gives, `timeout_us` the timeout that gRPC clients set for Triton (0: none).
    Greedy unless temperature > 0, top_k > 1, 0 < top_p < 1 or min_p > 0 is given; temperature is
    then 1 unless given. A top_k or top_p of 0 is unset, as NVIDIA's clients send it.
    """
    _refuse_parameters(parameters, limits)
    inputs: dict[str, list[Any]] = {}
    for name, array in tensors.items():
        tensor = _INPUTS_BY_NAME[name]
        if tensor.neutral is not None:
            _check_neutral(tensor, array, limits)
            continue
        check_sizes(tensor, array, limits)
        if tensor is not _MESSAGES:
            inputs[name] = _values(tensor, tensors)

    def scalar(name: str, default: Any = None) -> Any:
        return inputs[name][0] if name in inputs else default

    max_tokens = scalar("max_tokens")
    if max_tokens is None:
        raise RequestError("max_tokens is missing: say how many tokens the answer may have")
    echo = scalar("exclude_input_in_output") is False
    if echo and "text_input" not in tensors:
        raise RequestError("exclude_input_in_output is false: only a text_input can be echoed")
    prompt_token_ids = _encode_prompt(tensors, scalar("text_input"), tokenizer, limits)
    check_prompt_length(len(prompt_token_ids), limits.max_seq_len)
    request = Request(
        request_id="",
        prompt_token_ids=tuple(prompt_token_ids),
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
            # Looking for one that is near takes time quadratic in the name.
            is_short = len(name) <= 2 * _LONGEST_NAME
            nearest = difflib.get_close_matches(name, _INPUTS_BY_NAME, n=1) if is_short else []
            advice = f"did you mean '{nearest[0]}'?" if nearest else "leave it out"
            raise RequestError(f"unknown request parameter '{show(name)}': {advice}")


_LONGEST_NAME = max(len(name) for name in _INPUTS_BY_NAME)


def _refuse_parameters(text: str, limits: ServedLimits) -> None:
    """A mistyped key of HTTP `generate` arrives as a request parameter, without a word of Triton.

    So does `id`, which is Triton's own and changes nothing.
    """
    num_bytes = len(text.encode())
    check_bytes("the request parameters have", num_bytes, "max_parameters_bytes", limits)
    try:
        parameters = json.loads(text or "{}")
    except (ValueError, RecursionError) as exc:
        raise RequestError("the request parameters are no JSON that can be read") from exc
    names = [name for name in parameters if name != "id"]
    refuse_unknown(names)
    if names:
        raise RequestError(f"{names[0]} is an input: send it beside text_input, not as a parameter")


def _check_neutral(tensor: Input, array: np.ndarray[Any, Any], limits: ServedLimits) -> None:
    """Refuses an input without effect here, unless it asks for nothing."""
    assert tensor.neutral is not None
    # Strings as Triton delivers them, too.
    encoded = (value.encode() for value in tensor.neutral if isinstance(value, str))
    neutral = (*tensor.neutral, *encoded)
    is_small = array.size <= limits.max_words
    if not is_small or any(value not in neutral for value in array.reshape(-1).tolist()):
        allowed = " or ".join(str(value) for value in tensor.neutral if value != "")
        advice = f"send {allowed} or leave it out" if allowed else "leave it out"
        raise RequestError(f"{tensor.name} is not supported: {advice}")


def _encode_prompt(
    tensors: Tensors, text: str | None, tokenizer: Encoder, limits: ServedLimits
) -> list[int]:
    messages = tensors.get(_MESSAGES.name)
    if (text is None) == (messages is None):
        given = "neither was" if text is None else "both were"
        raise RequestError(f"text_input and messages: exactly one is needed, {given} given")
    if text is not None:
        if not text:
            raise RequestError("text_input is empty: a prompt needs at least one character")
        return tokenizer.encode(text)
    data = _decode_utf8(_MESSAGES, _single(_MESSAGES, tensors)).encode()
    return tokenizer.encode_messages(
        parse_messages(data, limits), max_bytes=limits.max_prompt_bytes
    )


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
    array = _array(tensor, tensors)
    if tensor.dtype == "STRING":
        return [_decode_utf8(tensor, value) for value in array.reshape(-1)]
    if array.dtype == np.float32:
        # The shortest decimal that means this float32: a temperature of 0.7 is 0.7 again, so that a
        # request draws the same tokens through Triton as in process.
        return [float(str(value)) for value in array.reshape(-1)]
    values: list[Any] = array.reshape(-1).tolist()
    return values


def _array(tensor: Tensor, tensors: Tensors) -> np.ndarray[Any, Any]:
    """Returns a tensor that must be there, in its dtype."""
    array = tensors.get(tensor.name)
    if array is None:
        raise RequestError(f"{tensor.name} is missing")
    if array.dtype != tensor.numpy_dtype:
        raise RequestError(f"{tensor.name} is {array.dtype}; it must be {tensor.dtype}")
    return array


def _single(tensor: Tensor, tensors: Tensors) -> bytes:
    """Returns the only element of a tensor of strings."""
    array = _array(tensor, tensors)
    if array.size != 1:
        raise RequestError(f"{tensor.name} has {array.size} values: it takes one")
    value = array.reshape(-1)[0]
    return value if isinstance(value, bytes) else str(value).encode()


def _signature(tensors: Tensors) -> bytes:
    """Returns the signature of a request; b"" where there is none, or none that could be one."""
    signature = _single(SIGNATURE, tensors) if SIGNATURE.name in tensors else b""
    return signature if len(signature) <= _LONGEST_ID else b""


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
        values["error"] = [to_sentence(chunk.error)]
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
    return Statistics(
        **counts,
        # Servers before these two were always sent leave them out.
        acceptance_rate=float(values.get("acceptance_rate", 0.0)),
        draft_status=values.get("draft_status"),
        is_lossless=bool(values.get("is_lossless", True)),
    )


def read_chunk(tensors: Tensors) -> tuple[np.ndarray[Any, Any], bytes]:
    """Returns the text of a chunk as it came, and the stream id of its request."""
    stream_id = _single(STREAM_ID, tensors)
    if len(stream_id) > _LONGEST_ID:
        raise RequestError(f"stream_id has {len(stream_id)} bytes; it may have {_LONGEST_ID}")
    return _array(TEXT, tensors), stream_id


def write_cancel(stream_id: bytes, signer: Signer) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the tensors that cancel a request."""
    return {
        CANCEL.name: as_array(CANCEL, [stream_id]),
        SIGNATURE.name: as_array(SIGNATURE, [signer.sign(CANCEL.name, stream_id)]),
    }


def read_cancel(tensors: Tensors, signer: Signer) -> str:
    """Returns the stream id of a request to cancel one."""
    stream_id = _single(CANCEL, tensors)
    signer.check(_signature(tensors), CANCEL.name, stream_id)
    return _decode_utf8(CANCEL, stream_id)
