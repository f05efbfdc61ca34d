"""Threads that copy rows: what is written is cut into jobs, done by as many as the disk needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

JOB_BYTES = 64 << 20
"""What a thread reads and writes before it takes other rows."""

_MAX_THREADS = 8  # more than that no disk needs

_Job = TypeVar("_Job")


def in_threads(do: Callable[[_Job], None], jobs: Iterable[_Job]) -> None:
    """Does all jobs. The first failure is raised, and what has not begun by then is left undone."""
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MAX_THREADS)) as pool:
        for _ in pool.map(do, jobs):
            pass
