"""What the parsers of all dialects share: content up to a mark, calls after it, nothing lost."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from specpipe.text.tools.calls import CallArguments
from specpipe.text.tools.contract import MessageDelta, ToolCallDelta
from specpipe.text.tools.functions import functions_of
from specpipe.text.tools.partial import SPACE, num_certain, num_trimmed

_AT_ONCE = 4096  # characters: what is decided is cut off the rest, which is copied


class CallParser:
    """Splits an answer into content and calls; a dialect's subclass knows what follows a mark.

    Text is content until it is a call for certain. What looked like a call and is none is content
    as it stands, the mark included. White space before a call, and after the last one, is dropped.

    Its steps are generators, which yield where they need more text. Positions count from what is
    not decided yet, `text`.
    """

    def __init__(
        self, mark: str, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool = True
    ) -> None:
        self.names = frozenset(function.name for function in functions_of(tools))
        self.text = ""
        self.num_calls = 0
        self._mark = mark
        self._is_parallel = is_parallel
        self._is_over = False
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._steps = self._read()

    def feed(self, text: str) -> MessageDelta:
        """Returns what is certain by now; text that may begin a call is held back."""
        slices = (text[at : at + _AT_ONCE] for at in range(0, len(text), _AT_ONCE))
        return MessageDelta.joined([self._read_on(piece) for piece in slices])

    def end(self) -> MessageDelta:
        """Returns what was held back; a call that was cut stays as far as it came."""
        self._is_over = True
        return self._read_on("")

    def read_calls(self, at: int) -> Generator[None]:
        """Reads the calls after a mark that ends at `at`; where none begins, all is content."""
        raise NotImplementedError

    def find_call(self) -> Generator[None, None, int]:
        """Passes content on up to the next mark; returns where that ends, -1 where none comes."""
        while (found := self.text.find(self._mark)) < 0:
            if self._is_over:
                if not self.num_calls or not self.text.isspace():
                    self._content.append(self.text)
                return -1
            self._content.append(self.drop(num_certain(self.text, self._mark)))
            yield
        trimmed = num_trimmed(self.text[:found])
        self._content.append(self.drop(trimmed))
        return found - trimmed + len(self._mark)

    def read_call(self, call: CallArguments, at: int) -> Generator[None]:
        """Reads a call from `at` on; what is left after one that has begun is what follows it."""
        is_first = True
        while call.is_open and (yield from self.has(at)):
            at += call.feed(self.text[at:])
            if call.has_begun:
                self.drop(at)
                at = 0
                self._report(call, is_first)
                is_first = False

    def has(self, at: int) -> Generator[None, None, bool]:
        """Waits for the character at `at`; returns whether it came."""
        while at >= len(self.text) and not self._is_over:
            yield
        return at < len(self.text)

    def past_space(self, at: int, space: str = SPACE) -> Generator[None, None, int]:
        """Returns the position after white space, or after the characters of `space`."""
        while (yield from self.has(at)) and self.text[at] in space:
            at += 1
        return at

    def past_mark(self, at: int, mark: str) -> Generator[None, None, int]:
        """Returns the position after a mark, or `at` where it does not stand there."""
        num_read = 0
        while (
            num_read < len(mark)
            and (yield from self.has(at + num_read))
            and self.text[at + num_read] == mark[num_read]
        ):
            num_read += 1
        return at + num_read if num_read == len(mark) else at

    def drop(self, at: int) -> str:
        """Returns the text before `at`, which is decided."""
        dropped, self.text = self.text[:at], self.text[at:]
        return dropped

    def _read(self) -> Generator[None]:
        if not self.names:
            while not self._is_over:
                self._content.append(self.drop(len(self.text)))
                yield
            return
        while (at := (yield from self.find_call())) >= 0:
            num_calls = self.num_calls
            yield from self.read_calls(at)
            if self.num_calls == num_calls:
                self._content.append(self.drop(at))

    def _report(self, call: CallArguments, is_first: bool) -> None:
        self.num_calls += is_first
        arguments = call.take_arguments()
        is_shown = self._is_parallel or self.num_calls == 1
        if is_shown and (is_first or arguments):
            self._calls.append(
                ToolCallDelta(
                    index=self.num_calls - 1,
                    name=call.name if is_first else "",
                    arguments=arguments,
                )
            )

    def _read_on(self, text: str) -> MessageDelta:
        self.text += text
        next(self._steps, None)
        came = MessageDelta(content="".join(self._content), tool_calls=tuple(self._calls))
        self._content.clear()
        self._calls.clear()
        return came
