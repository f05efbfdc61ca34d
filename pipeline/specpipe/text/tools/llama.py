"""Calls as a bare object, `{"name": …, "parameters": {…}}`: Llama 3.1, 3.2 and 3.3.

Source: the chat templates of meta-llama/Llama-3.1-8B-Instruct, Llama-3.2-3B-Instruct and
Llama-3.3-70B-Instruct, which ask for that object (none of them asks for Python, as Meta's pages on
Llama 3.2 do) and take one call a message. Models also write `<|python_tag|>` before it, `"type":
"function"` inside it, `arguments` for `parameters`, and several with semicolons between them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from specpipe.text.tools import lark
from specpipe.text.tools.call_ids import openai_id
from specpipe.text.tools.call_parser import CallParser
from specpipe.text.tools.calls import CallObject
from specpipe.text.tools.functions import functions_of
from specpipe.text.tools.partial import SPACE

_TAG = "<|python_tag|>"


class LlamaDialect:
    """An object with name and parameters that is the whole answer."""

    name = "llama3"
    marks: tuple[str, ...] = (_TAG,)

    def __init__(self, token_ids: Mapping[str, int], template: str = "") -> None:
        """The grammar needs no mark."""

    @staticmethod
    def is_used_by(template: str) -> bool:
        """Returns whether a chat template writes such calls."""
        return '"parameters": ' in template and "ipython" in template

    def parser(
        self, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool = True
    ) -> LlamaParser:
        """Returns the parser of one answer."""
        return LlamaParser(_TAG, tools, is_parallel=is_parallel)

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> str:
        """Returns the Lark grammar of one call; the templates refuse a message with more."""
        functions = [
            lark.call_object(function.name, "parameters", function.parameters)
            for function in functions_of(tools)
        ]
        return lark.grammar(start="function", function=functions)

    def new_call_id(self) -> str:
        """Returns a random id."""
        return openai_id()


class LlamaParser(CallParser):
    """Reads the calls of Llama 3: at the start of the answer, after one another, after the tag."""

    _may_be_bare = True

    def find_call(self) -> Generator[None, None, int]:
        if self._may_be_bare:
            self._may_be_bare = False
            at = yield from self.past_space(0, f"{SPACE};" if self.num_calls else SPACE)
            if (yield from self.has(at)) and self.text[at] == "{":
                return at
        return (yield from super().find_call())

    def read_calls(self, at: int) -> Generator[None]:
        at = yield from self.past_space(at)
        call = CallObject(self.names, needs_arguments=True)
        yield from self.read_call(call, at)
        self._may_be_bare = call.is_whole
