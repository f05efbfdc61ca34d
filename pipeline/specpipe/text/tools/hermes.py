"""Calls as objects between `<tool_call>` and `</tool_call>`: Hermes 2 Pro and 3, Qwen2.5, Qwen3.

Source: the chat templates of NousResearch/Hermes-3-Llama-3.1-8B, Qwen/Qwen2.5-7B-Instruct and
Qwen/Qwen3-8B. Some templates of Hermes write `arguments` before `name`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from specpipe.text.tools import lark
from specpipe.text.tools.call_ids import openai_id
from specpipe.text.tools.call_parser import CallParser
from specpipe.text.tools.calls import CallObject
from specpipe.text.tools.functions import functions_of

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesDialect:
    """`<tool_call>`, an object with name and arguments, `</tool_call>`; as often as needed."""

    name = "hermes"
    marks: tuple[str, ...] = (_OPEN, _CLOSE)

    def __init__(self, token_ids: Mapping[str, int], template: str = "") -> None:
        """token_ids are those of the marks that are tokens."""
        self._token_ids = token_ids

    @staticmethod
    def is_used_by(template: str) -> bool:
        """Returns whether a chat template writes such calls.

        Qwen3-Coder and GLM-4.5 have XML between the same marks, and no object.
        """
        return _OPEN in template and '"name"' in template and "<function=" not in template

    def parser(
        self, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool = True
    ) -> HermesParser:
        """Returns the parser of one answer."""
        return HermesParser(_OPEN, tools, is_parallel=is_parallel)

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> str:
        """Returns the Lark grammar of one call, or of several on lines of their own."""
        opening, closing = (lark.token(self._token_ids, mark) for mark in self.marks)
        functions = [
            lark.call_object(function.name, "arguments", function.parameters)
            for function in functions_of(tools)
        ]
        return lark.grammar(
            start=r'call ("\n" call)*' if is_parallel else "call",
            call=rf'{opening} "\n" function "\n" {closing}',
            function=functions,
        )

    def new_call_id(self) -> str:
        """Returns a random id."""
        return openai_id()


class HermesParser(CallParser):
    """Reads the calls of Hermes."""

    def read_calls(self, at: int) -> Generator[None]:
        at = yield from self.past_space(at)
        call = CallObject(self.names, needs_arguments=False)
        yield from self.read_call(call, at)
        if call.has_begun:
            at = yield from self.past_space(0)
            end = yield from self.past_mark(at, _CLOSE)
            if end > at:
                self.drop(end)
