"""The server of a pair that runs on this machine, as releases ask it over its control socket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.machine.callables import Log
from specpipe.release.local import LocalVersion
from specpipe.triton.server import control


@dataclass(frozen=True)
class ServingHere:
    """A running server: the version that it serves, and the one that its rollback leads to.

    number     None: the pair as it was built
    previous   None: none since the server started, or the pair as it was built
    is_loaded  whether the previous one was kept loaded
    """

    artifacts_dir: Path
    number: int | None
    previous: int | None
    is_loaded: bool

    def has(self, number: int) -> bool:
        """Returns whether a version is loaded, so that serving it takes seconds."""
        return number == self.number or (self.is_loaded and number == self.previous)

    def promote(
        self, version: LocalVersion, *, keep_previous: bool, replace: bool, log: Log
    ) -> dict[str, Any] | None:
        """Lets it serve another version; returns what it did, None where it served that already."""
        if version.number == self.number:
            return None
        return control.ask(
            self.artifacts_dir,
            "promote",
            report=log,
            repository=version.repository,
            number=version.number,
            keep_previous=keep_previous,
            replace=replace,
        )

    def roll_back(self, version: LocalVersion, *, replace: bool, log: Log) -> dict[str, Any] | None:
        """Lets it serve what it served before, which may be another than this machine knows of."""
        if version.number == self.previous:
            return control.ask(self.artifacts_dir, "rollback", report=log, replace=replace)
        return self.promote(version, keep_previous=False, replace=replace, log=log)


def serving_here(artifacts_dir: Path) -> ServingHere | None:
    """Returns the server of a pair that runs on this machine and can be asked; None: none does."""
    if not control.is_served(artifacts_dir):
        return None
    status = control.ask(artifacts_dir, "status")
    previous = status["previous"] or {}
    return ServingHere(
        artifacts_dir, status["number"], previous.get("number"), bool(previous.get("is_loaded"))
    )
