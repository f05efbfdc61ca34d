"""Special tokens left out of what is shown, after parsers have read them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from specpipe.text.tools.contract import MessageDelta, MessageParser


class SpecialTokens:
    """The strings of a tokenizer's special tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({text for text in texts if text}, key=len, reverse=True)
        self.starts = "".join({text[0] for text in known})
        self.pattern = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self.beginnings = frozenset(text[:n] for text in known for n in range(1, len(text)))
        self.max_length = max(map(len, known), default=0)


class _Filter:
    """Leaves special tokens out of a text that comes in pieces."""

    def __init__(self, special: SpecialTokens) -> None:
        self._special = special
        self._held = ""

    def feed(self, text: str) -> str:
        special, text = self._special, self._held + text
        self._held = ""
        if not any(start in text for start in special.starts):
            return text
        kept, end = [], 0
        for match in special.pattern.finditer(text):
            if match.end() == len(text) and match[0] in special.beginnings:
                break  # of a longer one
            kept.append(text[end : match.start()])
            end = match.end()
        for at in range(max(len(text) - special.max_length + 1, end), len(text)):
            if text[at] in special.starts and text[at:] in special.beginnings:
                text, self._held = text[:at], text[at:]
                break
        return "".join([*kept, text[end:]])

    def end(self) -> str:
        held, self._held = self._held, ""
        return self._special.pattern.sub("", held)


class WithoutSpecialTokens:
    """A parser whose content and reasoning have no special tokens; arguments stay as they are."""

    def __init__(self, special: SpecialTokens, parser: MessageParser) -> None:
        self._parser = parser
        self._content, self._reasoning = _Filter(special), _Filter(special)

    def feed(self, text: str) -> MessageDelta:
        """Returns what is certain by now."""
        return self._filtered(self._parser.feed(text))

    def end(self) -> MessageDelta:
        """Returns what was held back."""
        held = self._filtered(self._parser.end())
        last = MessageDelta(content=self._content.end(), reasoning=self._reasoning.end())
        return MessageDelta.joined([held, last])

    def _filtered(self, delta: MessageDelta) -> MessageDelta:
        return MessageDelta(
            content=self._content.feed(delta.content) if delta.content else "",
            reasoning=self._reasoning.feed(delta.reasoning) if delta.reasoning else "",
            tool_calls=delta.tool_calls,
        )
