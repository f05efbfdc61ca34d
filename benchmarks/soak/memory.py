"""Whether the memory of a process grows: a sample a second of each process of a server.

What is sampled is RssAnon (proc(5)): what a process has of its own, without files and shared
memory. A process is matched by its role, `speculative` for the models of all versions; one that is
started anew begins anew. `shared memory` is what the models' processes share with Triton, together.

The growth over a time is the slope by least squares over the last 80 % of it, times that, as a
share of the mean.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attack.server import LAUNCHER, Served

SHARED = "shared memory"
WINDOW = 0.8
_INTERVAL_S = 1.0
_MIN_SAMPLES = 3
_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")

Samples = Sequence[tuple[float, int]]  # by time.monotonic(), bytes


@dataclass(frozen=True)
class Growth:
    """What became of the process of a role that lived longest in some time.

    num_processes  that had the role, one after the other or at once
    life_s         for which it was looked at
    mean_bytes     over the last 80 % of that; growth is over it, too, as a share of the mean
    """

    role: str
    num_processes: int
    life_s: float
    mean_bytes: float
    growth: float


class Memory:
    """Looks at the processes of a server each second, on a thread of its own, until `end`."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._is_over = threading.Event()
        self._samples: dict[tuple[str, int], list[tuple[float, int]]] = {}
        self._launchers: set[int] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def between(self, began_s: float, ended_s: float) -> list[Growth]:
        """What became of the processes in a part of the time; to be called after the end."""
        return growths(
            {
                key: [one for one in samples if began_s <= one[0] <= ended_s]
                for key, samples in self._samples.items()
            }
        )

    def _run(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            now = time.monotonic()
            for pid, name in self._served.processes():
                if name == LAUNCHER:
                    self._launchers.add(pid)
                role = re.sub(r"_\d+$", "", name)
                if (size := _own_bytes(pid)) is not None:
                    self._samples.setdefault((role, pid), []).append((now, size))
            shared = sum(map(shared_bytes, self._launchers))
            self._samples.setdefault((SHARED, 0), []).append((now, shared))


def growths(samples: Mapping[tuple[str, int], Samples]) -> list[Growth]:
    """The growth of each role's process that lived longest, by role; samples by role and id."""
    found = []
    for role in sorted({role for role, _ in samples}):
        lives = [one for (of, _), one in samples.items() if of == role and len(one) > 1]
        if not lives:
            continue
        longest = max(lives, key=lambda one: one[-1][0] - one[0][0])
        mean, share = growth(longest)
        life_s = longest[-1][0] - longest[0][0]
        found.append(Growth(role, len(lives), life_s, mean, share))
    return found


def growth(samples: Samples) -> tuple[float, float]:
    """The mean over the window, and the growth over it as a share of that; 0.0 of too few."""
    began, ended = samples[0][0], samples[-1][0]
    start = ended - WINDOW * (ended - began)
    window = [(at, size) for at, size in samples if at >= start]
    mean = sum(size for _, size in window) / len(window)
    mean_at = sum(at for at, _ in window) / len(window)
    spread = sum((at - mean_at) ** 2 for at, _ in window)
    if len(window) < _MIN_SAMPLES or not spread or not mean:
        return mean, 0.0
    slope = sum((at - mean_at) * (size - mean) for at, size in window) / spread
    return mean, slope * (window[-1][0] - window[0][0]) / mean


def _own_bytes(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        status = (_PROC / str(pid) / "status").read_text(errors="replace")
        if found := re.search(r"RssAnon:\s+(\d+) kB", status):
            return int(found[1]) * 1024
    return None


def shared_bytes(launcher: int) -> int:
    """What the processes that a launcher started share, or left behind when they were killed."""
    total = 0
    for path in _shared(launcher):
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * 512  # stat(2)
    return total


def remove_shared(launcher: int) -> int:
    """Removes what a launcher that was killed left, and returns how much that was."""
    left = shared_bytes(launcher)
    for path in _shared(launcher):
        path.unlink(missing_ok=True)
    return left


def _shared(launcher: int) -> list[Path]:
    return list(_SHARED_MEMORY.glob(f"specpipe_{launcher}_*"))
