"""A store in an OCI registry: a version is a manifest under a tag, files are its layers.

v.NAME.000007          the record of a version, and its files
c.NAME.000007.TOKEN    a claim of the number
k.NAME.000007.DIGEST   every record that was to be version 7: nothing is lost where two were
p.NAME                 which version is served
a.KEY                  the files of a stage's artifact

A registry writes what exists without asking. A claim is put there first, and then the tags are
read: of two that claim one number, one at least sees the other and takes another number.
"""

from __future__ import annotations

import hashlib
import random
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from specpipe.errors import StoreError
from specpipe.machine.signals import thread_pool
from specpipe.stores import records, transfers
from specpipe.stores.catalogue import claim_document
from specpipe.stores.patience import PATIENCE_S, Patience
from specpipe.stores.registry import Registry
from specpipe.stores.store import Blob, NumberTaken, Promotion, Transferred, VersionRecord

_NUM_THREADS = 8
_LONGEST_PAUSE_S = 1.0  # before a number that was claimed twice is given up for another: a guess

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class OciStore:
    """A `Store` in a registry, which removes contents itself, in a run of its garbage collector."""

    claims_exclusively = False

    def __init__(self, url: str, registry: Registry, *, patience_s: float = PATIENCE_S) -> None:
        self.url = url
        self._registry = registry
        self._patience = Patience(url, patience_s)

    def missing(self, blobs: Collection[Blob]) -> set[Blob]:
        wanted = sorted(set(blobs))
        sizes = self._in_threads(
            lambda blob: self._patience(lambda: self._registry.size(blob)), wanted
        )
        return {blob for blob, size in zip(wanted, sizes, strict=True) if size != blob.size}

    def upload(self, files: Mapping[Blob, Path]) -> Transferred:
        return transfers.upload(
            files,
            self.missing(files),
            self._registry.put,
            patience=self._patience,
            num_threads=_NUM_THREADS,
        )

    def download(self, files: Mapping[Path, Blob]) -> Transferred:
        def report_damage(blob: Blob) -> str:
            return "a registry keeps what it has of it, so its operator must remove that"

        return transfers.download(
            files,
            self._registry.blocks,
            report_damage,
            patience=self._patience,
            num_threads=_NUM_THREADS,
        )

    def claim(self, pair: str) -> int:
        while True:
            number = max(self._numbers("cvk", pair), default=0) + 1
            if number > records.MAX_NUMBER:
                raise StoreError(f"store {self.url} has no number left for {pair}")
            tag = _tag("c", pair, number, uuid.uuid4().hex[:12])
            self._write(tag, claim_document(), "claim")
            start = _tag("c", pair, number, "")
            if [other for other in self._tags() if other.startswith(start)] == [tag]:
                return number
            time.sleep(random.uniform(0.0, _LONGEST_PAUSE_S))

    def commit(self, record: VersionRecord) -> None:
        data = records.write_version(record)
        blobs = set(record.files.values())
        if lost := self.missing(blobs):
            raise StoreError(
                f"store {self.url} lacks {len(lost)} of the files of version {record.number} of "
                f"{record.pair}, such as blob {min(lost).sha256}: publish again"
            )
        tag = _tag("v", record.pair, record.number)
        kept = _tag("k", record.pair, record.number, hashlib.sha256(data).hexdigest()[:12])
        self._write(kept, data, "version", blobs)
        if self._read(tag) is None:
            self._write(tag, data, "version", blobs)
        if self._read(tag) != data:
            raise NumberTaken(
                f"store {self.url} has a version {record.number} of {record.pair} already; this "
                f"one is kept there as {kept}"
            )

    def versions(self, pair: str) -> list[VersionRecord]:
        found = self._in_threads(
            lambda number: self._version(pair, number), sorted(self._numbers("v", pair))
        )
        return [record for record in found if record is not None]

    def remove(self, pair: str, numbers: Collection[int]) -> int:
        found = [self._version(pair, number) for number in sorted(set(numbers))]
        removed = [record for record in found if record is not None]
        for record in removed:
            remove = partial(self._registry.remove, _tag("v", pair, record.number))
            self._patience(remove)
        blobs = {blob for record in removed for blob in record.files.values()}
        return sum(blob.size for blob in blobs - self._referred()) if blobs else 0

    def clean(self, pair: str) -> list[str]:
        # Contents of no manifest, and unfinished uploads, are what a registry removes itself; a
        # claim is a tag, and keeps its number from being given again.
        return []

    def promotion(self, pair: str) -> Promotion | None:
        data = self._read(_tag("p", pair))
        return None if data is None else records.parse_promotion(data, pair)

    def promote(self, pair: str, promotion: Promotion) -> None:
        self._write(_tag("p", pair), records.write_promotion(promotion), "promotion")

    def artifact(self, key: str) -> Mapping[str, Blob] | None:
        data = self._read(_artifact_tag(key))
        return None if data is None else records.parse_artifact(data)

    def keep_artifact(self, key: str, files: Mapping[str, Blob]) -> None:
        data = records.write_artifact(files)
        self._write(_artifact_tag(key), data, "artifact", set(files.values()))

    def _tags(self) -> list[str]:
        return self._patience(self._registry.tags)

    def _numbers(self, kinds: str, pair: str) -> set[int]:
        starts = tuple(_tag(kind, pair) for kind in kinds)
        numbers = set()
        for tag in self._tags():
            for start in starts:
                number = tag.removeprefix(f"{start}.").partition(".")[0]
                if tag.startswith(f"{start}.") and number.isdecimal() and len(number) == 6:
                    numbers.add(int(number))
        return numbers

    def _version(self, pair: str, number: int) -> VersionRecord | None:
        data = self._read(_tag("v", pair, number))
        try:
            return None if data is None else records.parse_version(data, pair, number)
        except StoreError as exc:
            raise StoreError(f"store {self.url}: {exc}") from None

    def _referred(self) -> set[Blob]:
        def blobs(tag: str) -> set[Blob]:
            kind, _, rest = tag.partition(".")
            if kind == "a":
                return set((self.artifact(rest) or {}).values())
            pair, _, number = rest.rpartition(".")
            record = self._version(pair, int(number))
            return set() if record is None else set(record.files.values())

        tags = [tag for tag in self._tags() if tag.startswith(("a.", "v."))]
        return {blob for some in self._in_threads(blobs, tags) for blob in some}

    def _read(self, tag: str) -> bytes | None:
        return self._patience(lambda: self._registry.read(tag))

    def _write(self, tag: str, data: bytes, kind: str, blobs: Collection[Blob] = ()) -> None:
        self._patience(lambda: self._registry.write(tag, data, kind, blobs))

    def _in_threads(
        self, call: Callable[[_Item], _Result], items: Collection[_Item]
    ) -> list[_Result]:
        with thread_pool(max(1, min(_NUM_THREADS, len(items)))) as pool:
            return list(pool.map(call, items))


def _tag(kind: str, pair: str, number: int | None = None, more: str | None = None) -> str:
    records.check_pair_name(pair)
    parts = [kind, pair]
    if number is not None:
        parts.append(f"{number:06d}")
    if more is not None:
        parts.append(more)
    return ".".join(parts)


def _artifact_tag(key: str) -> str:
    return f"a.{key}"
