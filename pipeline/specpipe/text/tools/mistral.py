"""Calls after `[TOOL_CALLS]`: a list of objects, or a name and its arguments for each mark.

Source: the chat templates of mistralai/Mistral-7B-Instruct-v0.3, Mistral-Nemo-Instruct-2407 and
Mistral-Small-3.1 (lists; some have a space before one, where mistral-common has none), of
Mistral-Small-3.2 (`[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`) and of Ministral-3-14B-Instruct-2512
(`[TOOL_CALLS]name[ARGS]{…}`). Those that want an id want 9 letters and digits.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from specpipe.text.tools import lark
from specpipe.text.tools.call_ids import NUM_MISTRAL, mistral_id
from specpipe.text.tools.call_parser import CallParser
from specpipe.text.tools.calls import CallArguments, CallObject
from specpipe.text.tools.functions import functions_of
from specpipe.text.tools.partial import SPACE

_CALLS, _CALL_ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralDialect:
    """`[TOOL_CALLS]` and a list of objects, or a name, maybe an id, and arguments, repeated."""

    name = "mistral"
    marks: tuple[str, ...] = (_CALLS, _CALL_ID, _ARGUMENTS)

    def __init__(self, token_ids: Mapping[str, int], template: str = "") -> None:
        """token_ids are those of the marks that are tokens; without a template, they decide."""
        self._token_ids = token_ids
        self._is_named = _ARGUMENTS in (template if _CALLS in template else token_ids)
        self._has_ids = _CALL_ID in template

    @staticmethod
    def is_used_by(template: str) -> bool:
        """Returns whether a chat template writes such calls."""
        return _CALLS in template

    def parser(
        self, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool = True
    ) -> MistralParser:
        """Returns the parser of one answer, which takes every form."""
        return MistralParser(_CALLS, tools, is_parallel=is_parallel)

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> str:
        """Returns the Lark grammar of one call or several, in the form of the chat template."""
        calls, call_id, arguments = (lark.token(self._token_ids, mark) for mark in self.marks)
        functions = functions_of(tools)
        if not self._is_named:
            listed = r'function (", " function)*' if is_parallel else "function"
            objects = [lark.call_object(f.name, "arguments", f.parameters) for f in functions]
            return lark.grammar(start=rf'{calls} / ?\[/ {listed} "]"', function=objects)
        if self._has_ids:
            arguments = f"{call_id} /[a-zA-Z0-9]{{{NUM_MISTRAL}}}/ {arguments}"
        named = [
            f"{lark.literal(f.name)} {arguments} {lark.json_value(f.parameters)}" for f in functions
        ]
        return lark.grammar(
            start="call+" if is_parallel else "call", call=f"{calls} function", function=named
        )

    def new_call_id(self) -> str:
        """Returns a random id of the length that the chat templates want."""
        return mistral_id()


class MistralParser(CallParser):
    """Reads the calls of Mistral."""

    def read_calls(self, at: int) -> Generator[None]:
        at = yield from self.past_space(at)
        end = yield from self.past_mark(at, "[")
        if end > at:
            yield from self._read_list(end)
        else:
            yield from self._read_named(at)

    def _read_list(self, at: int) -> Generator[None]:
        while True:
            at = yield from self.past_space(at)
            call = CallObject(self.names, needs_arguments=False)
            yield from self.read_call(call, at)
            if not call.is_whole:
                return
            end = yield from self.past_space(0)
            at = yield from self.past_mark(end, ",")
            if at == end:
                break
        closed = yield from self.past_mark(end, "]")
        if closed > end:
            self.drop(closed)

    def _read_named(self, at: int) -> Generator[None]:
        end = at
        while (yield from self.has(end)) and self.text[end] not in f"[{{{SPACE}":
            end += 1
        name = self.text[at:end]
        if name not in self.names:
            return
        at = yield from self.past_space(end)
        end = yield from self.past_mark(at, _CALL_ID)
        while end > at and (yield from self.has(end)) and self.text[end].isalnum():
            end += 1
        at = yield from self.past_space((yield from self.past_mark(end, _ARGUMENTS)))
        if (yield from self.has(at)) and self.text[at] == "{":
            yield from self.read_call(CallArguments(name), at)
