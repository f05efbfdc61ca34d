"""The processes of a session, as Linux describes them (proc(5))."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

DEAD = frozenset("ZXx")
STOPPED = frozenset("Tt")  # by a signal, and by a debugger

_PROC = Path("/proc")
_KILL_TIME_S = 5.0  # only a process that hangs in the kernel takes as long
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A process as it was at one moment (proc(5)).

    state        one letter, those of DEAD and STOPPED among them
    start_ticks  when it started, which a later process with the same id does not share
    cpu_s        the time that it has computed
    """

    pid: int
    name: str
    parent: int
    session: int
    state: str
    start_ticks: int
    cpu_s: float


def look(pid: int) -> Process | None:
    """Returns a process as it is now; None where it is gone."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = stat.rpartition(")")  # the name between brackets may hold anything
    fields = tail.split()
    return Process(
        pid=pid,
        name=head.partition("(")[2],
        parent=int(fields[1]),
        session=int(fields[3]),
        state=fields[0],
        start_ticks=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
    )


def of_session(session: int) -> list[Process]:
    """Returns the processes of a session, dead ones that were not yet waited for included."""
    processes = (look(int(folder.name)) for folder in _PROC.glob("[0-9]*"))
    return [process for process in processes if process is not None and process.session == session]


def session_pids(session: int) -> list[int]:
    """Returns the ids of a session's processes that are not dead, in order."""
    return sorted(process.pid for process in of_session(session) if process.state not in DEAD)


def arguments(pid: int) -> list[str]:
    """Returns the command line of a process; [] where it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def is_ending(process: Process) -> bool:
    """Returns whether it is dead or about to be: exit(2) takes the memory, and with it the
    arguments, some time before the state says so.
    """
    return process.state in DEAD or not any(arguments(process.pid))


def model_name(process: Process) -> str:
    """Returns the model's name, by the path of model.py in its arguments; else the program's."""
    return _model(process) or process.name


def runs_model(process: Process) -> bool:
    """Returns whether it is the process of a Python model."""
    return _model(process) is not None


def _model(process: Process) -> str | None:
    for argument in arguments(process.pid):
        path = Path(argument)
        if path.name == "model.py" and len(path.parts) > 2:
            return path.parts[-3]
    return None


def memory_bytes(pid: int) -> int:
    """Returns the memory of a process, its share of what others have, too; 0 where it is gone."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def signal_session(session: int, number: signal.Signals) -> None:
    """Sends a signal to every process of a session, whatever its group."""
    for pid in session_pids(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_session(session: int) -> None:
    """Kills every process of a session, also those that are being started meanwhile."""
    deadline = time.monotonic() + _KILL_TIME_S
    while time.monotonic() < deadline and session_pids(session):
        signal_session(session, signal.SIGKILL)
        time.sleep(0.01)
