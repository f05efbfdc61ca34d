"""How one checkpoint writes the assistant's message: tool calls, thoughts, special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specpipe.errors import RequestError
from specpipe.speculative.guide import Guide
from specpipe.text.tokenizer import Tokenizer
from specpipe.text.tools import lark
from specpipe.text.tools.contract import MessageDelta, MessageParser, ToolDialect
from specpipe.text.tools.hermes import HermesDialect
from specpipe.text.tools.llama import LlamaDialect
from specpipe.text.tools.mistral import MistralDialect
from specpipe.text.tools.reasoning import ReasoningMarks, ReasoningParser, marks_in
from specpipe.text.tools.special_tokens import SpecialTokens, WithoutSpecialTokens

_DIALECTS = (MistralDialect, HermesDialect, LlamaDialect)

DIALECT_NAMES = tuple(dialect.name for dialect in _DIALECTS)


def dialect_of(tokenizer: Tokenizer, name: str | None = None) -> ToolDialect | None:
    """Returns how a checkpoint's models write calls: by its chat template, or the one of a name.

    None where the template writes no calls, or in a way that is not known.
    """
    template = _source(tokenizer)
    for dialect in _DIALECTS:
        if dialect.name == name or (name is None and dialect.is_used_by(template)):
            return dialect(_token_ids(tokenizer, dialect.marks), template)
    return None


@dataclass(frozen=True, kw_only=True)
class MessageFormat:
    """How a checkpoint's models write a message.

    dialect    of tool calls; None: not known
    reasoning  what thoughts stand between; None: there are none
    special    tokens that are no part of what is shown
    """

    dialect: ToolDialect | None
    reasoning: ReasoningMarks | None
    special: SpecialTokens
    needs_special_tokens: bool
    """Calls or thoughts can only be told from a text with special tokens kept."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, dialect: str | None = None) -> MessageFormat:
        """Returns the format of a checkpoint; `dialect` is one of DIALECT_NAMES, or found out."""
        found, marks = dialect_of(tokenizer, dialect), marks_in(_source(tokenizer))
        tokens = tokenizer.tokens()
        special = {tokens[token_id] for token_id in tokenizer.special_token_ids}
        return cls(
            dialect=found,
            reasoning=ReasoningMarks(*marks, _token_ids(tokenizer, marks)) if marks else None,
            special=SpecialTokens(special),
            needs_special_tokens=not special.isdisjoint({*marks, *(found.marks if found else ())}),
        )

    def is_reasoning_after(self, prompt: str) -> bool:
        """Returns whether an answer to a rendered prompt begins inside thoughts."""
        return self.reasoning is not None and self.reasoning.is_open_after(prompt)

    def after_thoughts(self, guide: Guide, prompt: str) -> Guide:
        """Returns the guide of an answer to a prompt: where that opens thoughts, they come first.

        It must be one that can be followed.
        """
        if self.reasoning is None or not self.is_reasoning_after(prompt):
            return guide
        return Guide(type="lark", text=self.reasoning.grammar(lark.of_guide(guide), is_open=True))

    def parser(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        is_parallel: bool = True,
        is_reasoning: bool = False,
    ) -> MessageParser:
        """Returns the parser of one answer.

        tools         of the request; none: all is content
        is_parallel   otherwise, calls after the first are left out
        is_reasoning  the answer begins inside thoughts
        """
        parser: MessageParser = _Content()
        if tools and self.dialect is not None:
            parser = self.dialect.parser(tools, is_parallel=is_parallel)
        if self.reasoning is not None:
            parser = ReasoningParser(self.reasoning, parser, is_open=is_reasoning)
        return WithoutSpecialTokens(self.special, parser)

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        is_parallel: bool,
        is_reasoning: bool = False,
    ) -> str:
        """Returns the Lark grammar of an answer that calls one of these tools, or several.

        Where there may be thoughts, they come first. RequestError where the dialect is not known.
        """
        if self.dialect is None:
            raise RequestError(
                "tool_choice: how this model writes calls is not known, so none can be asked for"
            )
        calls = self.dialect.grammar(tools, is_parallel=is_parallel)
        if self.reasoning is None:
            return calls
        return self.reasoning.grammar(calls, is_open=is_reasoning)


class _Content:
    """A parser for which all is content."""

    def feed(self, text: str) -> MessageDelta:
        return MessageDelta(content=text)

    def end(self) -> MessageDelta:
        return MessageDelta()


def _source(tokenizer: Tokenizer) -> str:
    """Returns the source of the chat template, quotes inside its strings as they come out."""
    template = tokenizer.chat_template
    if template is None:
        return ""
    return (template.with_tools or template).source.replace(r"\"", '"')


def _token_ids(tokenizer: Tokenizer, marks: Sequence[str]) -> dict[str, int]:
    return {text: token_id for token_id, text in tokenizer.tokens().items() if text in marks}
