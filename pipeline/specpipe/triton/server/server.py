"""One Triton and its processes: found, started, asked whether it answers, drained, killed.

Triton calls itself ready while nothing can answer: after the death of a Python model's process, and
while its thread hangs (Triton 2.51). Ready means here that one real request went through.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from specpipe.errors import NoAnswer, ServerError, SpecpipeError
from specpipe.machine.callables import Log
from specpipe.machine.prometheus import parse_samples, total
from specpipe.machine.signals import deferred
from specpipe.machine.web import asked, fetch, parse_url
from specpipe.runtimes.launch import Launch
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.repository_layout import ENSEMBLE
from specpipe.triton import metrics
from specpipe.triton.client import Client
from specpipe.triton.client.grpc_transport import open_grpc
from specpipe.triton.secret import VARIABLE, secret_of_start
from specpipe.triton.server import installation, served_models, start_failure
from specpipe.triton.server.addresses import check_ports, client_host, settle
from specpipe.triton.server.command import (
    server_command,
    server_environment,
)
from specpipe.triton.server.health import NeededProcesses
from specpipe.triton.server.installation import TritonBinary, find_tritonserver
from specpipe.triton.server.model_control import ModelControl
from specpipe.triton.server.options import ServeOptions
from specpipe.triton.server.served_models import Version
from specpipe.triton.server.start_failure import StartWatch
from specpipe.triton.server.triton_process import EXIT_TIME_S, TritonProcess
from specpipe.triton.server.workspace import Workspace

_ADMIN_KEY = "SPECPIPE_ADMIN_KEY"
_ANSWER_TIME_S = 2.0  # what a server that answers takes at most to say so
_DRAIN_INTERVAL_S = 0.5
_MAX_NUM_STUCK = 6  # looks without a step; the loop reports its steps once a second


class Server:
    """One Triton with all its processes; `start` returns when a real request went through.

    It lives no longer than the thread that called `start`. Its working directory is the folder of
    the models that it has, which are those of `version` at each start.
    """

    def __init__(
        self,
        repository: Path,
        options: ServeOptions,
        *,
        number: int | None = None,
        launch: Launch | None = None,
        binary: TritonBinary | None = None,
        log: Log = lambda line: None,
    ) -> None:
        """number  which version of the pair it is, of one that has a number"""
        self.options, kept = settle(options)
        weakref.finalize(self, kept.close)
        self.version = Version(repository.resolve(), number)
        """What clients are answered by, which versions.py changes while the server runs."""
        self.launch = Launch() if launch is None else launch
        self._binary = find_tritonserver() if binary is None else binary
        self.triton = TritonProcess(log, uses_mpi=self.launch.uses_mpi)
        """What runs, with the processes of its models."""
        self._workspace: Workspace | None = None
        self._admin_key = _admin_key(os.environ)
        self._num_steps: float | None = None
        self._probe_ids: dict[Version, int] = {}
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

    def start(self, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """Starts Triton and waits until it answers; raises ServerError with the reason."""
        check_ports(self.options)
        self._num_steps = None
        self._probe_ids.clear()
        with deferred():
            workspace = self._workspace = Workspace(self._binary)
        served_models.write(workspace.repository, self.version)
        environment = server_environment(self._binary, self.launch, os.environ, workspace)
        installation.check(self._binary, environment)
        environment = {**environment, VARIABLE: self.secret}
        self.triton.start(self._command(workspace), workspace.repository, environment)
        deadline = time.monotonic() + self.options.startup_timeout_s
        watch = StartWatch(self.triton.pid, uses_mpi=self.launch.uses_mpi)
        while not is_interrupted() and not self._is_live():
            if not self.triton.is_running:
                self._give_up("Triton did not start")
            if (fault := watch.fault()) is not None:
                self._give_up(f"Triton did not start: {fault}")
            if any(map(start_failure.has_failed, self.triton.last_log_lines)):
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
        raise ServerError(f"{what}: {start_failure.words(self.triton.last_log_lines)}")

    def probe(self, ensemble: str = ENSEMBLE, version: Version | None = None) -> None:
        """Sends one request for one token through everything; raises when no answer comes.

        version  that of the ensemble; None: the one that is served
        """
        version = version or self.version
        if version not in self._probe_ids:  # a build may replace what is served meanwhile
            self._probe_ids[version] = read_pair(version.repository).options.used_token_id
        timeout_s = self.options.probe_timeout_s
        # A little longer than the request's own limit, whose refusal tells more than silence.
        limit_s = timeout_s + _ANSWER_TIME_S
        with Client(self.urls[0], model=ensemble, timeout_s=limit_s) as client:
            answer = client.generate(
                input_ids=[self._probe_ids[version]],  # whatever letters a tokenizer lacks
                max_tokens=1,
                # First in the queue, and out of it when nobody waits for the answer any more.
                priority=-1,
                timeout_s=timeout_s,
            )
        if answer.finish_reason is None:
            raise ServerError("the answer is empty")

    def needed_processes(self, *, is_answering: bool = True) -> NeededProcesses:
        """Those that run now and have to go on (health.py); not of models where none answers."""
        names = self.version.names.values() if is_answering else ()
        return self.triton.needed_processes(frozenset(names))

    def processes_of(self, version: Version) -> NeededProcesses:
        """Those that the models of a version run in."""
        names = frozenset(version.names.values())
        return self.triton.needed_processes(names, is_whole_server=False)

    @property
    def models_folder(self) -> Path:
        """The folder of the models that Triton has or may load; of this start."""
        if self._workspace is None:
            raise ServerError("Triton does not run")
        return self._workspace.repository

    @property
    def control(self) -> ModelControl:
        """What loads and unloads models."""
        return ModelControl(self.grpc_url, self._admin_key)

    def makes_progress(self) -> bool:
        """True when the loop ran steps since the last call: busy, however long a probe waits."""
        before, self._num_steps = self._num_steps, self._read_metric(metrics.STEPS)
        return before is not None and self._num_steps is not None and self._num_steps > before

    def stop(self) -> None:
        """Lets running requests finish, up to the drain limit, then ends the process group."""
        try:
            if self.triton.is_running:
                with self._kept_at_work():
                    is_done = self._drain()
                if is_done and not self.triton.has_lost_model():
                    # Not for longer: idle connections of clients would keep Triton for its limit.
                    self.triton.wait(EXIT_TIME_S)
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
            self.triton.terminate()
            return
        url = f"{self.http_url}/v2/health/live"
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(NoAnswer):
                kept = asked(url, server=self.http_url, timeout_s=EXIT_TIME_S)
                stack.enter_context(kept).read()
            self.triton.terminate()
            yield

    def _drain(self) -> bool:
        """Waits until nothing is in flight; False at the limit, or when that will never be.

        A model's process that died or is stopped never answers the requests inside it.
        """
        deadline = time.monotonic() + self.options.drain_timeout_s
        last_num: float | None = -1.0
        num_stuck = 0
        self.makes_progress()
        while self.triton.is_running and time.monotonic() < deadline:
            num_in_flight = self._num_in_flight()
            if num_in_flight == last_num == 0:
                return True
            is_stuck = num_in_flight == last_num and not self.makes_progress()
            num_stuck = num_stuck + 1 if is_stuck and self.triton.has_lost_model() else 0
            if num_stuck == _MAX_NUM_STUCK:
                return False
            last_num = num_in_flight
            self.triton.wait(_DRAIN_INTERVAL_S)
        return not self.triton.is_running

    @deferred()
    def kill(self) -> None:
        """Ends all processes at once and removes what they leave behind."""
        self.triton.kill()
        if self._workspace is not None:
            self._workspace.close()
            self._workspace = None

    def _command(self, workspace: Workspace) -> list[str]:
        named = tuple(map(self.version.name, self.launch.rank_models))
        return server_command(
            self._binary,
            workspace.repository,
            self.options,
            replace(self.launch, rank_models=named),
            shared_memory_prefix=self.triton.shared_memory_prefix,
            backends=workspace.backends,
            admin_key=self._admin_key,
        )

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

    def _num_in_flight(self) -> float | None:
        """None where that cannot be read; a server without models has none."""
        page = self.read_metrics()
        return None if page is None else total(parse_samples(page), metrics.IN_FLIGHT) or 0.0

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
