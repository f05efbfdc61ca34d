"""A chat as inputs of the ensemble."""

from __future__ import annotations

import json
from typing import Any

from specpipe.config.limits import ServedLimits
from specpipe.errors import RequestError
from specpipe.gateway.chat_schema import ChatRequest, Message, NamedTool
from specpipe.gateway.errors import ApiError
from specpipe.gateway.guide_inputs import guide_field
from specpipe.gateway.inputs import Ask, common_inputs
from specpipe.gateway.models import ServedModel
from specpipe.triton.serving import strict_json

_ROLES = {"developer": "system"}
"""OpenAI's newer name, which no template of an open model knows."""


def chat_asks(body: ChatRequest, served: ServedModel, *, shows_special: bool) -> list[Ask]:
    """Returns the answers that a body asks for.

    shows_special  special tokens are part of the text, for a parser that reads them
    """
    inputs = common_inputs(body, max_tokens=body.max_completion_tokens or served.limits.max_seq_len)
    inputs["messages"] = _dumps([template_message(m, served.limits) for m in body.messages])
    if body.logprobs:
        inputs |= {"return_log_probs": True, "num_top_log_probs": body.top_logprobs or 0}
        inputs["return_token_ids"] = True
    if body.tools:
        inputs["tools"] = _dumps(body.tool_list)
        inputs |= _tool_choice(body)
    if kwargs := template_kwargs(body):
        inputs["chat_template_kwargs"] = _dumps(kwargs)
    for name in ("add_generation_prompt", "continue_final_message"):
        if (value := getattr(body, name)) is not None:
            inputs[name] = value
    if body.prediction is not None and body.prediction.text:
        inputs["prediction"] = body.prediction.text
    if shows_special:
        inputs["skip_special_tokens"] = False
    return [Ask(inputs=inputs).seeded(index) for index in range(body.num_choices)]


def _tool_choice(body: ChatRequest) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        inputs["tool_choice"] = _dumps(choice.model_dump())
    elif choice is not None:
        inputs["tool_choice"] = choice
    if choice not in (None, "none", "auto") and (field := guide_field(body)) is not None:
        raise ApiError(
            f"{field} and a tool_choice that asks for a call exclude each other", param=field
        )
    if body.parallel_tool_calls is not None:
        inputs["parallel_tool_calls"] = body.parallel_tool_calls
    return inputs


def template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """Returns the variables of the chat template that a request sets."""
    kwargs: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            kwargs["enable_thinking"] = False
    return {**kwargs, **(body.chat_template_kwargs or {})}


def template_message(message: Message, limits: ServedLimits) -> dict[str, Any]:
    """Returns a message as templates take it: the arguments of a call as an object."""
    found = message.model_dump(exclude_unset=True)
    found["role"] = _ROLES.get(message.role, message.role)
    for call in found.get("tool_calls") or ():
        call["function"]["arguments"] = _arguments(call["function"]["arguments"], limits)
    return found


def _arguments(arguments: Any, limits: ServedLimits) -> Any:
    """Returns what a text of JSON holds; a text that is none stays, as the model wrote it."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return strict_json.parse("arguments", arguments.encode(), limits, expected="an object")
    except RequestError:
        return arguments


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
