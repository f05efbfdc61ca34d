from __future__ import annotations

import itertools

from specpipe import progress
from specpipe.triton.load_progress import LoadProgress


def lines(num: int, *, seconds_each: float) -> list[str]:
    """What is told of so many kernels."""
    told: list[str] = []
    clock = itertools.count(0.0, seconds_each).__next__
    with progress.shown(LoadProgress(told.append, clock)):
        list(progress.counted(range(num), num, "kernels"))
    return told


def test_a_line_comes_every_five_seconds_and_at_the_end() -> None:
    told = lines(6, seconds_each=2.5)
    assert told == [f"{num} of 6 kernels are ready" for num in (2, 4, 6)]
    assert lines(3, seconds_each=2.5)[-1] == "3 of 3 kernels are ready"


def test_what_takes_no_time_is_not_told() -> None:
    assert lines(1000, seconds_each=0.004) == []
