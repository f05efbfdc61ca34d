from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specpipe.progress import Unit


@dataclass
class Recorded:
    """What was counted in a phase."""

    phase: str
    unit: Unit
    total: int | None
    done: int = 0

    def advance(self, amount: int = 1) -> None:
        self.done += amount

    def expect(self, total: int) -> None:
        self.total = total


class Recorder:
    """A display that notes what is counted, each count when it ends."""

    def __init__(self) -> None:
        self._phases = [""]
        self.counts: list[Recorded] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phases.append(name)
        yield
        self._phases.pop()

    @contextmanager
    def count(self, total: int | None, unit: Unit) -> Iterator[Recorded]:
        recorded = Recorded(self._phases[-1], unit, total)
        yield recorded
        self.counts.append(recorded)
