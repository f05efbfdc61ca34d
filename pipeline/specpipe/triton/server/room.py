"""Whether a second version fits beside the one that is served, by what that one took.

What a pair takes beside its files (KV cache, workspace, libraries) follows from its settings, which
are hardly ever others from one version to the next; so the new one is taken to need what the old
one holds, and as much more as its files are larger.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from specpipe.machine import gpus, memory
from specpipe.machine.memory import format_bytes
from specpipe.triton.server import processes
from specpipe.triton.server.served_models import Version

if TYPE_CHECKING:
    from specpipe.triton.server.server import Server


def shortage(server: Server, version: Version) -> str | None:
    """Returns why a version does not fit beside what is served; None: it does, as far as is known.

    A GPU tells what each process holds to who shares its process ids: often not in a container.
    """
    larger = _size(version.repository) - _size(server.version.repository)
    pids = server.processes_of(server.version).pids
    held = sum(map(processes.memory_bytes, pids))
    free = memory.available_bytes()
    if free is not None and held + larger > free:
        return (
            f"it needs some {format_bytes(held + larger)} of memory, {format_bytes(free)} are free"
        )
    for number, (on_gpu, free_there) in gpus.held_by(_with_server(pids, server)).items():
        needed = on_gpu + larger
        if on_gpu and needed > free_there:
            return (
                f"it needs some {format_bytes(needed)} of GPU {number}, "
                f"{format_bytes(free_there)} are free"
            )
    return None


def _with_server(pids: Iterable[int], server: Server) -> set[int]:
    """TensorRT-LLM's C++ backend runs the engines in the server's own process."""
    return {*pids, server.triton.triton_pid()}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
