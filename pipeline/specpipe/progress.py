"""How far long work is: said by what does it, shown by whoever started it, or by nobody.

What works names a phase and counts in it, and knows no terminal. A command puts a display in its
place (cli/progress.py); without one, as in a server or under a caller's own program, nothing is
shown. The display is that of the thread that began: what other threads count is counted in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal, Protocol, TypeVar

Unit = Literal[
    "bytes", "answers", "graphs", "kernels", "layers", "loads", "rounds", "sides", "steps", "tests",
    "texts", "updates",
]  # fmt: skip
"""What is counted, in the plural."""

_Item = TypeVar("_Item")


class Count(Protocol):
    """Something of which more and more is done; any thread may say so."""

    def advance(self, amount: int = 1) -> None: ...

    def expect(self, total: int) -> None:
        """Says how much it will be, where that was not known or has changed."""


class Display(Protocol):
    """Shows what goes on."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Names what goes on during a `with` block; phases may lie in one another."""

    def count(self, total: int | None, unit: Unit) -> AbstractContextManager[Count]:
        """Counts, during a `with` block, in the innermost phase; a total of None is not known."""


class _Nothing:
    """Shows nothing."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    @contextmanager
    def count(self, total: int | None, unit: Unit) -> Iterator[Count]:
        yield self

    def advance(self, amount: int = 1) -> None: ...

    def expect(self, total: int) -> None: ...


NOTHING: Display = _Nothing()
"""The display that shows nothing."""

_display: ContextVar[Display] = ContextVar("display")


@contextmanager
def shown(display: Display) -> Iterator[None]:
    """Shows on a display what goes on in a `with` block."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


def phase(name: str) -> AbstractContextManager[None]:
    """Names what goes on during a `with` block: `target/convert`, `greedy: K = 4`."""
    return _display.get(NOTHING).phase(name)


@contextmanager
def logged_phase(name: str, log: Callable[[str], None]) -> Iterator[None]:
    """Names what goes on during a `with` block, and logs the name when it begins."""
    log(name)
    with phase(name):
        yield


def count(total: int | None, unit: Unit) -> AbstractContextManager[Count]:
    """Counts what is done during a `with` block; a total of None is not known yet."""
    return _display.get(NOTHING).count(total, unit)


def counted(
    items: Iterable[_Item],
    total: int,
    unit: Unit,
    amount: Callable[[_Item], int] = lambda item: 1,
) -> Iterator[_Item]:
    """Yields the items; each counts as done when the next one is asked for."""
    with count(total, unit) as counter:
        for item in items:
            yield item
            counter.advance(amount(item))
