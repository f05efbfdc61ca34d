"""The conversation of a request: its messages, and what the chat template is told besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specpipe.config.limits import ServedLimits
from specpipe.errors import RequestError, show
from specpipe.text.chat_arguments import ChatArguments
from specpipe.triton.serving.inputs import Inputs
from specpipe.triton.serving.messages import (
    ToolChoice,
    parse_messages,
    parse_template_kwargs,
    parse_tool_choice,
    parse_tools,
)

_OF_MESSAGES = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a chat template is given.

    called_tools  those of which the answer must be a call, or several where calls are parallel;
                  none: it may be any text
    """

    messages: list[dict[str, Any]]
    arguments: ChatArguments
    called_tools: Sequence[Mapping[str, Any]] = ()
    calls_are_parallel: bool = True


def read_conversation(inputs: Inputs, limits: ServedLimits) -> Conversation | None:
    """Returns the conversation of a request; None where its prompt is no conversation.

    Raises RequestError for an input that says something about a conversation that is not there.
    """
    if "messages" not in inputs:
        for name in _OF_MESSAGES:
            if name in inputs:
                raise RequestError(f"{name} says how messages are rendered: send it with messages")
        return None
    tools = parse_tools(inputs.json("tools"), limits) if "tools" in inputs else []
    choice = ToolChoice()
    if "tool_choice" in inputs:
        choice = parse_tool_choice(inputs.json("tool_choice"), limits)
    variables = {}
    if "chat_template_kwargs" in inputs:
        variables = parse_template_kwargs(inputs.json("chat_template_kwargs"), limits)
    return Conversation(
        messages=parse_messages(inputs.json("messages"), limits),
        arguments=ChatArguments(
            tools=() if choice.mode == "none" else tools,
            variables=variables,
            add_generation_prompt=inputs.one("add_generation_prompt"),
            continue_final_message=inputs.one("continue_final_message", False),
        ),
        called_tools=_called(tools, choice),
        calls_are_parallel=choice.name is None and inputs.one("parallel_tool_calls", True),
    )


def _called(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> list[Mapping[str, Any]]:
    if choice.mode != "required":
        return []
    called = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    if not called:
        named = "is required" if choice.name is None else f"names '{show(choice.name)}'"
        raise RequestError(f"tool_choice {named}: send such a function in tools")
    return called
