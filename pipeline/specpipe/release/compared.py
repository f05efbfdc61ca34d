"""The nightly run of the promoted version, which the next one is compared with."""

from __future__ import annotations

import tempfile
from pathlib import Path

from specpipe.config.sections import PipelineConfig
from specpipe.errors import StoreError
from specpipe.evaluate.nightly.record import read_last_good
from specpipe.evaluate.nightly.run import PromotedRun
from specpipe.machine.artifacts import Artifacts
from specpipe.machine.memory import format_bytes
from specpipe.release.fetching import find_version
from specpipe.release.release_file import NIGHTLY_NAME
from specpipe.stores.places import open_store
from specpipe.stores.promoted import read_promotion
from specpipe.stores.store import Store

_MOST_BYTES = 16 << 20  # some 100 KB, and 1 KB for each prompt


def find_promoted(config: PipelineConfig) -> PromotedRun | None:
    """Returns the promoted version of a pair with its run; None where none is promoted.

    A store says what is promoted everywhere, and of it that one file is fetched; without a store
    this machine says what it serves.
    """
    if config.release.store is not None:
        return _of_store(open_store(config.release.store, config.base_dir), config.name)
    promotion = read_promotion(config.artifacts.promoted)
    if promotion is None:
        return None
    folder = config.artifacts.versions / str(promotion.number)
    return PromotedRun(promotion.number, read_last_good(Artifacts(folder).result("nightly")))


def _of_store(store: Store, pair: str) -> PromotedRun | None:
    promotion = store.promotion(pair)
    if promotion is None:
        return None
    blob = find_version(store, pair, promotion.number).files.get(NIGHTLY_NAME)
    if blob is None:
        return PromotedRun(promotion.number, None)
    if blob.size > _MOST_BYTES:
        raise StoreError(
            f"{store.url}: {NIGHTLY_NAME} of version {promotion.number} of {pair} has "
            f"{format_bytes(blob.size)}, expected at most {format_bytes(_MOST_BYTES)}: promote "
            "another version"
        )
    with tempfile.TemporaryDirectory(prefix="specpipe-promoted-") as folder:
        path = Path(folder, "nightly.json")
        store.download({path: blob})
        return PromotedRun(promotion.number, read_last_good(path))
