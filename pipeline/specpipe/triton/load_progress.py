"""What a model that loads tells an operator: lines on its stderr, which Triton passes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from specpipe.machine.callables import Clock, Log
from specpipe.progress import Count, Unit

_INTERVAL_S = 5.0
"""What takes less needs no line."""


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class LoadProgress:
    """A display that writes a line every few seconds, and one at the end of what had any."""

    def __init__(self, log: Log = _to_stderr, clock: Clock = time.monotonic) -> None:
        self._log, self._clock = log, clock

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    @contextmanager
    def count(self, total: int | None, unit: Unit) -> Iterator[Count]:
        yield _Counted(total, unit, self._log, self._clock)


class _Counted:
    def __init__(self, total: int | None, unit: Unit, log: Log, clock: Clock) -> None:
        self._total, self._unit, self._log, self._clock = total, unit, log, clock
        self._num_done = 0
        self._told_at, self._has_told = clock(), False

    def advance(self, amount: int = 1) -> None:
        self._num_done += amount
        is_last = self._num_done == self._total
        now = self._clock()
        if now - self._told_at >= _INTERVAL_S or (is_last and self._has_told):
            of_all = "" if self._total is None else f" of {self._total}"
            self._log(f"{self._num_done}{of_all} {self._unit} are ready")
            self._told_at, self._has_told = now, True

    def expect(self, total: int) -> None:
        self._total = total
