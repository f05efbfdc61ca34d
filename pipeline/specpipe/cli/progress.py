"""What commands report on stderr while they run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING

from specpipe.progress import Count, Display, Unit

if TYPE_CHECKING:
    from specpipe.build.execution import StageReport


def log(line: str) -> None:
    """Writes a line to stderr, above bars that are drawn there.

    One that cannot be written, as on a full disk or a terminal that closed, is lost: a server goes
    on, and a command ends as it would.
    """
    if sys.stderr is not None:  # which bars replace, and click would go past
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Says whether stderr is a terminal that can draw over what it shows."""
    can_draw = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    return can_draw and sys.stderr is not None and sys.stderr.isatty()


class StderrDisplay:
    """Bars on a terminal, lines elsewhere; what draws is imported when there is something to."""

    @cached_property
    def _display(self) -> Display:
        if not on_terminal():
            return Lines()
        from specpipe.cli.bars import Bars

        return Bars()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._display.phase(name)

    def count(self, total: int | None, unit: Unit) -> AbstractContextManager[Count]:
        return self._display.count(total, unit)


class Lines:
    """A line to stderr whenever a fixed amount is done: two equal runs write equal bytes.

    By the clock, or with the time that is left, they would not. The amounts are such that, but for
    toys, each takes a second or more.
    """

    def __init__(self) -> None:
        self._phases: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phases.append(name)
        try:
            yield
        finally:
            self._phases.pop()

    @contextlib.contextmanager
    def count(self, total: int | None, unit: Unit) -> Iterator[Count]:
        yield _LineCount(self._phases[-1] if self._phases else unit, total, unit)


class _LineCount:
    """What is counted in one phase; its end needs no line, and its beginning one for a download."""

    def __init__(self, name: str, total: int | None, unit: Unit) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._step = _STEPS.get(unit)
        self._done = 0
        self._lock = threading.Lock()

    def advance(self, amount: int = 1) -> None:
        if self._step is None:
            return
        with self._lock:
            before, self._done = self._done, self._done + amount
            if self._total is None and not before:
                log(self._name)
            num_steps = self._done // self._step
            is_last = self._total is not None and self._done >= self._total
            if num_steps > before // self._step and not is_last:
                log(f"{self._name}: {self._amount(num_steps * self._step)}")

    def expect(self, total: int) -> None:
        if self._unit != "bytes":  # that of a download grows while other threads count
            self._total = total

    def _amount(self, done: int) -> str:
        scale, unit = (10**9, "GB") if self._unit == "bytes" else (1, self._unit)
        if self._total is None:
            return f"{done // scale} {unit}"
        return f"{done // scale} of {-(-self._total // scale)} {unit}"


_STEPS: dict[Unit, int] = {
    "bytes": 4 * 10**9,
    "answers": 1000,
    "graphs": 100,
    "kernels": 50,
    "layers": 1,
    "steps": 1,
    "tests": 1,
    "texts": 100,
}
"""What is worth a line; of the other units each one is logged by its name when it begins."""


def outcome(report: StageReport) -> str:
    """Returns what became of a stage; how long it took is for a terminal, and for --json."""
    took = f" in {report.duration_s:.1f} s" if on_terminal() else ""
    return f"{report.stage}: {f'built{took}' if report.reasons else 'up to date'}"


class BuildProgress:
    """Writes to stderr what a build does."""

    def planned(self, reports: Sequence[StageReport]) -> None:
        running = [report for report in reports if report.reasons]
        if not running:
            return
        names = ", ".join(report.stage for report in running)
        last_s = sum(report.duration_s for report in running)
        is_known = on_terminal() and all(report.duration_s for report in running)
        took = f"; it took {last_s:.0f} s last time" if is_known else ""
        log(f"to build: {names} ({len(running)} of {len(reports)}){took}")

    def started(self, stage: str, reasons: Sequence[str]) -> None:
        from specpipe.build.execution import start_lines

        for line in start_lines(stage, reasons):
            log(line)

    def waiting(self, stage: str) -> None:
        log(f"{stage}: another build of it is running, waiting")

    def finished(self, report: StageReport) -> None:
        log(outcome(report))
        if report.shows is not None:
            log((report.artifact / report.shows).read_text(encoding="utf-8").rstrip())


class _LogLines(logging.Handler):
    """Writes to stderr what the builders' programs print."""

    def emit(self, record: logging.LogRecord) -> None:
        log(self.format(record))


@contextlib.contextmanager
def log_shown() -> Iterator[None]:
    """Shows what the builders' programs print, for the time of a `with` block."""
    logger = logging.getLogger("specpipe")
    handler, level = _LogLines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
