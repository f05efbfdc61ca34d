"""The messages of a conversation, as clients send them and as chat templates take them.

A template gets what transformers 5 gives it (`apply_chat_template`): every key, tool calls, names
and unknown ones too, but none that is null. A content of several parts is the exception: where a
template wants a text, transformers would write the list itself into the prompt.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from specpipe.errors import RequestError

Messages = list[dict[str, Any]]

_EXPECTED = 'messages must be a list such as [{"role": "user", "content": "hi"}]'
_MARK = "\ue000{}\ue001"  # of characters for private use
_ANY_MARK = re.compile(_MARK.format("[0-9]+"))
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which clients send the thoughts before an answer; templates read the first two."""


def check_messages(messages: Any) -> Messages:
    """Returns a conversation that a template can take; RequestError names what is at fault.

    Every message is an object with a role. Its content may be missing, null, a text, or a list of
    parts that are texts.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError(_EXPECTED)
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f'messages[{index}] must be an object with a "role"')
        content = message.get("content")
        if isinstance(content, list):
            for number, part in enumerate(content):
                _check_part(part, f"messages[{index}].content[{number}]")
        elif content is not None and not isinstance(content, str):
            raise RequestError(
                f"messages[{index}].content must be a text, a list of text parts, or null"
            )
    return messages


def for_template(messages: Messages) -> Messages:
    """Returns the messages as transformers hands them to a template."""
    prepared = []
    for message in messages:
        keys = {key: value for key, value in message.items() if value is not None}
        if keys.get("content") == []:
            keys["content"] = ""
        thoughts = next((keys[key] for key in _REASONING if key in keys), None)
        if thoughts is not None:
            keys = {"thinking": thoughts, **keys, "reasoning_content": thoughts}
        prepared.append(keys)
    return prepared


def has_parts(messages: Messages) -> bool:
    """Returns whether the content of a message is a list."""
    return any(True for _ in _parts(messages))


def with_joined_parts(messages: Messages) -> Messages:
    """Returns messages in which each list of parts is one text, with line feeds between them."""
    return [
        {**message, "content": text_of(message)}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def text_of(message: dict[str, Any]) -> str:
    """Returns the text of a message's content."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def with_marked_parts(messages: Messages) -> Messages:
    """Returns messages in which the text of each part is a mark, which no other text has."""
    numbers = itertools.count()
    return [
        {**message, "content": [{**part, "text": _MARK.format(next(numbers))} for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def shows_parts(marked: Messages, prompt: str) -> bool:
    """Returns whether the prompt that a template made of marked parts has the text of every part,
    and no part written as an object: as such Python writes the characters of a mark otherwise.
    """
    marks = {part["text"] for part in _parts(marked)}
    return marks <= set(_ANY_MARK.findall(prompt)) and ascii(_MARK)[1:7] not in prompt


def _parts(messages: Messages) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(message.get("content"), list):
            yield from message["content"]


def _check_part(part: Any, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        found_type = f"of type {kind!r:.40}" if isinstance(kind, str) else "without a type"
        raise RequestError(f"{where} is a part {found_type}: this model takes text parts alone")
    if not isinstance(part.get("text"), str):
        raise RequestError(f'{where} must have a "text"')
