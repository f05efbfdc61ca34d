"""`specpipe versions prune`: old versions go, from a store and from this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.machine.callables import Log
from specpipe.machine.memory import format_bytes
from specpipe.release.fetching import ranges
from specpipe.release.local import (
    find_local,
    local_numbers,
    locked,
    remove_local,
)
from specpipe.release.serving_here import serving_here
from specpipe.stores.promoted import read_promotion
from specpipe.stores.store import Store

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What was removed from the store and from this machine, or would be, and what it set free."""

    pair: str
    store: str
    numbers: tuple[int, ...]
    numbers_here: tuple[int, ...]
    kept: tuple[int, ...]
    freed_bytes: int
    freed_here_bytes: int
    is_dry_run: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Returns what went from where, and what stayed."""
        if not (self.numbers or self.numbers_here):
            return [f"nothing to remove: {self.store} has {ranges(self.kept)} of {self.pair}"]
        done = "would go" if self.is_dry_run else "removed"
        lines = []
        for where, numbers, freed in (
            (self.store, self.numbers, self.freed_bytes),
            ("this machine", self.numbers_here, self.freed_here_bytes),
        ):
            if numbers:
                free = "" if self.is_dry_run else f", {format_bytes(freed)} free"
                lines.append(f"{done} from {where}: version {ranges(numbers)} of {self.pair}{free}")
        return [*lines, f"kept: {ranges(self.kept)}"]


def prune(
    config: PipelineConfig,
    store: Store,
    keep: int,
    *,
    dry_run: bool,
    log: Log,
) -> Pruned:
    """Removes all but the newest versions from a store and from this machine.

    What is promoted, in the store or here, stays, and so does the version before it, and what a
    server has loaded.
    """
    versions = config.artifacts.versions
    with locked(versions, "publish", log), locked(versions, "promote", log):
        published = sorted(record.number for record in store.versions(config.name))
        serving = serving_here(config.artifacts_dir)
        kept: set[int | None] = {*published[-keep:]}
        if serving is not None:
            kept |= {serving.number, serving.previous}
        for promotion in (store.promotion(config.name), read_promotion(config.artifacts.promoted)):
            if promotion is not None:
                kept |= {promotion.number, promotion.previous}
        going = [number for number in published if number not in kept]
        going_here = [
            number
            for number in local_numbers(versions)
            if number not in kept and (number in going or _came_from(versions, number, store))
        ]
        freed = freed_here = 0
        if not dry_run:
            freed = store.remove(config.name, going) if going else 0
            freed_here = sum(remove_local(versions, number) for number in going_here)
    return Pruned(
        pair=config.name,
        store=store.url,
        numbers=tuple(going),
        numbers_here=tuple(going_here),
        kept=tuple(number for number in published if number in kept),
        freed_bytes=freed,
        freed_here_bytes=freed_here,
        is_dry_run=dry_run,
    )


def _came_from(versions: Path, number: int, store: Store) -> bool:
    """Says whether a version here is one of this store, which may have it no longer."""
    version = find_local(versions, number)
    return version is not None and version.store == store.url
