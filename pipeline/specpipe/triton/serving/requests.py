"""The inputs of one request, turned into what the pair runs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from specpipe.config.limits import ServedLimits
from specpipe.errors import RequestError, show
from specpipe.speculative.request import Request, check_prompt_length
from specpipe.triton.secret import Signer
from specpipe.triton.serving.conversation import Conversation, read_conversation
from specpipe.triton.serving.guides import CallFormat, guide_of_turn, read_guide
from specpipe.triton.serving.inputs import Inputs, check_parameters
from specpipe.triton.serving.request_tokenizer import RequestTokenizer, check_used
from specpipe.triton.serving.sampling import read_end_token_ids, read_sampling, words_of
from specpipe.triton.serving.tensor_values import (
    Tensors,
    array_of,
    as_array,
    signature_of,
    single_of,
)
from specpipe.triton.serving.tensors import PROMPT_TOKEN_IDS, REQUEST, SIGNATURE

_PROMPTS = ("text_input", "input_ids", "messages")

_END_TOKENS = 64  # of a prompt; more than a mark of thoughts and the lines after it take

_STAND_IN = (0,)
"""Stands for the prompt in the JSON, since the prompt travels as a tensor of its own."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A request as preprocessing hands it on: what the pair runs, and how to answer."""

    request: Request
    stream: bool = False
    return_token_ids: bool = False

    # For reading it: nothing is converted, and nothing is passed over.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    def to_tensors(self, signer: Signer) -> dict[str, np.ndarray[Any, Any]]:
        """Returns all but the request id; the prompt's token ids are a tensor of their own."""
        request = dataclasses.replace(self.request, request_id="", prompt_token_ids=_STAND_IN)
        fields = dataclasses.asdict(dataclasses.replace(self, request=request))
        fields["request"]["end_token_ids"] = sorted(request.end_token_ids)
        text = json.dumps(fields)
        prompt_token_ids = as_array(PROMPT_TOKEN_IDS, self.request.prompt_token_ids)
        signature = signer.sign(REQUEST.name, text.encode(), prompt_token_ids.tobytes())
        return {
            REQUEST.name: as_array(REQUEST, [text]),
            PROMPT_TOKEN_IDS.name: prompt_token_ids,
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
        prompt_token_ids = array_of(PROMPT_TOKEN_IDS, tensors)
        signer.check(signature_of(tensors), REQUEST.name, text, prompt_token_ids.tobytes())
        check_prompt_length(prompt_token_ids.size, max_seq_len)
        try:
            generation = _GENERATION.validate_json(text)
        except (ValidationError, UnicodeDecodeError) as exc:
            raise RequestError(
                f"request is not what preprocessing writes: {_first_fault(exc)}"
            ) from exc
        request = dataclasses.replace(
            generation.request,
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids.reshape(-1).tolist()),
        )
        return dataclasses.replace(generation, request=request)


_GENERATION = TypeAdapter(Generation)


def _first_fault(error: ValidationError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(key) for key in first["loc"])
    return f"{show(where)}: {show(first['msg'])}" if where else show(first["msg"])


def parse_request(
    tensors: Tensors,
    tokenizer: RequestTokenizer,
    *,
    limits: ServedLimits,
    calls: CallFormat,
    parameters: str = "",
    timeout_us: int = 0,
) -> Generation:
    """Turns the inputs of one request into a Generation; raises RequestError with the field's name.

    What is too large is refused before anything is done with it. calls is how the model writes
    calls of tools. `parameters` are the request's, as the JSON that Triton gives, `timeout_us` the
    timeout that gRPC clients set for Triton (0: none).
    """
    check_parameters(parameters, limits)
    inputs = Inputs(tensors, limits)
    max_tokens = inputs.one("max_tokens")
    if max_tokens is None:
        raise RequestError("max_tokens is missing: say how many tokens the answer may have")
    _check_one_prompt(inputs)
    echo = inputs.one("exclude_input_in_output") is False
    if echo and "messages" in inputs:
        raise RequestError("exclude_input_in_output is false: messages cannot be echoed")
    num_top_log_probs = inputs.one("num_top_log_probs", 0)
    conversation = read_conversation(inputs, limits)
    prompt_token_ids = _encode_prompt(inputs, conversation, tokenizer, limits)
    guide = read_guide(inputs, tokenizer.guides)
    if conversation is not None:
        prompt = tokenizer.decode(prompt_token_ids[-_END_TOKENS:], skip_special_tokens=False)
        guide = guide_of_turn(guide, conversation, prompt, calls, tokenizer.guides)
    request = Request(
        request_id="",
        prompt_token_ids=tuple(prompt_token_ids),
        max_tokens=max_tokens,
        sampling=read_sampling(inputs, tokenizer),
        num_draft_tokens=inputs.one("num_draft_tokens"),
        end_token_ids=read_end_token_ids(inputs, tokenizer),
        stop_strings=tuple(words_of("stop_words", inputs)),
        echo=echo,
        starts_text=(
            conversation is not None and not conversation.arguments.continue_final_message
        ),
        return_log_probs=inputs.one("return_log_probs", False) or num_top_log_probs > 0,
        num_top_log_probs=num_top_log_probs,
        return_prompt_log_probs=inputs.one("return_prompt_log_probs", False),
        guide=guide,
        prediction_token_ids=_encode_prediction(inputs, tokenizer, limits),
        skip_special_tokens=inputs.one("skip_special_tokens", True),
        priority=inputs.one("priority", 0),
        timeout_s=inputs.one("timeout_s", timeout_us / 1e6 or None),
        cache_salt=inputs.one("cache_salt", ""),
    )
    return Generation(
        request=request,
        stream=inputs.one("stream", False),
        return_token_ids=inputs.one("return_token_ids", False),
    )


def _check_one_prompt(inputs: Inputs) -> None:
    given = [name for name in _PROMPTS if name in inputs]
    if len(given) != 1:
        how_many = f"{' and '.join(given)} were" if given else "none was"
        raise RequestError(
            f"text_input, input_ids and messages: exactly one is needed, {how_many} given"
        )


def _encode_prompt(
    inputs: Inputs,
    conversation: Conversation | None,
    tokenizer: RequestTokenizer,
    limits: ServedLimits,
) -> list[int]:
    if conversation is not None:
        token_ids = tokenizer.encode_messages(
            conversation.messages, conversation.arguments, max_bytes=limits.max_prompt_bytes
        )
    elif "input_ids" in inputs:
        token_ids = list(inputs.many("input_ids"))
        if not token_ids:
            raise RequestError("input_ids is empty: a prompt needs at least one token")
        check_used("input_ids", token_ids, tokenizer)
    else:
        text = inputs.one("text_input")
        if not text:
            raise RequestError("text_input is empty: a prompt needs at least one character")
        token_ids = tokenizer.encode(text)
    check_prompt_length(len(token_ids), limits.max_seq_len)
    return token_ids


def _encode_prediction(
    inputs: Inputs, tokenizer: RequestTokenizer, limits: ServedLimits
) -> tuple[int, ...]:
    token_ids = tokenizer.encode_fragment(inputs.one("prediction", ""))
    if len(token_ids) > limits.max_seq_len:
        raise RequestError(
            f"prediction has {len(token_ids)} tokens; prompt and output together may have "
            f"{limits.max_seq_len} (engine.max_seq_len)"
        )
    return tuple(token_ids)
