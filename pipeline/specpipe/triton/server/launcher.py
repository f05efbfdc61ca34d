"""Keeps a repository served: watches it, restarts a server that died or hangs, drains on a signal.

Triton restarts nothing by itself, and calls itself ready meanwhile (health.py says what is
watched).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from specpipe.errors import ServerError, SpecpipeError, to_sentence
from specpipe.machine.callables import Log
from specpipe.machine.signals import ending_signals
from specpipe.runtimes.launch import Launch, LaunchMode
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.runtime import load_runtime
from specpipe.triton.repository import lint
from specpipe.triton.server import control, known_holes
from specpipe.triton.server.addresses import resolve
from specpipe.triton.server.health import LOOK_INTERVAL_S
from specpipe.triton.server.installation import find_tritonserver
from specpipe.triton.server.options import ServeOptions
from specpipe.triton.server.server import Server, running
from specpipe.triton.server.versions import Versions

__all__ = ["ServeOptions", "Server", "no_door", "running", "serve"]

Door = Callable[[Server, Callable[[], bool]], contextlib.AbstractContextManager[object]]
"""Takes the server, and what tells whether a signal came meanwhile."""


def no_door(
    server: Server, is_interrupted: Callable[[], bool]
) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext()


def serve(
    repository: Path,
    options: ServeOptions,
    *,
    report: Log,
    number: int | None = None,
    artifacts_dir: Path | None = None,
    mpi_mode: LaunchMode = "auto",
    allow_unknown_engine_facts: bool = False,
    build_command: str = "specpipe build",
    log: Log = lambda line: None,
    on_ready: Callable[[Server], None] = lambda server: None,
    door: Door = no_door,
) -> None:
    """Serves a repository until SIGTERM, SIGINT or SIGHUP; restarts a server that died or hangs.

    The first signal drains, a second one ends the server at once. Returns after it, but raises
    KeyboardInterrupt after SIGINT, and ServerError when the server does not come (back) up. To
    be called from the main thread.

    Nothing is started for engines that do not fit this machine: EngineMismatch says what differs,
    and `build_command`, what to run.

    number         which version of the pair the repository is, of one that has a number
    artifacts_dir  the pair's folder, in which this launcher can be asked for another version
                   (control.py); None: it cannot be asked
    door           stands before the server from its first answer until it is to end
    """

    def plan(repository: Path) -> Launch:
        lint.check(repository)
        return load_runtime(read_pair(repository).runtime).launch(
            repository,
            mode=mpi_mode,
            allow_unknown_facts=allow_unknown_engine_facts,
            build_command=build_command,
        )

    options = resolve(options)
    launch = plan(repository)
    for note in launch.notes:
        report(f"warning: {note}")
    binary = find_tritonserver()
    version = known_holes.find_version(binary, os.environ)
    known_holes.check(version, options)
    if known_holes.find(version, allow_http=options.allow_http) or version is None:
        report(
            f"warning: known holes: {known_holes.describe(version, allow_http=options.allow_http)}"
        )
    server = Server(repository, options, number=number, launch=launch, binary=binary, log=log)
    versions = Versions(server, plan, report)
    with _Signals(server) as signals:
        try:
            server.start(signals.received)
            if not signals.received():
                versions.watch()  # first, so that it is watched when on_ready is called
                opened = door(server, signals.received)
                with _asked(artifacts_dir, versions, report), opened:
                    if not signals.received():
                        on_ready(server)
                        _supervise(server, versions, signals, report)
            if signals.received():
                report(f"stopping: running requests have {options.drain_timeout_s:g} s to finish")
        finally:
            versions.close()
            server.stop()
    if signals.number == signal.SIGINT:
        raise KeyboardInterrupt


def _asked(
    artifacts_dir: Path | None, versions: Versions, report: Log
) -> contextlib.AbstractContextManager[None]:
    if artifacts_dir is None:
        return contextlib.nullcontext()
    return control.listening(artifacts_dir, versions, report)


def _supervise(server: Server, versions: Versions, signals: _Signals, report: Log) -> None:
    """Watches until a signal comes; restarts, at once, or after pauses that grow while it fails."""
    while not signals.wait(min(LOOK_INTERVAL_S, server.options.probe_interval_s)):
        reason = versions.look()
        if reason is None:
            continue
        noticed = time.monotonic()
        num_failed = 0
        while True:
            pause_s = min(2.0**num_failed - 1, 30.0)
            report(f"Triton is restarted in {pause_s:g} s: {reason}")
            versions.server_ends()
            server.kill()  # which no longer says that it is ready
            if signals.wait(pause_s):
                return
            try:
                server.start(signals.received)
                break
            except (SpecpipeError, OSError) as exc:
                reason = to_sentence(exc)
                num_failed += 1
                if num_failed == server.options.max_restarts:
                    raise ServerError(f"Triton fails again and again, last: {reason}") from exc
        if signals.received():
            return
        versions.watch()
        report(f"Triton answers again, {time.monotonic() - noticed:.1f} s after that was noticed")


class _Signals:
    """SIGTERM, SIGINT and SIGHUP, remembered; the second one kills the server."""

    def __init__(self, server: Server) -> None:
        self.number: int | None = None
        self._server = server
        self._event = threading.Event()
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        for number in ending_signals():
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def received(self) -> bool:
        return self.number is not None

    def wait(self, seconds: float) -> bool:
        """Waits at most that long for a signal; returns whether one came."""
        return self._event.wait(seconds)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            self._server.triton.signal_all(signal.SIGKILL)
        self.number = number
        self._event.set()
