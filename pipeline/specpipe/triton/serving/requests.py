"""The inputs of one request, turned into what the pair runs."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from specpipe.config.limits import ServedLimits
from specpipe.errors import RequestError, show
from specpipe.speculative.request import Request, Sampling, check_prompt_length
from specpipe.triton.secret import Signer
from specpipe.triton.serving.messages import parse_messages
from specpipe.triton.serving.request_sizes import check_bytes, check_sizes
from specpipe.triton.serving.tensors import (
    INPUT_IDS,
    INPUTS_BY_NAME,
    REQUEST,
    SIGNATURE,
    Input,
    Tensors,
    array_of,
    as_array,
    decode_utf8,
    signature_of,
    single_of,
    values_of,
)

_LOGGER = logging.getLogger(__name__)

_MESSAGES = INPUTS_BY_NAME["messages"]

_LONGEST_NAME = max(len(name) for name in INPUTS_BY_NAME)

_STAND_IN = (0,)
"""Stands for the prompt in the JSON, since the prompt travels as a tensor of its own."""


class RequestTokenizer(Protocol):
    """What preprocessing needs of a tokenizer; `specpipe.text.tokenizer.Tokenizer` has it."""

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
        """Returns all but the request id; the prompt's token ids are a tensor of their own."""
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
        """Returns what `to_tensors` wrote; raises RequestError for anything else.

        max_seq_len bounds how much of a prompt is read.
        """
        text = single_of(REQUEST, tensors)
        input_ids = array_of(INPUT_IDS, tensors)
        signer.check(signature_of(tensors), REQUEST.name, text, input_ids.tobytes())
        check_prompt_length(input_ids.size, max_seq_len)
        try:
            generation = _GENERATION.validate_json(text)
        except (ValidationError, UnicodeDecodeError) as exc:
            raise RequestError(
                f"request is not what preprocessing writes: {_first_fault(exc)}"
            ) from exc
        request = dataclasses.replace(
            generation.request,
            request_id=request_id,
            prompt_token_ids=tuple(input_ids.reshape(-1).tolist()),
        )
        return dataclasses.replace(generation, request=request)


_GENERATION = TypeAdapter(Generation)


def _first_fault(error: ValidationError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(key) for key in first["loc"])
    return f"{show(where)}: {show(first['msg'])}" if where else show(first["msg"])


def input_tensor(name: str) -> Input:
    """Returns an input of the ensemble by name."""
    check_known((name,))
    return INPUTS_BY_NAME[name]


def parse_request(
    tensors: Tensors,
    tokenizer: RequestTokenizer,
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
    _check_parameters(parameters, limits)
    inputs: dict[str, list[Any]] = {}
    for name, array in tensors.items():
        tensor = INPUTS_BY_NAME[name]
        if tensor.neutral is not None:
            _check_neutral(tensor, array, limits)
            continue
        check_sizes(tensor, array, limits)
        if tensor is not _MESSAGES:
            inputs[name] = values_of(tensor, tensors)

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


def check_known(names: Iterable[str]) -> None:
    """Raises RequestError for a name that is no input of the ensemble; it names the nearest one."""
    for name in names:
        if name not in INPUTS_BY_NAME:
            # Looking for one that is near takes time quadratic in the name.
            is_short = len(name) <= 2 * _LONGEST_NAME
            nearest = difflib.get_close_matches(name, INPUTS_BY_NAME, n=1) if is_short else []
            advice = f"did you mean '{nearest[0]}'?" if nearest else "leave it out"
            raise RequestError(f"unknown request parameter '{show(name)}': {advice}")


def _check_parameters(text: str, limits: ServedLimits) -> None:
    """Refuses request parameters: as such Triton delivers a mistyped key of HTTP `generate`.

    It delivers `id` so, too, which is its own and changes nothing.
    """
    num_bytes = len(text.encode())
    check_bytes("the request parameters have", num_bytes, "max_parameters_bytes", limits)
    try:
        parameters = json.loads(text or "{}")
    except (ValueError, RecursionError) as exc:
        raise RequestError("the request parameters are no JSON that can be read") from exc
    names = [name for name in parameters if name != "id"]
    check_known(names)
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
    tensors: Tensors, text: str | None, tokenizer: RequestTokenizer, limits: ServedLimits
) -> list[int]:
    messages = tensors.get(_MESSAGES.name)
    if (text is None) == (messages is None):
        how_many = "neither was" if text is None else "both were"
        raise RequestError(f"text_input and messages: exactly one is needed, {how_many} given")
    if text is not None:
        if not text:
            raise RequestError("text_input is empty: a prompt needs at least one character")
        return tokenizer.encode(text)
    data = decode_utf8(_MESSAGES, single_of(_MESSAGES, tensors)).encode()
    return tokenizer.encode_messages(
        parse_messages(data, limits), max_bytes=limits.max_prompt_bytes
    )


def _end_token_ids(end_id: int | None, tokenizer: RequestTokenizer) -> frozenset[int]:
    """Returns the end id that was given, else the checkpoint's; -1 is none, for benchmarks."""
    if end_id is None:
        return tokenizer.end_token_ids
    if end_id < -1:
        raise RequestError(f"end_id is {end_id}; it must be a token id, or -1 for none")
    if end_id != -1 and not tokenizer.is_used(end_id):
        raise RequestError(f"end_id is {end_id}, which is no token of this model")
    return frozenset(() if end_id == -1 else (end_id,))


def _sampling(scalar: Any, bad_words: Sequence[str], tokenizer: RequestTokenizer) -> Sampling:
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
