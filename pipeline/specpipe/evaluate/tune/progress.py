"""What a run has measured so far, on disk, so that an interrupted one goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specpipe.errors import RepositoryError
from specpipe.evaluate.results import read_result, write_result
from specpipe.machine.callables import Log

TUNE_KIND = "tune"
_DECIDES = ("pair", "versions", "machine", "settings", "prompts")
"""Keys of a result's header; a number that was measured under other values is of another run."""


class TuneProgress:
    """The measurements of each draft, by its checkpoint, each written when it is there.

    What a draft's entry holds is the business of run.py; `digest` is that of the pair that it was
    measured with.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._path = path
        self._data: dict[str, Any] = {**header, "measured": {}}

    def resume(self, report: Log) -> None:
        """Takes over what an earlier run of the same kind left; says why where it cannot."""
        if not self._path.exists():
            return
        try:
            earlier = read_result(self._path, TUNE_KIND)
            measured = dict(earlier["measured"])
        except (RepositoryError, KeyError, TypeError, ValueError):
            report(f"starting anew: {self._path} is damaged")
            return
        changes = list(_changes(earlier, self._data))
        if changes:
            report(f"starting anew: {'; '.join(changes)}")
            return
        report(f"going on with the run of {earlier['made_at']}")
        self._data["measured"] = measured

    def entry(self, checkpoint: str, digest: str, report: Log) -> dict[str, Any]:
        """Returns what was measured of a draft, to be added to; empty when its pair has changed."""
        entry: dict[str, Any] | None = self._data["measured"].get(checkpoint)
        if entry is not None and entry.get("digest") == digest:
            return entry
        if entry is not None:
            report(f"starting anew with {checkpoint}: it was built again since")
        entry = {"digest": digest}
        self._data["measured"][checkpoint] = entry
        return entry

    def save(self) -> None:
        """Writes everything, as a whole."""
        write_result(self._path, self._data)

    def remove(self) -> None:
        """The run is complete: its result is elsewhere."""
        self._path.unlink(missing_ok=True)


def _changes(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in _DECIDES:
        before, after = earlier.get(name), now.get(name)
        if before == after:
            continue
        if not isinstance(before, dict) or not isinstance(after, dict):
            yield f"{name} was {before}, is now {after}"
            continue
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                yield f"{name}.{key} was {before.get(key)}, is now {after.get(key)}"
