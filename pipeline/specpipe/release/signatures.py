"""Who signed a published version, by the digests of its record: before its files are fetched."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from specpipe.errors import SignatureError
from specpipe.release.release_file import RELEASE_NAME, SIGNATURE_NAME
from specpipe.release.trust.publishers import Trust
from specpipe.release.trust.serving import trust_of
from specpipe.release.trust.verification import Verified, verify
from specpipe.stores.records import below
from specpipe.stores.store import Blob, Store, VersionRecord

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig

MAX_BYTES = 16 << 20  # of a release.json and a signature, which have some thousand


def check_record_signature(config: PipelineConfig, store: Store, record: VersionRecord) -> None:
    """Raises SignatureError where what a store says of a version is not signed as the YAML wants.

    Only `release.json` and the signature are fetched; that the files are what the record says is
    checked when they come.
    """
    trust = trust_of(config)
    if SIGNATURE_NAME not in record.files:
        if config.release.require_signature:
            raise SignatureError(
                f"{store.url}: version {record.number} of {record.pair} is not signed, and "
                f"release.require_signature is true in {config.source}: publish it with a key"
            )
        return
    if trust is not None:
        with tempfile.TemporaryDirectory(prefix="specpipe-signature-") as folder:
            store.download(below(Path(folder), signed_statement(record)))
            verify_record(record, Path(folder), trust)


def signed_statement(record: VersionRecord) -> dict[str, Blob]:
    """Returns the files that tell who signed a version."""
    return {
        name: blob
        for name, blob in record.files.items()
        if name in (RELEASE_NAME, SIGNATURE_NAME) and blob.size <= MAX_BYTES
    }


def verify_record(record: VersionRecord, folder: Path, trust: Trust) -> Verified:
    """Returns who signed what a record says; `folder` holds its statement and signature."""
    present = {name: blob.sha256 for name, blob in record.files.items() if name != SIGNATURE_NAME}
    try:
        return verify(
            folder,
            trust,
            expected_pair=record.pair,
            expected_number=record.number,
            present=present,
        )
    except SignatureError as exc:  # which names the folder that is gone soon
        raise SignatureError(str(exc).replace(str(folder), f"version {record.number}")) from exc
