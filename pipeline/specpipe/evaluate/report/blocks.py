"""What a page is made of, as data: the template decides how it looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from specpipe.evaluate.report.artifact import Artifact, Json
from specpipe.evaluate.report.charts import Chart
from specpipe.machine.memory import format_bytes

UNKNOWN = "–"

Tone = Literal["good", "bad", "neutral"]


class Block(Protocol):
    """One thing on a page; the template distinguishes them by `kind`."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Notice:
    """A sentence that must not be overlooked."""

    kind: ClassVar[str] = "notice"
    text: str
    tone: Tone = "neutral"


@dataclass(frozen=True)
class Missing:
    """A part that is not there, with the command that makes it."""

    kind: ClassVar[str] = "missing"
    text: str
    command: str


@dataclass(frozen=True)
class Code:
    """Lines to copy."""

    kind: ClassVar[str] = "code"
    text: str
    title: str


@dataclass(frozen=True)
class Column:
    """A column of a table; numbers stand to the right."""

    name: str
    unit: str = ""
    is_text: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells as they are shown. A table that is folded opens by a click, and in print."""

    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    is_folded: bool = False
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A chart, what it shows and under which conditions, and its numbers as a table.

    slug  names it in links, and its PNG file
    """

    kind: ClassVar[str] = "figure"
    slug: str
    title: str
    caption: str
    chart: Chart
    table: Table


@dataclass(frozen=True)
class PageSection:
    """A part of the page."""

    slug: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Tile:
    """One of the few numbers that a reader wants first."""

    name: str
    value: str
    note: str = ""
    tone: Tone = "neutral"


@dataclass(frozen=True)
class Page:
    """The whole report."""

    title: str
    subtitle: str
    made_at: str
    tiles: Sequence[Tile] = ()
    sections: Sequence[PageSection] = field(default_factory=tuple)

    @property
    def figures(self) -> list[Figure]:
        return [b for s in self.sections for b in s.blocks if isinstance(b, Figure)]


def outdated(artifact: Artifact, result: Json | None, command: str) -> Iterator[Block]:
    """Yields a notice where a result is that of an earlier build of the repository."""
    if result is not None and artifact.is_older_than_repository(result):
        yield Notice(
            f"Measured on {result['made_at'][:10]}, before the repository was built "
            f"({str(artifact.packaged_at)[:10]}): `{artifact.command(command)}` measures it anew.",
            "bad",
        )


def number(value: float | None, num_digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:,.{num_digits}f}"


def count(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def percent(value: float | None, num_digits: int = 0) -> str:
    """Returns a share as a percentage, without the sign: the column has it."""
    return UNKNOWN if value is None else f"{100 * value:.{num_digits}f}"


def interval(low: float | None, high: float | None, num_digits: int = 2) -> str:
    if low is None or high is None:
        return UNKNOWN
    return f"{low:.{num_digits}f} to {high:.{num_digits}f}"


def size(num_bytes: int | None) -> str:
    return UNKNOWN if num_bytes is None else format_bytes(num_bytes)
