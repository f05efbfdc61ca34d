"""One version in place of another, where both do not fit: the old one is unloaded first.

`ensemble` is taken away, so that Triton refuses requests; those in flight are waited for, up to the
drain limit, after which the old one goes on as before; it is unloaded, the new one loaded and
asked, and `ensemble` loaded again. When the new one fails, the old one is loaded again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpipe.errors import ServerError, SpecpipeError, to_sentence
from specpipe.machine.callables import Log
from specpipe.runtimes.repository_layout import ENSEMBLE
from specpipe.triton.server import loading
from specpipe.triton.server.served_models import Version

if TYPE_CHECKING:
    from specpipe.triton.server.health import Health
    from specpipe.triton.server.server import Server


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that was made; times in seconds.

    previous   what was served before, and whether it is still loaded
    load_s     until the new one had answered its first request
    swap_s     until `ensemble` handed requests to it
    gap_s      for which requests were refused; 0.0 unless the old one was unloaded first
    in_flight  requests that the old one still answers; it is unloaded after the last of them
    """

    number: int | None
    previous: int | None
    is_previous_loaded: bool
    load_s: float
    swap_s: float
    gap_s: float = 0.0
    in_flight: int = 0


class Replacing:
    """A change with a gap, of a server whose health knows of it."""

    def __init__(
        self,
        server: Server,
        health: Health,
        *,
        swap: Callable[[Version], None],
        is_same_start: Callable[[], bool],
    ) -> None:
        """swap lets `ensemble` hand requests to a version that is loaded."""
        self._server, self._health = server, health
        self._swap, self._is_same_start = swap, is_same_start

    def run(self, version: Version, reason: str, report: Log) -> Change:
        """Returns what it came to; raises ServerError, after which the old version answers."""
        old = self._server.version
        report(
            f"{old} is unloaded before {version} is loaded ({reason}): requests are refused in "
            "between"
        )
        began = time.monotonic()
        self._health.begin(is_answering=False)
        is_unloaded = False
        try:
            self._server.control.unload(ENSEMBLE)
            self._drain(old)
            is_unloaded = True
            loading.unload(self._server, old)
            unloaded = time.monotonic()
            loading.load(self._server, version)
            loaded = time.monotonic()
            self._swap(version)
        except (SpecpipeError, OSError) as exc:
            if self._is_same_start():
                loading.unload(self._server, version)
                self._bring_back(old, is_unloaded=is_unloaded)
            raise ServerError(
                f"{version} is not served: {to_sentence(exc)}; {old} answers again, after "
                f"{time.monotonic() - began:.1f} s in which requests were refused"
            ) from exc
        swapped = time.monotonic()
        report(f"{version} answers; requests were refused for {swapped - began:.1f} s")
        return Change(
            number=version.number,
            previous=old.number,
            is_previous_loaded=False,
            load_s=loaded - unloaded,
            swap_s=swapped - loaded,
            gap_s=swapped - began,
        )

    def _drain(self, version: Version) -> None:
        limit_s = self._server.options.drain_timeout_s
        deadline = time.monotonic() + limit_s
        idle = loading.Idle(self._server, version)
        while not idle.look():
            if not self._is_same_start() or time.monotonic() > deadline:
                raise ServerError(
                    f"{version} still answered {idle.num_left} requests after {limit_s:g} s"
                )

    def _bring_back(self, old: Version, *, is_unloaded: bool) -> None:
        try:
            if is_unloaded:
                loading.load(self._server, old)
            self._swap(old)
        except (SpecpipeError, OSError) as exc:
            self._health.condemn(f"{old} could not be loaded again: {to_sentence(exc)}")
