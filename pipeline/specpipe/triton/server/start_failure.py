"""Why a Triton does not start: what befell its processes, and what they wrote."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

from specpipe.machine.callables import Clock
from specpipe.triton.server import processes
from specpipe.triton.server.log_lines import WITHOUT_GPU

# Triton reaps what it ends itself, and a debugger stops a process for moments.
_PATIENCE_S = 2.0

_MAX_CAUSES, _MAX_CHARS = 3, 300  # of one message; guesses at what is still read

_LOADER = re.compile(
    r"error while loading shared libraries|symbol lookup error|version `.*' not found"
    r"|cannot execute|^bash: "
)
_TRITON = re.compile(r'^E\d{4} \S+ \d+ [\w.-]+:\d+\] "?(.*?)"?$')
_NOT_LOADED = re.compile(r"failed to load '([^']*)' version \S+: \w[\w ]*: (.*)")
_FOLLOWS = re.compile(r"ERROR: Failed to create instance|which has no loaded version")
_UNHEALTHY = re.compile(r"Stub process '.*' is not healthy\.?")
_LAST_WORDS = re.compile(
    r"terminate called|Fatal Python error"
    r"|.*(Too many open files|Cannot allocate memory|Resource temporarily unavailable)"
)
_UNLIKE = re.compile(r"^\w+: |'[^']*'|\d+")  # what one fault's lines of several models differ in


class StartWatch:
    """Looks after the processes of a Triton that starts, which itself waits for dead ones."""

    def __init__(
        self,
        leader: int,
        *,
        uses_mpi: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        """`leader` is tritonserver, or the mpirun that started it; it leads their session."""
        self._leader, self._uses_mpi, self._clock = leader, uses_mpi, clock
        self._names: dict[int, str] = {}
        self._since: dict[int, float] = {}

    def fault(self) -> str | None:
        """Returns what befell one of the processes and lasts; None while all are well."""
        now = self._clock()
        lost = {}
        for process in self._needed():
            if process.state in processes.DEAD | processes.STOPPED:
                lost[process.pid] = process
            else:
                # One that died has no arguments any more.
                self._names[process.pid] = processes.model_name(process)
        self._since = {pid: self._since.get(pid, now) for pid in lost}
        for pid, since in self._since.items():
            if now - since >= _PATIENCE_S:
                has_died = lost[pid].state in processes.DEAD
                name = self._names.get(pid, lost[pid].name)
                return f"{name} {'died' if has_died else 'is stopped'} (pid {pid})"
        return None

    def _needed(self) -> list[processes.Process]:
        session = processes.of_session(self._leader)
        parents = {self._leader}
        if self._uses_mpi:  # each rank is a Triton
            parents |= {process.pid for process in session if process.parent == self._leader}
        return [p for p in session if p.pid in parents or p.parent in parents]


def has_failed(line: str) -> bool:
    """Returns whether Triton ends after this line, once all other models are loaded."""
    return _triton_error(line) is not None and _NOT_LOADED.search(line) is not None


def words(lines: Sequence[str]) -> str:
    """Returns what the processes wrote about their end, nearest cause first, nothing twice."""
    lines = [line for line in lines if line.strip() and not WITHOUT_GPU.search(line)]
    errors = [error for error in map(_triton_error, lines) if error is not None]
    causes = [
        *(line for line in lines if _LOADER.search(line)),
        *(line.strip() for line in lines if line.lstrip().startswith("what(): ")),
        *(error for error in errors if not _UNHEALTHY.search(error)),
        *list(_exceptions(lines))[-1:],
    ]
    if not causes:
        causes = [line for line in lines if _LAST_WORDS.match(line)]
    if not causes:
        causes = [_UNHEALTHY.sub("its process died without a word", error) for error in errors]
    if not causes:
        causes = [line for line in lines if line.startswith("error: ")] or list(lines[-1:])
    distinct = {_UNLIKE.sub("", line): line[:_MAX_CHARS] for line in reversed(causes)}
    return "; ".join(list(reversed(distinct.values()))[:_MAX_CAUSES]) or "it wrote no log"


def _triton_error(line: str) -> str | None:
    """Returns the message of a line that Triton marked as an error, without a Python stack."""
    marked = _TRITON.match(line)
    if marked is None or _FOLLOWS.search(marked[1]):
        return None
    message = marked[1].partition(r"\n\nAt:")[0].replace(r"\n", " ")
    not_loaded = _NOT_LOADED.search(message)
    return message if not_loaded is None else f"{not_loaded[1]}: {not_loaded[2]}"


def _exceptions(lines: Sequence[str]) -> Iterator[str]:
    """Yields the last line of each traceback."""
    is_inside = False
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            is_inside = True
        elif is_inside and not line.startswith(" "):
            is_inside = False
            yield line
