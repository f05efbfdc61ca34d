"""What commands report on stderr while they run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from specpipe.build.execution import StageReport


def log(line: str) -> None:
    """Writes a line to stderr."""
    click.echo(line, err=True)


class BuildProgress:
    """Writes to stderr what a build does."""

    def started(self, stage: str, reasons: Sequence[str]) -> None:
        from specpipe.build.execution import start_lines

        for line in start_lines(stage, reasons):
            log(line)

    def waiting(self, stage: str) -> None:
        log(f"{stage}: another build of it is running, waiting")

    def finished(self, report: StageReport) -> None:
        outcome = f"built in {report.duration_s:.1f} s" if report.reasons else "up to date"
        log(f"{report.stage}: {outcome}")
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
