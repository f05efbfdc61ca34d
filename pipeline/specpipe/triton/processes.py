"""What Linux tells of the processes of a session."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_PROC = Path("/proc")
_KILL_TIME_S = 5.0  # only a process that hangs in the kernel takes as long


def session_pids(session: int) -> list[int]:
    """The processes of a session that still run, by id."""
    found = []
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, *fields = _stat(int(folder.name))
            if int(fields[2]) == session and state != "Z":
                found.append(int(folder.name))
    return sorted(found)


def arguments(pid: int) -> list[str]:
    """The command line of a process; [] where it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def has_dead_child(pid: int) -> bool:
    """True when a child of the process died and was not looked after."""
    try:
        children = [
            int(child)
            for listed in (_PROC / str(pid) / "task").glob("*/children")
            for child in listed.read_text().split()
        ]
        return any(_stat(child)[0] == "Z" for child in children)
    except OSError:
        return False


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


def _stat(pid: int) -> list[str]:
    """State, parent, group, session and more (proc(5)); the name before may hold anything."""
    return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
