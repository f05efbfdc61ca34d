"""The inputs of a conversation, which are JSON: `messages`, and what else a template is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specpipe.config.limits import ServedLimits
from specpipe.errors import RequestError
from specpipe.text.chat_messages import check_messages
from specpipe.text.tools.functions import functions_of
from specpipe.triton.serving import strict_json

_NOT_KWARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""What a template gets from inputs of their own."""

_NAMED_TOOL = '{"type": "function", "function": {"name": "f"}}'


@dataclass(frozen=True)
class ToolChoice:
    """Whether an answer may, or must, call tools; `name` is that of the only one that it must."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None


_CHOICES = {
    "none": ToolChoice("none"),
    "auto": ToolChoice("auto"),
    "required": ToolChoice("required"),
}


def parse_messages(data: bytes, limits: ServedLimits) -> list[dict[str, Any]]:
    """Returns the messages as templates take them; RequestError says why there are none.

    Like the others here it reads UTF-8 of a bounded size (strict_json.py).
    """
    example = 'a JSON array such as [{"role": "user", "content": "Hello"}]'
    parsed = strict_json.parse("messages", data, limits, expected=example)
    if isinstance(parsed, list) and len(parsed) > limits.max_messages:
        raise RequestError(
            f"messages has {len(parsed)} messages; it may have {limits.max_messages} "
            "(serving.limits.max_messages)"
        )
    return check_messages(parsed)


def parse_tools(data: bytes, limits: ServedLimits) -> list[dict[str, Any]]:
    """Returns functions in OpenAI's form."""
    expected = f"a JSON array such as [{_NAMED_TOOL}]"
    tools = strict_json.parse("tools", data, limits, expected=expected)
    if not isinstance(tools, list):
        raise RequestError(f"tools must be {expected}")
    if len(tools) > limits.max_tools:
        raise RequestError(
            f"tools has {len(tools)} entries; it may have {limits.max_tools} "
            "(serving.limits.max_tools)"
        )
    functions_of(tools)
    return tools


def parse_tool_choice(data: bytes, limits: ServedLimits) -> ToolChoice:
    """Returns the choice that a word makes, or JSON that names a function as OpenAI's API does."""
    by_word = _CHOICES.get(data.decode())
    if by_word is not None:
        return by_word
    expected = f"none, auto, required, or JSON such as {_NAMED_TOOL}"
    named = strict_json.parse("tool_choice", data, limits, expected=expected)
    function = named.get("function") if isinstance(named, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or named.get("type") != "function":
        raise RequestError(f"tool_choice must be {expected}")
    return ToolChoice("required", name)


def parse_template_kwargs(data: bytes, limits: ServedLimits) -> dict[str, Any]:
    """Returns variables of a chat template by name."""
    name = "chat_template_kwargs"
    expected = 'a JSON object such as {"enable_thinking": false}'
    parsed = strict_json.parse(name, data, limits, expected=expected)
    if not isinstance(parsed, dict):
        raise RequestError(f"{name} must be {expected}")
    for key in _NOT_KWARGS:
        if key in parsed:
            raise RequestError(f"{name} has '{key}', which is an input: send it beside {name}")
    if "chat_template" in parsed:
        raise RequestError(f"{name} has 'chat_template': the template is the checkpoint's")
    return parsed
