"""What a pair takes in memory, and what the machine has, of that and of disks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specpipe.errors import RuntimeUnavailable

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that an engine takes once it is loaded."""

    weights_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.workspace_bytes

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.total_bytes)} ({format_bytes(self.weights_bytes)} weights, "
            f"{format_bytes(self.kv_cache_bytes)} KV cache, "
            f"{format_bytes(self.workspace_bytes)} workspace)"
        )


def available_bytes() -> int | None:
    """Returns how much memory this process may still take; None where that is unknown.

    On Linux: what the kernel calls available, or what a container's limit leaves if that is less.
    """
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except OSError:
        return available
    return available if limit == "max" else min(available, max(int(limit) - used, 0))


def check_room(
    needs: Sequence[tuple[Path, MemoryEstimate]],
    available: int | None,
    *,
    on_gpu: bool,
    to_lower: str = "engine.max_batch_size or engine.max_seq_len",
) -> None:
    """Refuses engines that together do not fit into what memory is left.

    needs     folder and needs of each; available is None where that is not known
    to_lower  the settings that decide what they need
    """
    needed = sum(need.total_bytes for _, need in needs)
    if available is not None and needed > available:
        each = "; ".join(f"{folder} needs {need}" for folder, need in needs)
        raise RuntimeUnavailable(
            f"{format_bytes(available)} of {'GPU ' if on_gpu else ''}memory are free: {each}; "
            f"lower {to_lower}"
        )


def total_bytes() -> int | None:
    """Returns how much memory this machine has; None where that is unknown."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return int(dict(line.split(":", 1) for line in lines)["MemTotal"].split()[0]) * 1024


def format_bytes(count: int) -> str:
    """Writes a number of bytes as people say it: 5.5 GB, 22.0 MB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1000:.1f} kB"


def existing_parent(path: Path) -> Path:
    """Returns the nearest folder above a path that is there."""
    return next(parent for parent in path.absolute().parents if parent.is_dir())


def disk_shortage(folder: Path, num_bytes: int) -> str | None:
    """Returns "FOLDER has … free, and …" where its disk lacks room for so many bytes, else None."""
    free = shutil.disk_usage(folder).free
    if num_bytes <= free:
        return None
    return f"{folder} has {format_bytes(free)} free, and {format_bytes(num_bytes)}"
