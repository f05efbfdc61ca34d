"""Versions on their way out: no new request comes to them, and after their last they are unloaded.

No answer is cut for it, however long it takes; only whoever needs the memory waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from specpipe.errors import ServerError
from specpipe.machine.callables import Log
from specpipe.triton.server import loading
from specpipe.triton.server.served_models import Version

if TYPE_CHECKING:
    from specpipe.triton.server.server import Server


class Departure(threading.Thread):
    """One version's way out."""

    def __init__(self, see_off: Callable[[threading.Event], None]) -> None:
        self._drained = threading.Event()
        super().__init__(target=see_off, args=(self._drained,), name="leaving", daemon=True)

    def wait(self, limit_s: float) -> bool:
        """Waits that long for the last answer, then for the end of the processes."""
        if not self._drained.wait(limit_s):
            return False
        self.join()
        return True


class Leaving:
    """All that are on their way out of a server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limit_s = server.options.drain_timeout_s
        self._num_starts = 0
        self._departures: dict[Version, Departure] = {}

    def server_ends(self) -> None:
        """Takes in that the server is killed, and they with it."""
        self._num_starts += 1
        self._departures.clear()

    def numbers(self) -> list[int | None]:
        return [version.number for version in list(self._departures)]

    def num_in_flight(self, version: Version) -> int:
        """Returns how many requests a version still answers; 0 for one that is gone."""
        if version not in self._departures:
            return 0
        return loading.num_in_flight(self._server, version) or 0

    def let_go(self, version: Version) -> Departure:
        """Has a version unloaded once it has no request left, or a process of it is lost."""
        departure = self._departures[version] = Departure(partial(self._see_off, version))
        departure.start()
        return departure

    def wait(self, report: Log) -> None:
        """Waits for all, up to the drain limit; raises ServerError then."""
        for version, departure in list(self._departures.items()):
            report(f"waiting for the last requests to {version}")
            if not departure.wait(self._limit_s):
                num_left = self.num_in_flight(version)
                raise ServerError(
                    f"{version} still answers {num_left} requests: try again after their end"
                )

    def _see_off(self, version: Version, drained: threading.Event) -> None:
        start = self._num_starts
        with contextlib.suppress(ServerError):  # the server ends
            watched = self._server.processes_of(version)
            idle = loading.Idle(self._server, version)
            while start == self._num_starts and watched.fault() is None and not idle.look():
                pass
        drained.set()
        if start == self._num_starts:
            loading.unload(self._server, version)
            self._departures.pop(version, None)
