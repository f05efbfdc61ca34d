"""An endpoint that plays what a test wrote, on a clock that a test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from specpipe.evaluate.endpoints.base import Piece, Question

Script = Sequence[tuple[float, "Piece | Exception"]]
"""What comes, each after some seconds."""


class HandClock:
    """Shows what it was set to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Scripted:
    """Answers every question by its script, and moves the clock on as it does."""

    script: Callable[[Question], Script]
    clock: HandClock = field(default_factory=HandClock)
    name: str = "scripted"
    asked: list[Question] = field(default_factory=list)

    def stream(self, question: Question) -> Iterator[Piece]:
        self.asked.append(question)
        for seconds, event in self.script(question):
            self.clock.now_s += seconds
            if isinstance(event, Exception):
                raise event
            yield event

    def close(self) -> None: ...
