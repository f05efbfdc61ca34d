"""Charts as data: series in panels, over axes that have units. drawing.py draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_MAX_COLUMNS = 2  # panels side by side: more would leave their labels no room

Style = Literal["line", "dashed", "points", "bars"]


@dataclass(frozen=True)
class Axis:
    """What an axis shows, and in which unit.

    ticks   all there are, where any are given
    is_log  to the base 2
    """

    name: str
    unit: str
    ticks: tuple[float, ...] = ()
    tick_labels: tuple[str, ...] = ()
    is_log: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def label(self) -> str:
        return f"{self.name} ({self.unit})"


def counted(longest: int) -> tuple[float, ...]:
    """Returns ticks from 1 on, so few of them that their labels have room."""
    return tuple(range(1, longest + 1, -(-longest // 8)))


@dataclass(frozen=True)
class Series:
    """Points by rising x.

    bounds  of each y, for a bar of uncertainty; none: no bars
    colour  number of a colour: series of one kind share it
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    bounds: Sequence[tuple[float, float]] = ()
    colour: int = 0
    style: Style = "line"


@dataclass(frozen=True)
class Panel:
    """Series over one x."""

    series: Sequence[Series]
    title: str = ""


@dataclass(frozen=True)
class Chart:
    """Panels with axes alike, and with one legend: that of the first panel.

    reference  a level to compare with, such as 1 for a ratio
    """

    x: Axis
    y: Axis
    panels: Sequence[Panel]
    reference: float | None = None

    @property
    def num_columns(self) -> int:
        return min(len(self.panels), _MAX_COLUMNS)

    @property
    def num_rows(self) -> int:
        return -(-len(self.panels) // self.num_columns)
