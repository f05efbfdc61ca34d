"""The messages of a conversation, as clients send them and as chat templates take them.

A template gets what transformers 5 gives it (`apply_chat_template`): every key, tool calls, names
and unknown ones too, but none that is null. A content of several parts is the exception: where a
template wants a text, transformers would write the list itself into the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specpipe.errors import RequestError

Messages = list[dict[str, Any]]

_EXPECTED = 'messages must be a list such as [{"role": "user", "content": "hi"}]'
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""What the thoughts before an answer are sent as; templates read one of the first two."""


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
    made = []
    for message in messages:
        given = {key: value for key, value in message.items() if value is not None}
        if given.get("content") == []:
            given["content"] = ""
        thoughts = next((given[key] for key in _REASONING if key in given), None)
        if thoughts is not None:
            given = {"thinking": thoughts, **given, "reasoning_content": thoughts}
        made.append(given)
    return made


def has_parts(messages: Messages) -> bool:
    """Says whether a content is a list."""
    return any(True for _ in _parts(messages))


def with_joined_parts(messages: Messages) -> Messages:
    """Makes a text of each content that is a list, a line feed between its parts."""
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


def shows_parts(messages: Messages, prompt: str) -> bool:
    """Says whether a template made texts of all parts: they are there, not a list or an object."""
    return all(
        part["text"].strip() in prompt and str(part) not in prompt for part in _parts(messages)
    )


def _parts(messages: Messages) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(message.get("content"), list):
            yield from message["content"]


def _check_part(part: Any, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        what = f"of type {kind!r:.40}" if isinstance(kind, str) else "without a type"
        raise RequestError(f"{where} is a part {what}: this model takes text parts alone")
    if not isinstance(part.get("text"), str):
        raise RequestError(f'{where} must have a "text"')
