"""Tools, the templates of models that call them, and what a parser makes of an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specpipe.text.tools.contract import MessageDelta, MessageParser

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 0, "maximum": 14},
                "unit": {"enum": ["°C", "°F"]},
                "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"tag": {"type": "string", "maxLength": 3}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "world.time"}}
TOOLS: list[dict[str, Any]] = [WEATHER, TIME]

Message = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, content, and the name and arguments of each call."""


def read(parser: MessageParser, pieces: Iterable[str]) -> Message:
    """Returns the message of an answer that comes in these pieces."""
    deltas: list[MessageDelta] = [parser.feed(piece) for piece in pieces]
    joined = MessageDelta.joined([*deltas, parser.end()])
    assert [call.index for call in joined.tool_calls] == [*range(len(joined.tool_calls))]
    calls = [(call.name, call.arguments) for call in joined.tool_calls]
    return joined.reasoning, joined.content, calls


# Written here after what the templates of these models write of an assistant's turn.
_TURNS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}<user>{{ message.content }}<answer>"
    "{% else %}{{ message.content or '' }}CALLS{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'user' %}<answer>{% endif %}"
)
MISTRAL_NAMED = _TURNS.replace(
    "CALLS",
    "{% for call in message.tool_calls or [] %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}"
    "{% endfor %}",
)
MISTRAL_WITH_IDS = MISTRAL_NAMED.replace("+ '[ARGS]'", "+ '[CALL_ID]' + call.id + '[ARGS]'")
HERMES = _TURNS.replace(
    "CALLS",
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"arguments": {{ call.function.arguments | tojson }}, "name": "{{ call.function.name }}"}'
    "\n</tool_call>{% endfor %}",
)
QWEN_3 = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
R1 = QWEN_3.replace("{% if enable_thinking", "<think>\n{% if enable_thinking")
