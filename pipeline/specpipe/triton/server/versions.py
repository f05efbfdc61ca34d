"""The versions of a pair in one server, and the change from one to another while it answers.

A change goes in this order: the new inner models are loaded beside the old ones; one real request
goes through them by an ensemble that no client knows; `ensemble` alone is reloaded, so that each
request from then on goes to the new ones, and each one before it is answered wholly by the old;
when those have no request left, they are unloaded, or kept for a rollback. A failure on the way
unloads what is new, and nothing else has changed.

Where both do not fit, the old one is unloaded first (replacing.py).

What is served and what else is loaded is known here alone; Triton, when it is restarted, is given
what is served.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.errors import NoAnswer, ServerError, SpecpipeError, to_sentence
from specpipe.machine.callables import Log
from specpipe.runtimes.launch import Launch
from specpipe.triton.server import loading, room
from specpipe.triton.server.health import Health, NeededProcesses
from specpipe.triton.server.leaving import Leaving
from specpipe.triton.server.replacing import Change, Replacing
from specpipe.triton.server.served_models import Version

if TYPE_CHECKING:
    from specpipe.triton.server.server import Server


class Versions:
    """Changes which version a server answers by, one change at a time, on the caller's thread.

    `plan` lints a repository and says how its server is started; `report` is the server's log.
    """

    def __init__(self, server: Server, plan: Callable[[Path], Launch], report: Log) -> None:
        self._server, self._plan, self._report = server, plan, report
        self._health: Health | None = None
        self._changing = threading.Lock()
        self._moment = threading.Lock()
        self._num_starts = 0
        self._is_up = False
        self._ending = threading.Event()
        self._earlier: list[Version] = []
        self._kept: tuple[Version, NeededProcesses] | None = None
        self._leaving = Leaving(server)
        self._drain_timeout_s = server.options.drain_timeout_s

    # For the launcher, which watches the server

    def watch(self) -> None:
        """Begins to watch the server, which got ready; loads again what was kept."""
        if self._health is None:
            self._health = Health(self._server)
        else:
            self._health.begin()
        self._is_up = True
        kept, self._kept = self._kept, None
        if kept is not None:
            threading.Thread(target=self._load_kept, args=(kept[0],), daemon=True).start()

    def look(self) -> str | None:
        """Returns why the server has to be replaced; None while it serves. Waits for nothing.

        The version that is kept is given up where a process of it is lost.
        """
        assert self._health is not None
        if (reason := self._health.look()) is not None:
            return reason
        if (kept := self._kept) is not None and (fault := kept[1].fault()) is not None:
            self._kept = None
            self._report(f"warning: {kept[0]}, kept for a rollback, is lost: {fault}")
            self._leaving.let_go(kept[0])
        return None

    def server_ends(self) -> None:
        """Takes in that the server is killed, and maybe started again: changes under way fail."""
        with self._moment:
            self._num_starts += 1
            self._is_up = False
            self._leaving.server_ends()

    def close(self) -> None:
        """Takes in that the launcher ends."""
        self._ending.set()
        self.server_ends()

    # For whoever asks (control.py)

    def status(self) -> dict[str, Any]:
        """Returns what is served, what a rollback leads to, and what still answers."""
        served, kept = self._server.version, self._kept
        earlier = self._earlier[-1] if self._earlier else None
        return {
            "number": served.number,
            "repository": str(served.repository),
            "previous": None
            if earlier is None
            else {
                "number": earlier.number,
                "repository": str(earlier.repository),
                "is_loaded": kept is not None and kept[0] == earlier,
            },
            "leaving": self._leaving.numbers(),
            "is_changing": self._changing.locked(),
            "urls": list(self._server.urls),
            "metrics_url": self._server.metrics_url,
        }

    def promote(
        self, version: Version, *, keep_previous: bool, replace: bool, report: Log
    ) -> Change:
        """Serves another version; raises ServerError, or what its repository is refused with.

        keep_previous  whether what is served now stays loaded; what was kept before does not
        replace        whether it is unloaded first, also where both would fit
        """
        with self._one_change():
            old = self._server.version
            if version.number == old.number:
                raise ServerError(f"{version} is served already")
            self._check(version)
            change = self._change_to(version, keep=keep_previous, replace=replace, report=report)
            self._earlier.append(old)
            return change

    def rollback(self, *, replace: bool, report: Log) -> Change:
        """Serves again what was served before, and lets go of what is served now."""
        with self._one_change():
            if not self._earlier:
                raise ServerError(
                    f"nothing was served before {self._server.version} since this server started: "
                    "promote the version that you want"
                )
            version = self._earlier[-1]
            if not self._is_kept(version):
                self._check(version)
            change = self._change_to(version, keep=False, replace=replace, report=report)
            self._earlier.pop()
            return change

    @contextlib.contextmanager
    def _one_change(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise ServerError("another change of version is under way: wait for its end")
        try:
            if not self._is_up:
                raise ServerError(f"the server {self._what_befell()}: try again when it answers")
            yield
        finally:
            self._changing.release()

    def _check(self, version: Version) -> None:
        launch = self._plan(version.repository)
        if launch.uses_mpi or not launch.starts_like(self._server.launch):
            raise ServerError(
                f"{version} needs a server that is started for it: stop `specpipe serve`, and "
                "start it with that version"
            )

    def _change_to(self, version: Version, *, keep: bool, replace: bool, report: Log) -> Change:
        old, start = self._server.version, self._num_starts
        began = time.monotonic()
        is_kept = self._is_kept(version)
        if not is_kept:
            self._leaving.wait(report)
            shortage = "as was asked" if replace else self._shortage(version, report)
            if shortage is not None:
                return self._replace(version, shortage, start, report)
            report(f"loading {version} beside {old}")
        try:
            (loading.probe if is_kept else loading.load)(self._server, version)
            loaded = time.monotonic()
            self._swap(version, start)
        except (SpecpipeError, OSError) as exc:
            raise self._failed(version, exc, start) from exc
        swapped = time.monotonic()
        report(f"{version} answers, {swapped - began:.1f} s after the start")
        if self._kept is not None and not is_kept:
            self._leaving.let_go(self._kept[0])
        self._kept = None
        is_kept = keep and start == self._num_starts
        if is_kept:
            self._kept = old, self._server.processes_of(old)
        else:
            report(f"waiting for the last requests to {old}")
            self._leaving.let_go(old).wait(self._drain_timeout_s)
        in_flight = self._leaving.num_in_flight(old)
        if in_flight:
            report(f"{old} still answers {in_flight} requests, and is unloaded after the last")
        return Change(
            number=version.number,
            previous=old.number,
            is_previous_loaded=is_kept,
            load_s=loaded - began,
            swap_s=swapped - loaded,
            in_flight=in_flight,
        )

    def _is_kept(self, version: Version) -> bool:
        return self._kept is not None and self._kept[0] == version

    def _failed(self, version: Version, exc: Exception, start: int) -> ServerError:
        """Lets go of what did not come to be served; returns what to raise."""
        if start != self._num_starts:
            return ServerError(
                f"{version} is not served: the server {self._what_befell()} meanwhile"
            )
        if self._is_kept(version):
            self._kept = None
        loading.unload(self._server, version)
        why = f"{version} is not served: {to_sentence(exc).removesuffix('.')}"
        if isinstance(exc, NoAnswer):
            return ServerError(why)
        return ServerError(f"{why}; {self._server.version} answers as before")

    def _what_befell(self) -> str:
        return "was told to end" if self._ending.is_set() else "had to be restarted"

    # Steps

    def _swap(self, version: Version, start: int) -> None:
        """Lets `ensemble` hand requests to a version."""
        try:
            loading.point_to(self._server, version)
        except (ServerError, OSError):
            with contextlib.suppress(ServerError, OSError):
                loading.point_to(self._server, self._server.version)
            raise
        with self._moment:
            if start != self._num_starts:
                raise ServerError(f"the server {self._what_befell()} meanwhile")
            self._server.version = version
            assert self._health is not None
            self._health.begin()

    def _replace(self, version: Version, reason: str, start: int, report: Log) -> Change:
        assert self._health is not None
        if self._kept is not None:
            self._leaving.let_go(self._kept[0]).wait(self._drain_timeout_s)
            self._kept = None
        replacing = Replacing(
            self._server,
            self._health,
            swap=partial(self._swap, start=start),
            is_same_start=lambda: start == self._num_starts,
        )
        try:
            return replacing.run(version, reason, report)
        except ServerError as exc:
            if start != self._num_starts:
                raise self._failed(version, exc, start) from exc
            raise

    def _load_kept(self, version: Version) -> None:
        with self._changing:
            start = self._num_starts
            try:
                loading.load(self._server, version)
            except (SpecpipeError, OSError) as exc:
                if start == self._num_starts:
                    loading.unload(self._server, version)
                    self._report(f"warning: {version} is not kept for a rollback: {exc}")
                return
            self._kept = version, self._server.processes_of(version)
            self._report(f"{version} is loaded again, for a rollback")

    # Where both do not fit

    def _shortage(self, version: Version, report: Log) -> str | None:
        """Returns why both do not fit, after what was kept has made room if that is needed."""
        shortage = room.shortage(self._server, version)
        if shortage is None or self._kept is None:
            return shortage
        kept, self._kept = self._kept[0], None
        report(f"{shortage}: {kept}, kept for a rollback, is unloaded")
        self._leaving.let_go(kept).wait(self._drain_timeout_s)
        return room.shortage(self._server, version)
