"""A process that does work which a stranger decides: started, asked, killed when it takes too long.

It is a fresh interpreter, since a fork of a process with threads may hang, and is asked over a
socket pair. It ends when the other end closes, so that none outlives its parent; a thread waits for
its end, so that none is left a zombie. `worker_process.py` is the other side.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

# Modules are found where this process finds them, after the interpreter's own.
_BOOT = (
    "import importlib, json, sys; sys.path += json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).serve()"
)
_START_S = 60.0  # for an interpreter to start, on a machine that is busy
_BLOCK_BYTES = 1 << 16  # most that is read at once, as worker_process.py does
_PATIENCE = 5  # a process may be given no more than a fifth of a core
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)


@dataclass(frozen=True)
class Answer:
    """What became of some work: a result, or a fault in words that fit into a sentence.

    kind  of the fault: what comes before all work failed, the work itself refused, or it took more
          than it may
    """

    result: Any = None
    fault: str | None = None
    kind: Literal["setup", "refusal", "limit"] = "limit"


class Worker:
    """One process, started when needed, and again where it has gone.

    Threads may share it; a fork gets a process of its own.
    """

    def __init__(self, module: str, setup: Mapping[str, Any]) -> None:
        """`module` serves in the process; `setup` is the first line that it reads.

        Of the setup, `seconds`, `memory_bytes` and `limits` are read here: the limits of each work,
        and what their names in serving.limits begin with; `setup_seconds`, if there, are those of
        what comes before all work.
        """
        self._module, self._setup = module, setup
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._process: _Process | None = None
        self._setup_fault: Answer | None = None

    def start(self) -> None:
        """Starts the process, unless it runs, and has it do what comes before all work."""
        self._leave_to_parent()
        with self._lock:
            self._started()

    def ask(self, work: Mapping[str, Any]) -> Answer:
        """Returns what became of some work; replaces a process once that was killed meanwhile."""
        request = json.dumps(work, ensure_ascii=False)
        self._leave_to_parent()
        with self._lock:
            for is_last in (False, True):
                started = self._started()
                if self._process is None:
                    return started
                try:
                    return self._process.ask(request, self._setup["seconds"] * _PATIENCE)
                except _Ended as exc:
                    self._drop()
                    if is_last or exc.code not in _FROM_OUTSIDE:
                        return self._ended(exc)
        raise AssertionError("unreachable")

    def _leave_to_parent(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._lock, self._process = os.getpid(), threading.Lock(), None

    def _started(self) -> Answer:
        """Returns what became of the setup; without a fault, a process is there."""
        if self._setup_fault is not None:
            return self._setup_fault
        if self._process is not None:
            if self._process.is_alive():
                return Answer()
            self._drop()
        try:
            self._process = _Process(self._module)
            prepared = self._process.ask(json.dumps(self._setup), _START_S)
        except OSError as exc:
            return Answer(fault=f"no process can be started for it: {exc.strerror}")
        except _Ended as exc:
            self._drop()
            return replace(self._ended(exc), kind="setup")
        if prepared.fault is not None:
            self._drop()
            self._setup_fault = prepared = replace(prepared, kind="setup")
        return prepared

    def _drop(self) -> None:
        assert self._process is not None
        self._process.end()
        self._process = None

    def _ended(self, exc: _Ended) -> Answer:
        if exc.code in (None, -signal.SIGPROF):
            seconds = f"{self._setup['seconds']:g} s"
            limit = f"serving.limits.{self._setup['limits']}_seconds"
            return Answer(fault=f"it takes longer than {seconds} ({limit})")
        name = signal.Signals(-exc.code).name if exc.code < 0 else f"exit code {exc.code}"
        return Answer(fault=f"the process that does it died ({name})")


class _Ended(Exception):
    """The process ended: its exit code, minus a signal's number; None: it was too slow."""

    def __init__(self, code: int | None) -> None:
        self.code = code


class _Process:
    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [_interpreter(), "-I", "-S", "-c", _BOOT, json.dumps(_search_path()), module],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        self._socket, self._process = ours, process
        self._reaper = threading.Thread(target=process.wait, name=f"{module}-reaper", daemon=True)
        self._reaper.start()
        self.end = weakref.finalize(self, _end, os.getpid(), ours, process, self._reaper)

    def is_alive(self) -> bool:
        return self._reaper.is_alive()

    def ask(self, request: str, timeout_s: float) -> Answer:
        """Sends one line and returns the answer; raises _Ended where there is none."""
        deadline = time.monotonic() + timeout_s
        try:
            self._socket.settimeout(timeout_s)
            line = f"{request}\n".encode(errors="surrogatepass")
            # Whether SIGPIPE ends this process is decided by the program that embeds Python.
            self._socket.sendall(line, socket.MSG_NOSIGNAL)
            answer = bytearray()
            while not answer.endswith(b"\n"):
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                block = self._socket.recv(_BLOCK_BYTES)
                if not block:
                    raise EOFError
                answer += block
            return Answer(**json.loads(answer))
        except TimeoutError:
            raise _Ended(None) from None
        except (EOFError, OSError):
            self._reaper.join()
            raise _Ended(self._process.returncode) from None


def _end(
    owner: int, ours: socket.socket, process: subprocess.Popen[bytes], reaper: threading.Thread
) -> None:
    ours.close()
    if owner == os.getpid():  # not in a fork, whose parent's process it is
        process.kill()
        reaper.join()


def _interpreter() -> str:
    """Returns this interpreter, or where Python is embedded, as in Triton, the environment's."""
    if os.path.basename(sys.executable or "").startswith("python"):
        return sys.executable
    return shutil.which("python3") or "python3"


def _search_path() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path]
