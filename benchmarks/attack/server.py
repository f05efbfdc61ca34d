"""The served pair that is loaded: `specpipe serve` as a user starts it.

It runs as a child, launcher included, so that its restarts are part of what is measured.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import IO

from benchmarks.attack.send import Target
from specpipe.errors import ServerError, SpecpipeError
from specpipe.triton.server import processes

LAUNCHER, TRITON = "launcher", "tritonserver"
STUBS = ("preprocessing", "speculative", "postprocessing")

_RESTART = re.compile(r"Triton is restarted")
_MODEL = re.compile(r"/([a-z]+(_[0-9]+)?)/1/model\.py")
SPECPIPE = (
    sys.executable,
    "-c",
    "import sys; from specpipe.cli.group import main; sys.exit(main())",
)
"""The command, of this checkout."""
_STARTUP_S = 180.0
_STOP_S = 45.0
_PROC = Path("/proc")


class Served:
    """`specpipe serve` on ports of the loopback interface that are free at the first start.

    `words` are further ones of its command line; `restarts` has a time and a line for each restart
    that the launcher told of.
    """

    def __init__(self, config: Path, *words: str) -> None:
        self._config, self._words = config, words
        self._process: subprocess.Popen[str] | None = None
        self._threads: list[threading.Thread] = []
        self._seen: set[tuple[int, str]] = set()  # with when it began: ids come again
        self._urls: list[str] = []
        self._is_ready = threading.Event()
        self.restarts: list[tuple[float, str]] = []
        self.log: list[str] = []

    def start(self) -> float:
        """Starts the server and returns the seconds until it said that it is ready."""
        self._is_ready.clear()
        begun = time.monotonic()
        names = ("http", "grpc", "metrics")
        numbers = [urllib.parse.urlsplit(url).port for url in self._urls] or [0] * len(names)
        ports = [
            word
            for name, number in zip(names, numbers, strict=True)
            for word in (f"--{name}-port", str(number))
        ]
        self._process = subprocess.Popen(
            [*SPECPIPE, "serve", "--config", str(self._config), *self._words, *ports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us, who stop it in order
        )
        pipes = (self._process.stdout, self._process.stderr)
        self._threads = [
            threading.Thread(target=self._read, args=(pipe,), daemon=True) for pipe in pipes
        ]
        for thread in self._threads:
            thread.start()
        while not self._is_ready.wait(0.05):
            if self._process.poll() is not None or time.monotonic() - begun > _STARTUP_S:
                self.stop()
                raise ServerError("specpipe serve did not start: " + "\n".join(self.log[-20:]))
        return time.monotonic() - begun

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def target(self) -> Target:
        """Where it listens; a restarted Triton keeps its ports."""
        http, grpc, _ = map(urllib.parse.urlsplit, self._urls)
        assert http.hostname is not None and http.port is not None and grpc.port is not None
        return Target(http.hostname, http.port, grpc.port)

    @property
    def http_url(self) -> str:
        return self._urls[0]

    @property
    def grpc_url(self) -> str:
        return self._urls[1]

    def processes(self) -> list[tuple[int, str]]:
        """Every process of the server by id, with what it is; zombies are not among them."""
        process = self._process
        if process is None:
            return []
        found = [
            (pid, _name(pid) if pid != process.pid else LAUNCHER)
            for pid in descendants(process.pid)
        ]
        self._seen = self._seen | {(pid, _begun(pid)) for pid, _ in found}
        return found

    def pid(self, name: str) -> int:
        """The first process of a name; raises ServerError where there is none."""
        for pid, found in self.processes():
            if found == name:
                return pid
        raise ServerError(f"the server has no process {name}")

    def rss(self) -> dict[str, int]:
        """Resident bytes by process: RssAnon and shared memory included (proc(5), VmRSS)."""
        total: Counter[str] = Counter()
        for pid, name in self.processes():
            with contextlib.suppress(OSError):
                status = (_PROC / str(pid) / "status").read_text(errors="replace")
                found = re.search(r"VmRSS:\s+(\d+) kB", status)
                total[name] += int(found[1]) * 1024 if found else 0
        return dict(total)

    def secrets(self) -> set[str]:
        """What no client may ever be told: values of keys in the server's environment and argv."""
        with contextlib.suppress(ServerError, OSError):
            pid = self.pid(TRITON)
            found = set()
            for line in (_PROC / str(pid) / "environ").read_text(errors="replace").split("\0"):
                name, _, value = line.partition("=")
                if re.search("SECRET|KEY|TOKEN", name) and name not in os.environ:
                    found.add(value)
            for argument in processes.arguments(pid):
                if argument.startswith(("--http-restricted-api=", "--grpc-restricted-protocol=")):
                    found.add(argument.rpartition("=")[2])
            return {value for value in found if len(value) >= 8}
        return set()

    def stop(self) -> None:
        """Ends the server: in order if it can, and in any case all processes that it ever had."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            self.processes()
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(_STOP_S)
        self.kill()

    def kill(self) -> None:
        """Ends all its processes at once."""
        assert self._process is not None
        with contextlib.suppress(OSError):
            self.processes()
        self._signal(signal.SIGKILL)
        self._process.wait()
        for thread in self._threads:
            thread.join(5)
        self._process = None

    def _signal(self, number: signal.Signals) -> None:
        for pid, begun in sorted(self._seen):
            with contextlib.suppress(OSError):
                if _begun(pid) == begun:
                    os.kill(pid, number)

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self.log.append(line.rstrip("\n"))
                if line.startswith("ready: "):
                    self._urls = line.split()[1:]
                    self._is_ready.set()
                if _RESTART.search(line):
                    self.restarts.append((time.monotonic(), line.strip()))


def build(config: Path) -> None:
    """Builds what is not built yet, as the command does."""
    command = [*SPECPIPE, "build", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SpecpipeError(f"specpipe build failed: {done.stderr.strip()}")


def descendants(pid: int) -> list[int]:
    """A process and all that it started, and they in turn, without zombies."""
    found = [pid] if _stat(pid)[:1] not in ([], ["Z"]) else []
    with contextlib.suppress(OSError):
        for children in sorted((_PROC / str(pid) / "task").glob("*/children")):
            with contextlib.suppress(OSError):
                for child in children.read_text().split():
                    found += descendants(int(child))
    return found


def _name(pid: int) -> str:
    words = processes.arguments(pid)
    if words and Path(words[0]).name == TRITON:
        return TRITON
    model = _MODEL.search(" ".join(words))
    return model[1] if model else "workers"


def _stat(pid: int) -> list[str]:
    """State and what follows it (proc(5)); [] where the process is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _begun(pid: int) -> str:
    """When a process began, in ticks since the machine did."""
    return (_stat(pid) + [""] * 20)[19]
