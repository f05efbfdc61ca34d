"""What a dialect of tool calls is to those who use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class ToolCallDelta:
    """A piece of one tool call.

    index      which call of the answer it belongs to, from 0
    name       of the function; in the first piece of a call alone, ""  in the others
    arguments  a piece of its arguments, which together are JSON
    """

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, kw_only=True)
class MessageDelta:
    """What a piece of an answer's text adds to the assistant's message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @classmethod
    def joined(cls, deltas: Iterable[MessageDelta]) -> MessageDelta:
        """Returns what several pieces add together, each call as one."""
        deltas = tuple(deltas)
        calls: list[ToolCallDelta] = []
        for call in (call for delta in deltas for call in delta.tool_calls):
            if calls and calls[-1].index == call.index:
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + call.arguments)
            else:
                calls.append(call)
        return cls(
            content="".join(delta.content for delta in deltas),
            reasoning="".join(delta.reasoning for delta in deltas),
            tool_calls=tuple(calls),
        )


class MessageParser(Protocol):
    """Splits the text of one answer, special tokens kept, as it comes."""

    def feed(self, text: str) -> MessageDelta:
        """Returns what is certain by now; text that may begin a call is held back."""

    def end(self) -> MessageDelta:
        """Returns what was held back; a call that was cut stays as far as it came."""


class ToolDialect(Protocol):
    """How the models of a family write tool calls."""

    name: str
    marks: tuple[str, ...]
    """Texts that calls are told by; some may be tokens, special ones too."""

    def parser(
        self, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool = True
    ) -> MessageParser:
        """Returns the parser of one answer, `tools` being those of the request.

        Where calls are not parallel, those after the first are left out.
        """

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> str:
        """Returns the Lark grammar of an answer that is one call, or several, of these tools.

        What it lets through, the parser reads as calls.
        """

    def new_call_id(self) -> str:
        """Returns a random id for a call, in the form that the chat template takes."""
