"""`specpipe serve --promoted` and `--version N`: the version that a server starts with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specpipe.errors import StoreError
from specpipe.machine.callables import Log
from specpipe.release.local import LocalVersion, check_whole, locked
from specpipe.release.promoting import bring, record_here
from specpipe.stores.promoted import read_promotion
from specpipe.stores.store import Promotion, Store

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig


def version_to_serve(
    config: PipelineConfig, store: Store | None, number: int | None, *, verify: bool, log: Log
) -> LocalVersion:
    """Returns a version, None: the promoted one, that is here and whole, or is fetched now.

    store   None: the YAML names none, and the version must be here
    verify  whether all of it is hashed, and not only what was touched since it came
    """
    with locked(config.artifacts.versions, "promote", log):
        promotion = None
        if number is None:
            promotion = _promotion(config, store, log)
            number = promotion.number
        version, _ = bring(config, store, number, log)
        if promotion is not None and promotion.digest != version.digest:
            raise StoreError(
                f"version {number} of {config.name} that is promoted has the digest "
                f"{promotion.digest[:12]}, the one that is published {version.digest[:12]}: find "
                "out who changed the store, and promote a version again"
            )
        if verify:
            compared = check_whole(version, trust_times=False)
            log(f"{version.folder}: {compared.hashed}")
            if compared.differences:
                return bring(config, store, number, log)[0]
        return version


def started(config: PipelineConfig, version: LocalVersion) -> None:
    """Says on this machine that the promoted version is served, where it followed the store."""
    local = read_promotion(config.artifacts.promoted)
    if local is None or local.number != version.number:
        previous = None if local is None else local.number
        record_here(config, version.number, version.digest, previous)


def _promotion(config: PipelineConfig, store: Store | None, log: Log) -> Promotion:
    """Returns what is promoted: by the store, or on this machine where that is newer.

    A store that says an older version than this machine last served is not followed: to go back is
    an operator's act. Neither is one that cannot be reached; both are told.
    """
    here = read_promotion(config.artifacts.promoted)
    there = None
    if store is not None:
        try:
            there = store.promotion(config.name)
        except StoreError as exc:
            if here is None:
                raise
            log(f"warning: {exc}; serving what was promoted on this machine")
    if here is None or there is None:
        found = here or there
        if found is None:
            raise StoreError(
                f"no version of {config.name} is promoted: `specpipe promote latest --config "
                f"{config.source}` promotes one"
            )
        return found
    if there.number >= here.number:
        return there
    log(
        f"warning: the store has version {there.number} promoted, older than version {here.number} "
        f"of this machine, which is served: `specpipe promote {there.number} --older --config "
        f"{config.source}` follows the store"
    )
    return here
