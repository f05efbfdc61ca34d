"""What a chat template is given besides the messages, and an answer that goes on where one ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specpipe.errors import RequestError
from specpipe.text.chat_messages import Messages

_MARK = "THE_ANSWER_GOES_ON_HERE "
"""Ends the text that is continued; a template may trim its space. Nothing is escaped in it."""


@dataclass(frozen=True, kw_only=True)
class ChatArguments:
    """The arguments of transformers' `apply_chat_template` (5), by their names there.

    tools                   functions as objects; none: the template is told that there are none
    variables               what else the template may read, instead of special tokens of the same
                            names, but not of what is named here
    add_generation_prompt   whether the beginning of an answer follows the messages; None: unless
                            the last one is continued
    """

    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message are both true: an answer either "
                "begins or goes on; leave one out"
            )

    def for_template(self, messages: Messages) -> dict[str, Any]:
        """Returns the variables of a template."""
        begins = self.add_generation_prompt
        return {
            "documents": None,
            **self.variables,
            "messages": messages,
            "tools": list(self.tools) or None,
            "add_generation_prompt": not self.continue_final_message if begins is None else begins,
        }


def with_mark(messages: Messages) -> Messages:
    """Returns messages whose last text ends in a mark, where `until_mark` cuts the prompt."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        marked: Any = content + _MARK
    elif content:
        *before, last = content
        marked = [*before, {**last, "text": last["text"] + _MARK}]
    else:
        raise RequestError("continue_final_message is true, but the last message has no content")
    return [*messages[:-1], {**messages[-1], "content": marked}]


def until_mark(prompt: str, messages: Messages) -> str:
    """Returns the prompt up to the mark, where the text of the last of the `messages` must be."""
    content = messages[-1]["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    before, mark, _ = prompt.rpartition(_MARK.strip())
    if not mark or text.strip() not in prompt:
        raise RequestError(
            "continue_final_message is true, but the chat template does not write the last message "
            "as it is"
        )
    keeps_space = prompt.startswith(_MARK, len(before))
    return before if keeps_space else before.rstrip()
