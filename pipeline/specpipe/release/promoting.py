"""`specpipe promote` and `rollback`: which version of a pair this machine serves.

fetch → verify → let the running server swap → record. What fails on the way leaves the old version
served, and nothing recorded.

The store's record is the last word on what is served everywhere. A machine whose own differs hears
it from `specpipe versions`; one that starts with `serve --promoted` follows the store forward, but
never back by itself: whoever holds the store could bring back an old version's faults.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from specpipe.errors import StoreError
from specpipe.machine.callables import Log
from specpipe.machine.memory import format_bytes
from specpipe.release.fetching import check_requirements, fetch, find_version, missing_bytes
from specpipe.release.local import LocalVersion, find_local, locked, whole_version
from specpipe.release.serving_here import serving_here
from specpipe.release.signatures import check_record_signature
from specpipe.release.trust.serving import check_signature
from specpipe.release.trust.verification import check_not_older
from specpipe.stores.promoted import read_promotion, write_promotion
from specpipe.stores.store import Promotion, Store

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig


@dataclass(frozen=True, kw_only=True)
class Promoted:
    """What became of a promotion, or would.

    previous    what `specpipe rollback` leads to
    num_bytes   fetched, or to be fetched
    is_served   whether a server of this machine serves it; else it waits for one to start
    was_loaded  whether that server had it loaded already
    served_s    until it was served, and requests went to it; None: nothing was to be done
    change      what the server did (triton/server/versions.py); None: nothing, since it served it
                already, or none runs
    """

    pair: str
    number: int
    digest: str
    previous: int | None
    is_rollback: bool
    is_dry_run: bool
    num_bytes: int
    is_served: bool
    was_loaded: bool
    change: dict[str, Any] | None
    served_s: float | None
    duration_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Returns what happened, and how long it took."""
        version = f"version {self.number} of {self.pair} ({self.digest[:12]})"
        if self.is_dry_run:
            how = "it is loaded" if self.was_loaded else f"{format_bytes(self.num_bytes)} to fetch"
            by = "the running server" if self.is_served else "the next `specpipe serve --promoted`"
            return [f"{version} would be served by {by}: {how}"]
        if not self.is_served:
            return [
                f"{version} is promoted; no server of it runs here: `specpipe serve --promoted` "
                "begins with it"
            ]
        if self.change is None:
            return [f"{version} was served already; it is promoted"]
        kept = "was kept loaded" if self.was_loaded else "was loaded"
        lines = [f"{version} is served, after {self.served_s:.1f} s; it {kept}"]
        if gap_s := self.change.get("gap_s"):
            lines.append(f"requests were refused for {gap_s:.1f} s of it")
        return lines


def promote(
    config: PipelineConfig,
    store: Store,
    wanted: int | None,
    *,
    allow_older: bool = False,
    replace: bool = False,
    dry_run: bool = False,
    log: Log,
) -> Promoted:
    """Serves a version, None: the newest, in place of the one that is promoted on this machine.

    Raises EngineMismatch for a version that is not for this machine, and SignatureError for one
    that does not count here, or is older than the promoted one, before it is fetched.

    replace  whether what is served is unloaded first, also where both would fit
    """
    versions = config.artifacts.versions
    with locked(versions, "promote", log):
        started = time.monotonic()
        record = find_version(store, config.name, wanted)
        local = read_promotion(config.artifacts.promoted)
        known = local or store.promotion(config.name)
        if not allow_older:
            check_not_older(record.pair, record.number, None if known is None else known.number)
        check_requirements(record)
        check_record_signature(config, store, record)
        previous = None if local is None else local.number
        if local is not None and local.number == record.number:
            previous = local.previous
        server = serving_here(config.artifacts_dir)
        was_loaded = server is not None and server.has(record.number)
        num_bytes, change, asked = missing_bytes(record, versions), None, started
        if not dry_run:
            fetched = fetch(store, record, versions, log)
            log(str(fetched))
            check_signature(config, fetched.version.repository, log=log)
            num_bytes = fetched.num_bytes
            asked = time.monotonic()
            if server is not None:
                change = server.promote(
                    fetched.version,
                    keep_previous=config.release.keep_previous,
                    replace=replace,
                    log=log,
                )
            _record(config, store, record.number, record.digest, previous)
        return Promoted(
            pair=config.name,
            number=record.number,
            digest=record.digest,
            previous=previous,
            is_rollback=False,
            is_dry_run=dry_run,
            num_bytes=num_bytes,
            is_served=server is not None,
            was_loaded=was_loaded,
            change=change,
            served_s=_served_s(change, asked - started),
            duration_s=time.monotonic() - started,
        )


def rollback(
    config: PipelineConfig,
    store: Store,
    *,
    replace: bool = False,
    dry_run: bool = False,
    log: Log,
) -> Promoted:
    """Serves the version before the promoted one again; where that is here, without the store.

    What the server kept loaded was checked when it was promoted, and is not read again.
    """
    versions = config.artifacts.versions
    with locked(versions, "promote", log):
        started = time.monotonic()
        local = read_promotion(config.artifacts.promoted) or store.promotion(config.name)
        if local is None:
            raise StoreError(
                f"no version of {config.name} is promoted: `specpipe promote latest --config "
                f"{config.source}` promotes one"
            )
        if local.previous is None:
            raise StoreError(
                f"version {local.number} of {config.name} has none before it: `specpipe promote N "
                f"--older --config {config.source}` goes back to any version"
            )
        server = serving_here(config.artifacts_dir)
        was_loaded = server is not None and server.has(local.previous)
        here, num_bytes, change = find_local(versions, local.previous), 0, None
        asked = started
        digest = "" if here is None else here.digest
        if dry_run and here is None:
            record = find_version(store, config.name, local.previous)
            digest, num_bytes = record.digest, missing_bytes(record, versions)
        elif not dry_run:
            if here is None or not was_loaded:
                here, num_bytes = bring(config, store, local.previous, log)
                check_signature(config, here.repository, log=log)
            asked = time.monotonic()
            if server is not None:
                change = server.roll_back(here, replace=replace, log=log)
            digest = here.digest
            _record(config, store, here.number, digest, previous=None)
        return Promoted(
            pair=config.name,
            number=local.previous,
            digest=digest,
            previous=None,
            is_rollback=True,
            is_dry_run=dry_run,
            num_bytes=num_bytes,
            is_served=server is not None,
            was_loaded=was_loaded,
            change=change,
            served_s=_served_s(change, asked - started),
            duration_s=time.monotonic() - started,
        )


def _served_s(change: dict[str, Any] | None, before_s: float) -> float | None:
    """Returns when requests went to a version, which may be long before its forerunner is gone."""
    return None if change is None else before_s + change["load_s"] + change["swap_s"]


def bring(
    config: PipelineConfig, store: Store | None, number: int, log: Log
) -> tuple[LocalVersion, int]:
    """Returns a version that is here and whole, or is fetched now, and how many bytes were moved.

    To be called with the lock of the pair; whose signature it has is for the caller.
    """
    version = whole_version(config.artifacts.versions, number, log)
    if version is not None:
        return version, 0
    if store is None:
        raise StoreError(
            f"version {number} of {config.name} is not on this machine, and {config.source} names "
            "no place to fetch it from: set release.store"
        )
    record = find_version(store, config.name, number)
    check_requirements(record)
    check_record_signature(config, store, record)
    fetched = fetch(store, record, config.artifacts.versions, log)
    log(str(fetched))
    return fetched.version, fetched.num_bytes


def _record(
    config: PipelineConfig, store: Store, number: int, digest: str, previous: int | None
) -> None:
    """Says here, and then in the store, which version is promoted."""
    here = record_here(config, number, digest, previous)
    try:
        before = store.promotion(config.name)
        if before is None or (before.number, before.digest) != (number, digest):
            store.promote(config.name, here)
    except StoreError as exc:
        raise StoreError(
            f"version {number} of {config.name} is promoted on this machine, but the store does "
            f"not say so: {exc}; `specpipe promote {number} --older --config {config.source}` "
            "tells it, when it can be reached"
        ) from exc


def record_here(
    config: PipelineConfig, number: int, digest: str, previous: int | None
) -> Promotion:
    """Says on this machine which version is promoted; StoreError where that cannot be written."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    here = Promotion(number=number, digest=digest, promoted_at=now, previous=previous)
    try:
        write_promotion(config.artifacts.promoted, here)
    except OSError as exc:
        raise StoreError(
            f"version {number} of {config.name} is promoted, but {config.artifacts.promoted} does "
            f"not say so: {exc.strerror}; `specpipe promote {number} --older --config "
            f"{config.source}` tells it, when it can be written"
        ) from exc
    return here
