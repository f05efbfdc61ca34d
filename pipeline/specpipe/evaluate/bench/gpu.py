"""Memory and utilisation of the GPUs of this machine while something runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from specpipe.machine.gpus import watch_use

_INTERVAL_S = 0.5


@dataclass
class GpuUse:
    """Samples by GPU index: MiB in use (by anyone), percent of the time that a kernel ran."""

    memory_mib: dict[int, list[float]] = field(default_factory=dict)
    utilization: dict[int, list[float]] = field(default_factory=dict)

    def add(self, index: int, used_bytes: int | None, percent: int | None) -> None:
        """Takes in a sample; what a GPU does not tell is left out."""
        memory = self.memory_mib.setdefault(index, [])
        utilization = self.utilization.setdefault(index, [])
        if used_bytes is not None:
            memory.append(float(used_bytes // 2**20))
        if percent is not None:
            utilization.append(float(percent))

    def to_json(self) -> list[dict[str, Any]]:
        """The most memory and the mean utilisation of each GPU that was seen."""
        return [
            {
                "gpu": index,
                "max_memory_mib": max(self.memory_mib[index], default=None),
                "mean_utilization_percent": _mean(self.utilization[index]),
            }
            for index in sorted(self.memory_mib)
        ]


@contextlib.contextmanager
def watched(use: GpuUse, *, where: bool = True) -> Iterator[None]:
    """Samples all GPUs twice a second for the time of a `with` block, where there are any."""
    if not where:
        yield
        return
    is_over = threading.Event()
    sampler = threading.Thread(target=watch_use, args=(_INTERVAL_S, is_over, use.add), daemon=True)
    sampler.start()
    try:
        yield
    finally:
        is_over.set()
        sampler.join()


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
