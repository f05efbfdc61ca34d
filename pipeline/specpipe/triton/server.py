"""One Triton and its processes: found, started, asked whether it answers, drained, killed.

Triton calls itself ready while nothing can answer: after the death of a Python model's process, and
while its thread hangs (Triton 2.51). Ready means here that one real request went through.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from specpipe.errors import ServerError, SpecpipeError
from specpipe.installation import with_extras, with_library
from specpipe.runtimes.base import Launch
from specpipe.triton import metrics, processes
from specpipe.triton.client import Client
from specpipe.triton.command import (
    MPI_RUN,
    server_command,
    server_environment,
    shared_memory_argument,
)

Log = Callable[[str], None]

_SHARED_MEMORY = Path("/dev/shm")
_PROBE_PROMPT = "Hello"
_MAX_LOG_LINES = 200
_PORTS = ("http_port", "grpc_port", "metrics_port")
_EXIT_TIME_S = 10.0  # what Triton may take to unload its models
_DRAIN_INTERVAL_S = 0.5
_MAX_NUM_STUCK = 6  # looks without a step; the loop reports its steps once a second


@dataclass(frozen=True)
class TritonBinary:
    """A tritonserver to run, with what it needs around it."""

    path: Path
    libraries_dir: Path | None = None
    # None: where the installation has them. Else a folder of them, `python` among them
    backends: Path | None = None
    python_stub: Path | None = None  # the process that runs a Python model, for this Python


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where the server listens and how patient the launcher is. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    startup_timeout_s: float = 600.0
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    max_restarts: int = 5  # in a row, without one probe answered in between


def find_tritonserver() -> TritonBinary:
    """Finds `tritonserver` on PATH, else in the nvidia-pytriton wheel; raises ServerError."""
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return TritonBinary(Path(on_path))
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError(f"tritonserver is not on PATH: {_how_to_get_triton()}")
    root = Path(spec.submodule_search_locations[0])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    server = root / "tritonserver"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise ServerError(
            f"nvidia-pytriton has no Python {version} backend: use Python 3.10 to 3.13"
        )
    return TritonBinary(
        path=server / "bin" / "tritonserver",
        libraries_dir=root.parent / "nvidia_pytriton.libs",
        backends=server / "backends",
        python_stub=stub,
    )


def _how_to_get_triton() -> str:
    if sys.version_info < (3, 13):
        return f"run inside a Triton container, or {with_extras('triton')}"
    # Its NumPy 1 has no wheel here, so the extra leaves it out (pyproject.toml).
    return (
        "run inside a Triton container or with Python 3.10 to 3.12, or let NumPy 1 be compiled for "
        f"10 to 20 minutes: {with_library('nvidia-pytriton', 'numpy<2')}"
    )


class Server:
    """One Triton with all its processes; `start` returns when a real request went through.

    It lives no longer than the thread that called `start`. The repository is its working directory.
    """

    def __init__(
        self,
        repository: Path,
        options: ServeOptions,
        *,
        launch: Launch | None = None,
        binary: TritonBinary | None = None,
        log: Log = lambda line: None,
    ) -> None:
        self.options = _with_free_ports(options)
        self._repository = repository.resolve()
        self._launch = Launch() if launch is None else launch
        self._binary = find_tritonserver() if binary is None else binary
        self._log = log
        self._last_lines: deque[str] = deque(maxlen=_MAX_LOG_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._log_reader: threading.Thread | None = None
        self._backends: tempfile.TemporaryDirectory[str] | None = None
        self._shared_memory_prefix = f"specpipe_{os.getpid()}_{id(self):x}_"
        self._num_steps: float | None = None

    @property
    def http_url(self) -> str:
        return f"http://{self._client_host}:{self.options.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"grpc://{self._client_host}:{self.options.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._client_host}:{self.options.metrics_port}/metrics"

    @property
    def _client_host(self) -> str:
        return "127.0.0.1" if self.options.host == "0.0.0.0" else self.options.host

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def last_log_lines(self) -> list[str]:
        """What Triton and the models wrote last."""
        return list(self._last_lines)

    def start(self, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """Starts Triton and waits until it answers; raises ServerError with the reason."""
        _check_ports(self.options)
        self._last_lines.clear()
        self._num_steps = None
        self._process = subprocess.Popen(
            self._command(),
            cwd=self._repository,
            env=server_environment(self._binary, self._launch, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a session of its own, for `kill`
        )
        assert self._process.stdout is not None
        self._log_reader = threading.Thread(
            target=self._read_log, args=(self._process.stdout,), name="triton-log", daemon=True
        )
        self._log_reader.start()
        deadline = time.monotonic() + self.options.startup_timeout_s
        while not is_interrupted():
            if not self.is_running:
                self.kill()
                raise ServerError(f"Triton did not start: {self._failure()}")
            if self._is_live():
                break
            if time.monotonic() > deadline:
                self.kill()
                raise ServerError(
                    f"Triton was not ready after {self.options.startup_timeout_s:g} s: "
                    f"{self._failure()}"
                )
            time.sleep(0.1)
        if is_interrupted():
            return
        try:
            self.probe()
        except SpecpipeError as exc:
            self.kill()
            raise ServerError(f"Triton started, but the first request failed: {exc}") from exc

    def probe(self) -> None:
        """Sends one request for one token through everything; raises when no answer comes."""
        with Client(self.http_url, timeout_s=self.options.probe_timeout_s) as client:
            # First in the queue, and out of it when nobody waits for the answer any more.
            client.generate(
                _PROBE_PROMPT, max_tokens=1, priority=-1, timeout_s=self.options.probe_timeout_s
            )

    def makes_progress(self) -> bool:
        """True when the loop ran steps since the last call: busy, however long a probe waits."""
        before, self._num_steps = self._num_steps, self._read_metric(metrics.STEPS)
        return before is not None and self._num_steps is not None and self._num_steps > before

    def stop(self) -> None:
        """Lets running requests finish, up to the drain limit, then ends the process group."""
        if self.is_running:
            with self._connection():
                self._terminate()
                is_done = self._drain()
            if is_done and not self._has_dead_model():
                # Not for longer: idle connections of clients would keep Triton for its whole limit.
                self._wait(_EXIT_TIME_S)
        self.kill()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[None]:
        """Keeps Triton at work after its SIGTERM, while the context lasts.

        It waits for its HTTP connections to be closed before it stops its models. Without one it
        stops them at once: an ensemble's later steps are then refused, so that every gRPC stream
        breaks off, and its request stays in flight (Triton 2.51).
        """
        connection = http.client.HTTPConnection(
            self._client_host, self.options.http_port, timeout=_EXIT_TIME_S
        )
        with contextlib.closing(connection):
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("GET", "/v2/health/live")
                connection.getresponse().read()
            yield

    def _drain(self) -> bool:
        """Waits until nothing is in flight; False at the limit, or when that will never be.

        A model's process that died never answers the requests that were inside it.
        """
        deadline = time.monotonic() + self.options.drain_timeout_s
        last_num: float | None = -1.0
        num_stuck = 0
        self.makes_progress()
        while self.is_running and time.monotonic() < deadline:
            num_in_flight = self._read_metric(metrics.IN_FLIGHT)
            if num_in_flight == last_num == 0:
                return True
            is_stuck = num_in_flight == last_num and not self.makes_progress()
            num_stuck = num_stuck + 1 if is_stuck and self._has_dead_model() else 0
            if num_stuck == _MAX_NUM_STUCK:
                return False
            last_num = num_in_flight
            self._wait(_DRAIN_INTERVAL_S)
        return not self.is_running

    def _wait(self, seconds: float) -> None:
        """Waits for the end of Triton, at most some seconds."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _has_dead_model(self) -> bool:
        """True when a child of Triton died that Triton does not look after: a model's process.

        Triton reaps those that it unloads itself, which it does once no request is in flight.
        """
        return processes.has_dead_child(self._triton_pid())

    def _triton_pid(self) -> int:
        """The process of the Triton that answers: with MPI, the first rank's."""
        assert self._process is not None
        if self._launch.uses_mpi:
            mark = shared_memory_argument(self._shared_memory_prefix, 0)
            for pid in processes.session_pids(self._process.pid):
                arguments = processes.arguments(pid)
                if mark in arguments and MPI_RUN[1] not in arguments:
                    return pid
        return self._process.pid

    def _terminate(self) -> None:
        """Asks Triton to end. Not mpirun, which would kill all ranks a moment later.

        Open MPI 5.0 sends SIGKILL half a second after it passed SIGTERM on. Other ranks end when
        the first one does.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._triton_pid(), signal.SIGTERM)

    def kill(self) -> None:
        """Ends all processes at once and removes what they leave behind."""
        if self._process is not None:
            processes.kill_session(self._process.pid)
            self._process.wait()
            assert self._log_reader is not None
            self._log_reader.join(timeout=5)
            self._process = None
        for left in _SHARED_MEMORY.glob(f"{self._shared_memory_prefix}*"):
            left.unlink(missing_ok=True)
        if self._backends is not None:
            self._backends.cleanup()
            self._backends = None

    def signal_all(self, number: signal.Signals) -> None:
        """Sends a signal to Triton and the processes of its models.

        mpirun gives each rank a process group of its own, but leaves all in one session.
        """
        if self._process is not None:
            processes.signal_session(self._process.pid, number)

    def _command(self) -> list[str]:
        return server_command(
            self._binary,
            self._repository,
            self.options,
            self._launch,
            shared_memory_prefix=self._shared_memory_prefix,
            backends=self._backend_folder(),
        )

    def _backend_folder(self) -> Path | None:
        """The wheel keeps the stub of each Python version apart from the backend that runs it."""
        if self._binary.backends is None or self._binary.python_stub is None:
            return self._binary.backends
        self._backends = tempfile.TemporaryDirectory(prefix="specpipe-triton-")
        folder = Path(self._backends.name)
        for backend in self._binary.backends.iterdir():
            if backend.name != "python":
                (folder / backend.name).symlink_to(backend)
        (folder / "python").mkdir()
        for source in (self._binary.backends / "python").iterdir():
            (folder / "python" / source.name).symlink_to(source)
        (folder / "python" / self._binary.python_stub.name).symlink_to(self._binary.python_stub)
        return folder

    def _read_log(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._last_lines.append(line.rstrip("\n"))
                # A log that cannot be written, such as a closed terminal, must not end this thread:
                # with nobody at the other end of its pipe each line fails Triton and the models.
                with contextlib.suppress(OSError, ValueError):
                    self._log(line.rstrip("\n"))

    def _failure(self) -> str:
        """The last error lines of the log, which say why."""
        lines = self.last_log_lines
        errors = [line for line in lines if re.match(r"E\d{4} |error:", line)] or lines
        return "\n".join(errors[-5:]) or "it wrote no log"

    def _is_live(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.http_url}/v2/health/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _read_metric(self, name: str) -> float | None:
        try:
            with urllib.request.urlopen(self.metrics_url, timeout=5) as response:
                text = response.read().decode()
        except OSError:
            return None
        found = re.search(rf"^{name}(?:{{.*}})? ([\d.e+]+)$", text, re.MULTILINE)
        return float(found[1]) if found else None


@contextlib.contextmanager
def running(
    repository: Path,
    options: ServeOptions | None = None,
    *,
    launch: Launch | None = None,
    binary: TritonBinary | None = None,
    log: Log = lambda line: None,
) -> Iterator[Server]:
    """Serves a repository for the time of a `with` block, on free ports unless `options` says."""
    ports = ServeOptions(http_port=0, grpc_port=0, metrics_port=0)
    given = ports if options is None else options
    server = Server(repository, given, launch=launch, binary=binary, log=log)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _with_free_ports(options: ServeOptions) -> ServeOptions:
    """Replaces each port 0 by a free port."""
    with contextlib.ExitStack() as stack:
        ports = {}
        for name in _PORTS:
            if getattr(options, name) == 0:
                # Open until all are chosen, so that no two are the same.
                listener = stack.enter_context(socket.socket())
                listener.bind((options.host, 0))
                ports[name] = listener.getsockname()[1]
        return replace(options, **ports)


def _check_ports(options: ServeOptions) -> None:
    """Another server on one of the ports would answer in our place until ours has failed."""
    for name in _PORTS:
        port = getattr(options, name)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((options.host, port))
            except OSError as exc:
                option = f"--{name.replace('_', '-')}"
                raise ServerError(
                    f"{options.host}:{port} cannot be listened on ({exc.strerror}): choose another "
                    f"port with {option}"
                ) from exc
