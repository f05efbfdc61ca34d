"""Processes that measure sides, as gpu_load.py starts and asks them."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from benchmarks.load.sides import Point, Process

_WORKER = (sys.executable, "-m", "benchmarks.load.worker")


class Child:
    """One side in a process of its own. A fault is an answer with `error`, and its end."""

    def __init__(self, process: Process) -> None:
        """Starts it; it is ready when `wait` returns."""
        self.process = process
        self.is_alive = True
        self._child = subprocess.Popen(
            _WORKER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._tell(asdict(process))

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Returns what it says when it is loaded, or the fault."""
        return self._answer(timeout_s)

    def measure(self, point: Point, timeout_s: float) -> dict[str, Any]:
        """Returns the figures of a point, or the fault."""
        self._tell(point.to_json())
        return self._answer(timeout_s)

    def close(self) -> None:
        """Ends it and all that it started: vLLM's engine is a process of the same group."""
        self.is_alive = False
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._reader.join()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # the answer tells
            print(json.dumps(what), file=self._child.stdin, flush=True)

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            answer: dict[str, Any] = {"error": f"no answer after {timeout_s:g} s"}
        else:
            answer = json.loads(line) if line else {"error": "the process has ended"}
        if "error" in answer:
            self.close()
        return answer
