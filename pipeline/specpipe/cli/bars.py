"""Progress on a terminal: a line for each phase, with a bar, how much is done, rate, time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.filesize import decimal, pick_unit_and_suffix
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from specpipe.machine.signals import deferred
from specpipe.progress import Unit

_PER_SECOND = 2
"""How often the lines are drawn: each time takes some milliseconds of the process that works, and
may be measured."""

_NARROW = 80  # columns, below which there is room for neither a bar nor a rate
_BAR = 16
_BESIDE, _BESIDE_NARROW = 62, 28  # columns for what stands beside the name
_BYTES = ["bytes", "kB", "MB", "GB", "TB"]
_RATE_S = 600.0  # the rate is that of the last ten minutes: a layer may take one


class Bars:
    """Lines that are drawn again and again below what is logged, and vanish when done.

    The cursor stays visible, so that a process that is killed leaves the terminal whole.
    """

    def __init__(self) -> None:
        console = _Console(stderr=True, force_terminal=True)
        is_wide = console.width >= _NARROW
        widest = console.width - (_BESIDE if is_wide else _BESIDE_NARROW)
        name = TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", max_width=max(widest, 8)),
        )
        self._progress = Progress(
            name,
            *([BarColumn(_BAR), _Done(), _Rate(), _Time()] if is_wide else [_Done(), _Time()]),
            console=console,
            refresh_per_second=_PER_SECOND,
            speed_estimate_period=_RATE_S,
            transient=True,
            redirect_stdout=False,  # results may go elsewhere than progress
        )
        self._tasks: list[TaskID] = []
        self._counting: set[TaskID] = set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with deferred():
            self._tasks.append(self._progress.add_task(name, total=None, unit=""))
            self._progress.start()
        try:
            yield
        finally:
            with deferred():
                self._progress.remove_task(self._tasks.pop())
                if not self._tasks:
                    self._progress.stop()

    @contextmanager
    def count(self, total: int | None, unit: Unit) -> Iterator[_Counter]:
        if not self._tasks or self._tasks[-1] in self._counting:
            with self.phase(unit), self.count(total, unit) as counter:
                yield counter
            return
        task = self._tasks[-1]
        self._counting.add(task)
        self._progress.reset(task, total=total, unit=unit)
        try:
            yield _Counter(self._progress, task)
        finally:
            self._counting.remove(task)
            self._progress.reset(task, total=None, unit="")


class _Counter:
    """What is counted in one line."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: int = 1) -> None:
        self._progress.advance(self._task, amount)

    def expect(self, total: int) -> None:
        self._progress.update(self._task, total=total)


class _Console(Console):
    def show_cursor(self, show: bool = True) -> bool:
        return False


class _Column(ProgressColumn):
    def get_table_column(self) -> Column:
        return Column(no_wrap=True)


class _Done(_Column):
    """How much is done, of how much."""

    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        amounts = [task.completed] if task.total is None else [task.completed, task.total]
        if not unit:
            return Text()
        if unit != "bytes":
            done = "/".join(f"{amount:,.0f}" for amount in amounts)
        else:
            scale, unit = pick_unit_and_suffix(int(amounts[-1]), _BYTES, 1000)
            done = "/".join(f"{amount / scale:,.1f}" for amount in amounts)
        return Text(f"{done} {unit}", style="progress.download")


class _Rate(_Column):
    """How much is done in a second, or in a minute."""

    def render(self, task: Task) -> Text:
        unit, speed = task.fields["unit"], task.speed
        if unit in ("", "steps") or not speed:
            return Text()
        if unit == "bytes":
            rate = f"{decimal(int(speed))}/s"
        else:
            rate = f"{speed:,.1f}/s" if speed >= 1.0 else f"{60 * speed:,.1f}/min"
        return Text(rate, style="progress.data.speed")


class _Time(_Column):
    """The time left at that rate; where that is not known, the time that has passed.

    The steps of a builder are too different for a rate.
    """

    def render(self, task: Task) -> Text:
        left = None if task.fields["unit"] == "steps" else task.time_remaining
        if left is not None and not task.finished:
            return Text(f"{timedelta(seconds=int(left))} left", style="progress.remaining")
        return Text(str(timedelta(seconds=int(task.elapsed or 0.0))), style="progress.elapsed")
