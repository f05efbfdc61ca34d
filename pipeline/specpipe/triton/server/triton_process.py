"""The process of one Triton, with all that it starts: begun, read, asked to end, killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from specpipe.errors import ServerError
from specpipe.machine.callables import Log
from specpipe.machine.signals import deferred
from specpipe.triton.server import processes
from specpipe.triton.server.command import MPI_RUN, shared_memory_argument
from specpipe.triton.server.health import NeededProcesses

_SHARED_MEMORY = Path("/dev/shm")
_MAX_LOG_LINES = 200
EXIT_TIME_S = 10.0
"""What Triton may take to unload its models."""


class TritonProcess:
    """One after the other, as often as it is started; mpirun and its ranks where there are ranks.

    Each has a session of its own, in which are also the processes of Python models.
    """

    def __init__(self, log: Log, *, uses_mpi: bool) -> None:
        self._log, self._uses_mpi = log, uses_mpi
        self._last_lines: deque[str] = deque(maxlen=_MAX_LOG_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._log_reader: threading.Thread | None = None
        self.shared_memory_prefix = f"specpipe_{os.getpid()}_{id(self):x}_"

    @property
    def pid(self) -> int:
        """Of what was started, which is the session's too; ServerError says that it was killed."""
        if (process := self._process) is None:
            raise ServerError("Triton does not run")
        return process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def last_log_lines(self) -> list[str]:
        """What Triton and the models wrote last."""
        return list(self._last_lines)

    @deferred()
    def start(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._last_lines.clear()
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # for `kill`
        )
        assert self._process.stdout is not None
        self._log_reader = threading.Thread(
            target=self._read_log, args=(self._process.stdout,), name="triton-log", daemon=True
        )
        self._log_reader.start()

    def needed_processes(
        self, models: frozenset[str], *, is_whole_server: bool = True
    ) -> NeededProcesses:
        """The processes of these models, and those of the server itself."""
        return NeededProcesses(
            self.pid, models=models, is_whole_server=is_whole_server, uses_mpi=self._uses_mpi
        )

    def wait(self, seconds: float) -> None:
        """Waits for the end of Triton, at most some seconds."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def has_lost_model(self) -> bool:
        """True when Triton is stopped, or a child of it is or died: a model's process.

        Triton reaps those that it unloads itself, which it does once no request is in flight.
        """
        triton = self.triton_pid()
        return any(
            process.state in processes.DEAD | processes.STOPPED
            for process in processes.of_session(self.pid)
            if triton in (process.pid, process.parent)
        )

    def triton_pid(self) -> int:
        """The process of the Triton that answers: with MPI, the first rank's."""
        if self._uses_mpi:
            mark = shared_memory_argument(self.shared_memory_prefix, 0)
            for pid in processes.session_pids(self.pid):
                arguments = processes.arguments(pid)
                if mark in arguments and MPI_RUN[1] not in arguments:
                    return pid
        return self.pid

    def terminate(self) -> None:
        """Asks Triton to end. Not mpirun, which would kill all ranks a moment later.

        Open MPI 5.0 sends SIGKILL half a second after it passed SIGTERM on. Other ranks end when
        the first one does.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.triton_pid(), signal.SIGTERM)

    def kill(self) -> None:
        """Ends all processes at once and removes the memory that they leave behind."""
        if self._process is not None:
            processes.kill_session(self._process.pid)
            # One that hangs in the kernel does not even die; the next start finds its ports taken.
            self.wait(EXIT_TIME_S)
            assert self._log_reader is not None
            self._log_reader.join(timeout=5)
            self._process = None
        for left in _SHARED_MEMORY.glob(f"{self.shared_memory_prefix}*"):
            left.unlink(missing_ok=True)

    def signal_all(self, number: signal.Signals) -> None:
        """Sends a signal to Triton and the processes of its models.

        mpirun gives each rank a process group of its own, but leaves all in one session.
        """
        if self._process is not None:
            processes.signal_session(self._process.pid, number)

    def _read_log(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._last_lines.append(line.rstrip("\n"))
                # A log that cannot be written, such as a closed terminal, must not end this thread:
                # with nobody at the other end of its pipe each line fails Triton and the models.
                with contextlib.suppress(OSError, ValueError):
                    self._log(line.rstrip("\n"))
