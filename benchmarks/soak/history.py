"""Which version may have answered a request, and whether what came is the answer of one of those.

A version may answer from when a command that promotes it is started until another one is known to
answer in its place; to a request, where that time and its own overlap. The command that promotes
may be killed in between, so both may answer until the server itself was asked.

Two contents are published by turns, under ever new numbers. Their right answers to each question
differ, so that a text tells the content; some protocols also tell the version's number.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.attack.load import Ending, Received, judge

Wrong = Literal[
    "of no version",
    "with a repeated chunk",
    "that name several versions",
    "that name another version",
    "of a version that was not served",
]
WRONG: tuple[Wrong, ...] = (
    "of no version",
    "with a repeated chunk",
    "that name several versions",
    "that name another version",
    "of a version that was not served",
)


class History:
    """The numbers that may have answered; times by time.monotonic()."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[int, float, float | None]] = []  # number, from, to

    def attempt(self, number: int, now_s: float) -> None:
        """Takes in that a change to a version begins."""
        with self._lock:
            self._spans.append((number, now_s, None))

    def settle(self, number: int, now_s: float) -> None:
        """Takes in that from now on this version answers alone."""
        with self._lock:
            self._spans = [
                (one, began, now_s if ended is None and one != number else ended)
                for one, began, ended in self._spans
            ]
            if all(one != number or ended is not None for one, _, ended in self._spans):
                self._spans.append((number, now_s, None))

    def since(self, started_s: float) -> set[int]:
        """The versions that may have answered a request that was sent then, and has just ended."""
        with self._lock:
            return {
                number for number, _, ended in self._spans if ended is None or ended >= started_s
            }


@dataclass
class Answers:
    """Judges what comes, and counts it.

    expected  the right answers to all questions, by content
    contents  the content of each number; it grows while versions are published
    """

    expected: Mapping[str, Sequence[str]]
    contents: Mapping[int, str]
    history: History
    by_content: Counter[str] = field(default_factory=Counter)
    by_number: Counter[int] = field(default_factory=Counter)
    wrong: Counter[Wrong] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, received: Received) -> Ending:
        texts = {name: answers[received.question] for name, answers in self.expected.items()}
        named = {int(piece.version) for piece in received.pieces if piece.version}
        possible = self.history.since(received.started_s)
        found = self._fault(received, texts, named, possible)
        with self._lock:
            if found is not None:
                self.wrong[found] += 1
                self.examples.append(
                    f"{found}, {received.protocol}: {received.text[:80]!r}, may be of "
                    f"{sorted(possible)}, names {sorted(named)}"
                )
                return "wrong"
            if not received.is_whole:
                return "broken off"
            self.by_content[_content(received, texts)] += 1
            self.by_number.update(named)
            return "right"

    def _fault(
        self, received: Received, texts: Mapping[str, str], named: set[int], possible: set[int]
    ) -> Wrong | None:
        agreeing = {
            name
            for name, text in texts.items()
            if judge(text, received.text, is_whole=received.is_whole) != "wrong"
        }
        if not agreeing:
            is_repeated = any(repeats(received, text) for text in texts.values())
            return "with a repeated chunk" if is_repeated else "of no version"
        if len(named) > 1:
            return "that name several versions"
        if any(self.contents.get(number) not in agreeing for number in named):
            return "that name another version"
        candidates = possible & named if named else possible
        if not any(self.contents[number] in agreeing for number in candidates):
            return "of a version that was not served"
        return None


def repeats(received: Received, expected: str) -> bool:
    """Whether it is the right answer, or its beginning, but for one chunk that came once more."""
    texts = [piece.text for piece in received.pieces]
    return any(
        text and judge(expected, "".join(rest), is_whole=received.is_whole) != "wrong"
        for index, text in enumerate(texts)
        if text in texts[:index]
        for rest in [texts[:index] + texts[index + 1 :]]
    )


def _content(received: Received, texts: Mapping[str, str]) -> str:
    return next(name for name, text in texts.items() if text == received.text)
