"""Thoughts before an answer, between two marks: Qwen3, QwQ, DeepSeek-R1's distillates, Magistral.

Source: the chat templates of Qwen/Qwen3-8B (the model opens them, or the prompt has an empty pair
of marks where `enable_thinking` is false), Qwen/Qwen3-4B-Thinking-2507 and
deepseek-ai/DeepSeek-R1-Distill-Qwen-7B (the prompt opens them), and mistral-common's
`[THINK]` of its version 13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specpipe.text.tools import lark
from specpipe.text.tools.contract import MessageDelta, MessageParser
from specpipe.text.tools.partial import SPACE, num_certain, num_trimmed

_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class ReasoningMarks:
    """What thoughts stand between; token_ids are those of the marks that are tokens."""

    opening: str
    closing: str
    token_ids: Mapping[str, int]

    def is_open_after(self, prompt: str) -> bool:
        """Returns whether an answer to a rendered prompt begins inside thoughts."""
        return prompt.rstrip().endswith(self.opening)

    def grammar(self, text: str, *, is_open: bool) -> str:
        """Returns the Lark grammar of thoughts, which may be left out unless open, and of `text`.

        Thoughts are any text up to their mark.
        """
        if self.closing in self.token_ids:
            rest = rf"/(.|\n)*/ {lark.token(self.token_ids, self.closing)}"
            rules = rf"rest: {rest}" + "\n"
        else:
            rules = rf"rest[suffix={lark.literal(self.closing)}]: /(.|\n)*/" + "\n"
        rules += f"thoughts: {lark.token(self.token_ids, self.opening)} rest\n"
        space = r"/\n{0,2}/"
        prefix = f"rest {space}" if is_open else f"(thoughts {space})?"
        return lark.after(prefix, rules, text)


def marks_in(template: str) -> tuple[str, str] | tuple[()]:
    """Returns the marks of thoughts that a chat template knows; none where there are none."""
    return next((pair for pair in _PAIRS if pair[1] in template), ())


class ReasoningParser:
    """Splits thoughts at the start of an answer from the rest, which another parser reads.

    White space around thoughts is no part of them, nor of what follows. Where the closing mark
    does not come, all is reasoning.
    """

    def __init__(self, marks: ReasoningMarks, rest: MessageParser, *, is_open: bool) -> None:
        self._marks = marks
        self._rest = rest
        self._is_open = is_open
        self._is_begun = False  # it is known whether the answer begins with the opening mark
        self._is_trimmed = is_open  # white space here is dropped
        self._text = ""

    def feed(self, text: str) -> MessageDelta:
        """Returns what is certain by now."""
        self._text += text
        if not self._is_begun and not self._begin():
            return MessageDelta()
        reasoning = self._read_thoughts() if self._is_open else ""
        if self._is_open:
            return MessageDelta(reasoning=reasoning)
        self._trim()
        content, self._text = self._text, ""
        rest = self._rest.feed(content)
        return MessageDelta.joined([MessageDelta(reasoning=reasoning), rest]) if reasoning else rest

    def end(self) -> MessageDelta:
        """Returns what was held back."""
        if self._is_open:
            self._trim()
            cut = MessageDelta(reasoning=self._text[: num_trimmed(self._text)])
            return MessageDelta.joined([cut, self._rest.end()])
        return MessageDelta.joined([self._rest.feed(self._text), self._rest.end()])

    def _begin(self) -> bool:
        start = self._text.lstrip(SPACE)
        if self._marks.opening.startswith(start):
            return False
        self._is_begun = True
        if start.startswith(self._marks.opening):
            self._is_open = True
            self._text = start.removeprefix(self._marks.opening)
            self._is_trimmed = True
        return True

    def _read_thoughts(self) -> str:
        """Returns the thoughts that are certain; they are no longer open once their mark came."""
        self._trim()
        thoughts, mark, rest = self._text.partition(self._marks.closing)
        if mark:
            self._text = rest
            self._is_open, self._is_trimmed = False, True
            return thoughts[: num_trimmed(thoughts)]
        certain = num_certain(thoughts, self._marks.closing)
        self._text = thoughts[certain:]
        return thoughts[:certain]

    def _trim(self) -> None:
        if self._is_trimmed:
            self._text = self._text.lstrip(SPACE)
            self._is_trimmed = not self._text
