"""Threads that copy rows: what is written is cut into jobs, done by as many as the disk needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from specpipe.progress import count

JOB_BYTES = 64 << 20
"""What a thread reads and writes before it takes other rows."""

_MAX_THREADS = 8  # more than that no disk needs

_Job = TypeVar("_Job")


def in_threads(
    do: Callable[[_Job], None], jobs: Sequence[_Job], num_bytes: Callable[[_Job], int]
) -> None:
    """Does all jobs. The first failure is raised, and what has not begun by then is left undone.

    num_bytes  what a job copies, which says how far the work is
    """
    with (
        count(sum(map(num_bytes, jobs)), "bytes") as done,
        ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MAX_THREADS)) as pool,
    ):
        for job, _ in zip(jobs, pool.map(do, jobs), strict=True):
            done.advance(num_bytes(job))
