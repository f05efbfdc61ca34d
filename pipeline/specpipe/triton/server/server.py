"""One Triton and its processes: found, started, asked whether it answers, drained, killed.

Triton calls itself ready while nothing can answer: after the death of a Python model's process, and
while its thread hangs (Triton 2.51). Ready means here that one real request went through.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, NoReturn

from specpipe.errors import ServerError, SpecpipeError
from specpipe.machine.callables import Log
from specpipe.machine.prometheus import parse_samples, total
from specpipe.machine.signals import deferred
from specpipe.machine.web import fetch, parse_url
from specpipe.runtimes.launch import Launch
from specpipe.triton import metrics
from specpipe.triton.client import Client
from specpipe.triton.client.grpc_transport import open_grpc
from specpipe.triton.secret import VARIABLE, secret_of_start
from specpipe.triton.server import installation, processes, start_failure
from specpipe.triton.server.addresses import check_ports, client_host, settle
from specpipe.triton.server.command import (
    MPI_RUN,
    server_command,
    server_environment,
    shared_memory_argument,
)
from specpipe.triton.server.health import NeededProcesses
from specpipe.triton.server.installation import TritonBinary, find_tritonserver
from specpipe.triton.server.options import ServeOptions
from specpipe.triton.server.start_failure import StartWatch
from specpipe.triton.server.workspace import Workspace

_SHARED_MEMORY = Path("/dev/shm")
_PROBE_PROMPT = "Hello"
_MAX_LOG_LINES = 200
_ADMIN_KEY = "SPECPIPE_ADMIN_KEY"
_ANSWER_TIME_S = 2.0  # what a server that answers takes at most to say so
_EXIT_TIME_S = 10.0  # what Triton may take to unload its models
_DRAIN_INTERVAL_S = 0.5
_MAX_NUM_STUCK = 6  # looks without a step; the loop reports its steps once a second


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
        self.options = settle(options)
        self._repository = repository.resolve()
        self._launch = Launch() if launch is None else launch
        self._binary = find_tritonserver() if binary is None else binary
        self._log = log
        self._last_lines: deque[str] = deque(maxlen=_MAX_LOG_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._log_reader: threading.Thread | None = None
        self._workspace: Workspace | None = None
        self._shared_memory_prefix = f"specpipe_{os.getpid()}_{id(self):x}_"
        self._admin_key = _admin_key(os.environ)
        self._num_steps: float | None = None
        self.secret = secret_of_start(os.environ)
        """What `speculative` takes requests by; see secret.py."""

    @property
    def urls(self) -> tuple[str, ...]:
        """Where clients ask."""
        return (self.http_url, self.grpc_url) if self.options.allow_http else (self.grpc_url,)

    @property
    def http_url(self) -> str:
        assert self.options.allow_http
        return f"http://{self._client_host}:{self.options.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"grpc://{self._client_host}:{self.options.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._client_host}:{self.options.metrics_port}/metrics"

    @property
    def _client_host(self) -> str:
        return client_host(self.options.host)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def last_log_lines(self) -> list[str]:
        """What Triton and the models wrote last."""
        return list(self._last_lines)

    def start(self, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """Starts Triton and waits until it answers; raises ServerError with the reason."""
        check_ports(self.options)
        self._last_lines.clear()
        self._num_steps = None
        with deferred():
            workspace = self._workspace = Workspace(self._binary, self._repository)
        environment = server_environment(self._binary, self._launch, os.environ, workspace)
        installation.check(self._binary, environment)
        with deferred():
            self._process = subprocess.Popen(
                self._command(workspace),
                cwd=self._repository,
                env={**environment, VARIABLE: self.secret},
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
        watch = StartWatch(self._process.pid, uses_mpi=self._launch.uses_mpi)
        while not is_interrupted() and not self._is_live():
            if not self.is_running:
                self._give_up("Triton did not start")
            if (fault := watch.fault()) is not None:
                self._give_up(f"Triton did not start: {fault}")
            if any(map(start_failure.has_failed, self.last_log_lines)):
                # It would load the other models first, however long that takes, and then end.
                self._give_up("Triton did not start")
            if time.monotonic() > deadline:
                self._give_up(f"Triton was not ready after {self.options.startup_timeout_s:g} s")
            time.sleep(0.1)
        if is_interrupted():
            return
        try:
            self.probe()
        except SpecpipeError as exc:
            self.kill()
            raise ServerError(f"Triton started, but the first request failed: {exc}") from exc

    def _give_up(self, what: str) -> NoReturn:
        self.kill()
        raise ServerError(f"{what}: {start_failure.words(self.last_log_lines)}")

    def probe(self) -> None:
        """Sends one request for one token through everything; raises when no answer comes."""
        timeout_s = self.options.probe_timeout_s
        # A little longer than the request's own limit, whose refusal tells more than silence.
        with Client(self.urls[0], timeout_s=timeout_s + _ANSWER_TIME_S) as client:
            # First in the queue, and out of it when nobody waits for the answer any more.
            answer = client.generate(_PROBE_PROMPT, max_tokens=1, priority=-1, timeout_s=timeout_s)
        if answer.finish_reason is None:
            raise ServerError("the answer is empty")

    def needed_processes(self) -> NeededProcesses:
        """Those that run now and have to go on (health.py)."""
        assert self._process is not None
        return NeededProcesses(self._process.pid, uses_mpi=self._launch.uses_mpi)

    def makes_progress(self) -> bool:
        """True when the loop ran steps since the last call: busy, however long a probe waits."""
        before, self._num_steps = self._num_steps, self._read_metric(metrics.STEPS)
        return before is not None and self._num_steps is not None and self._num_steps > before

    def stop(self) -> None:
        """Lets running requests finish, up to the drain limit, then ends the process group."""
        try:
            if self.is_running:
                with self._kept_at_work():
                    is_done = self._drain()
                if is_done and not self._has_lost_model():
                    # Not for longer: idle connections of clients would keep Triton for its limit.
                    self._wait(_EXIT_TIME_S)
        finally:
            self.kill()

    @contextlib.contextmanager
    def _kept_at_work(self) -> Iterator[None]:
        """Tells Triton to end, and keeps it at work while the context lasts.

        After its SIGTERM it waits for its HTTP connections to be closed before it stops its models.
        Without one it stops them at once: an ensemble's later steps are then refused, so that every
        gRPC stream breaks off, and its request stays in flight (Triton 2.51). So one is kept open;
        where there is no HTTP, Triton is told when all is done, and takes new requests until then.
        """
        if not self.options.allow_http:
            yield
            self._terminate()
            return
        connection = http.client.HTTPConnection(
            self._client_host, self.options.http_port, timeout=_EXIT_TIME_S
        )
        with contextlib.closing(connection):
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("GET", "/v2/health/live")
                connection.getresponse().read()
            self._terminate()
            yield

    def _drain(self) -> bool:
        """Waits until nothing is in flight; False at the limit, or when that will never be.

        A model's process that died or is stopped never answers the requests inside it.
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
            num_stuck = num_stuck + 1 if is_stuck and self._has_lost_model() else 0
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

    def _has_lost_model(self) -> bool:
        """True when Triton is stopped, or a child of it is or died: a model's process.

        Triton reaps those that it unloads itself, which it does once no request is in flight.
        """
        assert self._process is not None
        triton = self._triton_pid()
        return any(
            process.state in processes.DEAD | processes.STOPPED
            for process in processes.of_session(self._process.pid)
            if triton in (process.pid, process.parent)
        )

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

    @deferred()
    def kill(self) -> None:
        """Ends all processes at once and removes what they leave behind."""
        if self._process is not None:
            processes.kill_session(self._process.pid)
            # One that hangs in the kernel does not even die; the next start finds its ports taken.
            self._wait(_EXIT_TIME_S)
            assert self._log_reader is not None
            self._log_reader.join(timeout=5)
            self._process = None
        for left in _SHARED_MEMORY.glob(f"{self._shared_memory_prefix}*"):
            left.unlink(missing_ok=True)
        if self._workspace is not None:
            self._workspace.close()
            self._workspace = None

    def signal_all(self, number: signal.Signals) -> None:
        """Sends a signal to Triton and the processes of its models.

        mpirun gives each rank a process group of its own, but leaves all in one session.
        """
        if self._process is not None:
            processes.signal_session(self._process.pid, number)

    def _command(self, workspace: Workspace) -> list[str]:
        return server_command(
            self._binary,
            workspace.repository,
            self.options,
            self._launch,
            shared_memory_prefix=self._shared_memory_prefix,
            backends=workspace.backends,
            admin_key=self._admin_key,
        )

    def _read_log(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._last_lines.append(line.rstrip("\n"))
                # A log that cannot be written, such as a closed terminal, must not end this thread:
                # with nobody at the other end of its pipe each line fails Triton and the models.
                with contextlib.suppress(OSError, ValueError):
                    self._log(line.rstrip("\n"))

    def _is_live(self) -> bool:
        if not self.options.allow_http:
            return self._is_live_by_grpc()
        try:
            fetch(f"{self.http_url}/v2/health/ready", timeout_s=5)
        except OSError:
            return False
        return True

    def _is_live_by_grpc(self) -> bool:
        from tritonclient import grpc

        # A new client each time: one that was refused waits ever longer before it tries again.
        with (
            contextlib.suppress(grpc.InferenceServerException),
            open_grpc(parse_url(self.grpc_url, ("grpc",))) as client,
        ):
            return bool(client.is_server_ready(client_timeout=_ANSWER_TIME_S))
        return False

    def read_metrics(self) -> str | None:
        """The page of the metrics endpoint; None when there is none to be had."""
        try:
            return fetch(self.metrics_url, timeout_s=_ANSWER_TIME_S).decode()
        except OSError:
            return None

    def _read_metric(self, name: str) -> float | None:
        return total(parse_samples(self.read_metrics() or ""), name)


@contextlib.contextmanager
def running(
    repository: Path,
    options: ServeOptions | None = None,
    *,
    launch: Launch | None = None,
    binary: TritonBinary | None = None,
    log: Log = lambda line: None,
) -> Iterator[Server]:
    """Serves a repository for the time of a `with` block, on free ports unless `options` says.

    Where the block fails or is interrupted, nothing in flight is waited for.
    """
    ports = ServeOptions(http_port=0, grpc_port=0, metrics_port=0)
    given = ports if options is None else options
    server = Server(repository, given, launch=launch, binary=binary, log=log)
    try:
        server.start()
        yield server
        server.stop()
    finally:
        server.kill()


def _admin_key(environment: Mapping[str, str]) -> str:
    """The operator's own key for Triton's admin calls, or a random one that nobody knows.

    Whoever may see this machine's command lines can read either.
    """
    key = environment.get(_ADMIN_KEY)
    if key is None:
        return secrets.token_hex(16)
    if re.fullmatch(r"[\w-]{16,}", key, re.ASCII) is None:
        raise ServerError(
            f"{_ADMIN_KEY} is no key: set 16 or more letters, digits, '-' and '_', or unset it"
        )
    return key
