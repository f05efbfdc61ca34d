"""Memory and utilisation of the GPUs of this machine while something runs, from nvidia-smi."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

_FIELDS = ("index", "memory.used", "utilization.gpu")
_INTERVAL_MS = 500


@dataclass
class GpuUse:
    """Samples by GPU index: MiB in use (by anyone), percent of the time that a kernel ran."""

    memory_mib: dict[int, list[float]] = field(default_factory=dict)
    utilization: dict[int, list[float]] = field(default_factory=dict)

    def add(self, line: str) -> None:
        """Takes in a line of nvidia-smi; what a GPU does not support it writes in brackets."""
        index, *values = (part.strip() for part in line.split(","))
        if not index.isdecimal() or len(values) != len(_FIELDS) - 1:
            return
        for samples, value in zip((self.memory_mib, self.utilization), values, strict=True):
            with contextlib.suppress(ValueError):
                samples.setdefault(int(index), []).append(float(value))

    def to_json(self) -> list[dict[str, Any]]:
        """The most memory and the mean utilisation of each GPU that was seen."""
        return [
            {
                "gpu": index,
                "max_memory_mib": max(self.memory_mib.get(index, []), default=None),
                "mean_utilization_percent": _mean(self.utilization.get(index, [])),
            }
            for index in sorted({*self.memory_mib, *self.utilization})
        ]


@contextlib.contextmanager
def watched(use: GpuUse, *, where: bool = True) -> Iterator[None]:
    """Samples all GPUs twice a second for the time of a `with` block, where there are any."""
    command = shutil.which("nvidia-smi") if where else None
    if command is None:
        yield
        return
    query = [
        command,
        f"--query-gpu={','.join(_FIELDS)}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={_INTERVAL_MS}",
    ]
    process = subprocess.Popen(
        query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, use), daemon=True)
    reader.start()
    try:
        yield
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()


def _read(lines: Iterable[str], use: GpuUse) -> None:
    for line in lines:
        use.add(line)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
