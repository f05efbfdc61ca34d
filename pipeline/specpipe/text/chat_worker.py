"""The process that renders a chat template: started, asked, killed when it takes too long.

It is a fresh interpreter, since a fork of a process with threads may hang, and is asked over a
socket pair. It ends when the other end closes, so that none outlives its parent; a thread waits for
its end, so that none is left a zombie.
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
    "import json, sys; sys.path += json.loads(sys.argv[1]); "
    "from specpipe.text.chat_renderer import serve; serve()"
)
_START_S = 60.0  # for an interpreter to start, on a machine that is busy
_BLOCK_BYTES = 1 << 16  # most that is read at once, as chat_renderer.py does
_PATIENCE = 5  # a process may be given no more than a fifth of a core
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)


@dataclass(frozen=True)
class Rendered:
    """What became of a conversation: a prompt, or a fault in words that fit into a sentence.

    kind  of the fault: the template does not compile, it raised something itself, or rendering it
          took more than it may
    """

    prompt: str | None = None
    fault: str | None = None
    kind: Literal["compile", "refusal", "limit"] = "limit"


class ChatWorker:
    """Renders one template; its process is started when needed, and again where it has gone.

    Threads may share it; a fork gets a process of its own.
    """

    def __init__(self, template: Mapping[str, Any]) -> None:
        """`template` is the first line that `chat_renderer.serve` reads."""
        self._template = template
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._process: _Process | None = None
        self._compile_fault: Rendered | None = None

    def start(self) -> None:
        """Starts the process, unless it runs, and has it compile the template."""
        self._leave_to_parent()
        with self._lock:
            self._started()

    def render(self, conversation: Mapping[str, Any]) -> Rendered:
        """Returns one conversation rendered; replaces a process once that was killed meanwhile.

        `conversation` is a line that `chat_renderer.serve` reads.
        """
        request = json.dumps(conversation, ensure_ascii=False)
        self._leave_to_parent()
        with self._lock:
            for is_last in (False, True):
                compiled = self._started()
                if self._process is None:
                    return compiled
                try:
                    return self._process.ask(request, self._template["seconds"] * _PATIENCE)
                except _Ended as exc:
                    self._drop()
                    if is_last or exc.code not in _FROM_OUTSIDE:
                        return self._ended(exc)
        raise AssertionError("unreachable")

    def _leave_to_parent(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._lock, self._process = os.getpid(), threading.Lock(), None

    def _started(self) -> Rendered:
        """Returns what became of compiling; without a fault, a process is there."""
        if self._compile_fault is not None:
            return self._compile_fault
        if self._process is not None:
            if self._process.is_alive():
                return Rendered()
            self._drop()
        try:
            self._process = _Process()
            compiled = self._process.ask(json.dumps(self._template), _START_S)
        except OSError as exc:
            return Rendered(fault=f"no process can be started for it: {exc.strerror}")
        except _Ended as exc:
            self._drop()
            return replace(self._ended(exc), kind="compile")
        if compiled.fault is not None:
            self._drop()
            self._compile_fault = compiled = replace(compiled, kind="compile")
        return compiled

    def _drop(self) -> None:
        assert self._process is not None
        self._process.end()
        self._process = None

    def _ended(self, exc: _Ended) -> Rendered:
        if exc.code in (None, -signal.SIGPROF):
            seconds = f"{self._template['seconds']:g} s"
            limit = "serving.limits.chat_template_seconds"
            return Rendered(fault=f"it takes longer than {seconds} ({limit})")
        name = signal.Signals(-exc.code).name if exc.code < 0 else f"exit code {exc.code}"
        return Rendered(fault=f"the process that renders it died ({name})")


class _Ended(Exception):
    """The process ended: its exit code, minus a signal's number; None: it was too slow."""

    def __init__(self, code: int | None) -> None:
        self.code = code


class _Process:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [_interpreter(), "-I", "-S", "-c", _BOOT, json.dumps(_search_path())],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        self._socket, self._process = ours, process
        self._reaper = threading.Thread(target=process.wait, name="chat-worker", daemon=True)
        self._reaper.start()
        self.end = weakref.finalize(self, _end, os.getpid(), ours, process, self._reaper)

    def is_alive(self) -> bool:
        return self._reaper.is_alive()

    def ask(self, request: str, timeout_s: float) -> Rendered:
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
            return Rendered(**json.loads(answer))
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
