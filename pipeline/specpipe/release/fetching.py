"""A version on its way from a store to this machine: refused early, fetched once, whole or not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from specpipe.errors import EngineMismatch, StoreError, show
from specpipe.machine.callables import Log
from specpipe.machine.memory import disk_shortage, existing_parent, format_bytes
from specpipe.progress import phase
from specpipe.release.documents import DOCUMENTS
from specpipe.release.local import (
    LocalVersion,
    contents,
    put_in_place,
    whole_version,
)
from specpipe.release.release_file import digest_of, requirement_faults
from specpipe.stores.records import below
from specpipe.stores.store import Blob, Store, VersionRecord

_MAX_DOCUMENT_BYTES = 256 << 20  # what is read of JSON at most; most have some kB


@dataclass(frozen=True)
class Fetched:
    """A version that is here now; num_bytes of it were moved, num_bytes_present were here."""

    version: LocalVersion
    num_bytes: int
    num_bytes_present: int

    def __str__(self) -> str:
        if not self.num_bytes:
            return f"version {self.version.number} is here"
        here = f", {format_bytes(self.num_bytes_present)} were here" * bool(self.num_bytes_present)
        return f"version {self.version.number}: {format_bytes(self.num_bytes)} fetched{here}"


def find_version(store: Store, pair: str, wanted: int | None) -> VersionRecord:
    """Returns the record of a version, or of the newest; StoreError says which ones there are."""
    records = {record.number: record for record in store.versions(pair)}
    if not records:
        raise StoreError(f"{store.url} has no version of {pair}: run `specpipe publish` first")
    number = max(records) if wanted is None else wanted
    if number not in records:
        raise StoreError(
            f"{store.url} has no version {show(number)} of {pair}, it has {ranges([*records])}"
        )
    record = records[number]
    if digest_of(record.files) != record.digest:
        raise StoreError(
            f"{store.url}: the record of version {number} of {pair} does not match its digest "
            f"{record.digest[:12]}: it was changed since it was published; promote another "
            "version, and publish this one again"
        )
    return record


def check_requirements(record: VersionRecord) -> None:
    """Raises EngineMismatch, before anything is fetched, where this machine cannot serve it."""
    if faults := requirement_faults(record.requires):
        raise EngineMismatch(
            f"version {record.number} of {record.pair} is not for this machine: "
            f"{'; '.join(faults)}: nothing was fetched"
        )


def fetch(store: Store, record: VersionRecord, versions: Path, log: Log) -> Fetched:
    """Brings a version to `versions/N`; goes on with what an interrupted call fetched.

    What another version here holds is copied and not moved. To be called with the lock of the pair.
    """
    size = sum(blob.size for blob in {*record.files.values()})
    here = whole_version(versions, record.number, log)
    if here is not None and _is_same(here, record):
        return Fetched(here, 0, size)
    staging = versions / f".{record.number}.fetching"
    with phase(f"version {record.number}"):
        wanted = below(staging, record.files)
        _copy_known(wanted, contents(versions))
        moved = store.download(wanted)  # which checks what is there, too
    version = put_in_place(staging, record, store.url)
    return Fetched(version, moved.num_bytes, size - moved.num_bytes)


def fetch_documents(store: Store, pair: str, number: int, folder: Path) -> None:
    """Brings the small documents of a version into a folder, to look at it without its weights."""
    record = find_version(store, pair, number)
    documents = {name: record.files[name] for name in DOCUMENTS if name in record.files}
    for name, blob in documents.items():
        if blob.size > _MAX_DOCUMENT_BYTES:
            raise StoreError(
                f"{store.url}: {name} of version {number} of {pair} has {blob.size} bytes, "
                f"expected at most {_MAX_DOCUMENT_BYTES}"
            )
    store.download(below(folder, documents))


def missing_bytes(record: VersionRecord, versions: Path) -> int:
    """Returns how much of a version is on this machine in no version that nobody touched."""
    return sum(blob.size for blob in {*record.files.values()} - contents(versions).keys())


def _copy_known(wanted: Mapping[Path, Blob], known: Mapping[Blob, Path]) -> None:
    """Copies what is on this machine already; raises StoreError where there is no room for it."""
    lacking = {
        path: known[blob]
        for path, blob in wanted.items()
        if blob in known and not os.path.lexists(path)
    }
    if not lacking:
        return
    needed = sum(source.stat().st_size for source in lacking.values())
    shortage = disk_shortage(existing_parent(next(iter(lacking))), needed)
    if shortage is not None:
        raise StoreError(
            f"{shortage} of other versions are to be copied: make room, as with "
            "`specpipe versions prune --keep 2`"
        )
    for path, source in lacking.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)


def _is_same(here: LocalVersion, record: VersionRecord) -> bool:
    """Says whether statement and signature are the record's, too: the digest leaves them out."""
    return {name: file.sha256 for name, file in here.files.items()} == {
        name: blob.sha256 for name, blob in record.files.items()
    }


def ranges(numbers: Collection[int]) -> str:
    """Returns numbers as people write them: 1, 2, 5 to 9."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in parts
    )
