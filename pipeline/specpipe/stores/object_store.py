"""A store of contents by name: a folder, S3, GCS, or a machine behind SSH."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from specpipe.errors import StoreError
from specpipe.stores import collecting, records, transfers
from specpipe.stores.catalogue import (
    DAMAGED,
    Catalogue,
    artifact_name,
    blob_name,
    claim_document,
    claim_name,
    damage_name,
    promotion_name,
    version_name,
)
from specpipe.stores.objects import Objects, in_blocks
from specpipe.stores.patience import PATIENCE_S, Patience
from specpipe.stores.store import Blob, NumberTaken, Promotion, Transferred, VersionRecord


class ObjectStore:
    """A `Store` of contents by name, which no two can write as the same.

    patience_s  how long a server may fail before a call does
    stale_s     age in seconds from which `clean` removes what no version came of
    """

    claims_exclusively = True

    def __init__(
        self,
        url: str,
        objects: Objects,
        *,
        patience_s: float = PATIENCE_S,
        stale_s: float = collecting.STALE_S,
    ) -> None:
        self.url = url
        self._objects = objects
        self._patience = Patience(url, patience_s)
        self._stale_s = stale_s
        self._catalogue = Catalogue(objects, self._patience)

    def missing(self, blobs: Collection[Blob]) -> set[Blob]:
        wanted = sorted(set(blobs))
        damaged = {name.rpartition("/")[2] for name in self._catalogue.entries(DAMAGED)}
        found = self._catalogue.in_threads(
            lambda blob: self._catalogue.entry(blob_name(blob.sha256)), wanted
        )
        return {
            blob
            for blob, entry in zip(wanted, found, strict=True)
            if entry is None or entry.size != blob.size or blob.sha256 in damaged
        }

    def upload(self, files: Mapping[Blob, Path]) -> Transferred:
        def put(blob: Blob, blocks: Iterable[bytes]) -> None:
            self._objects.put(blob_name(blob.sha256), blocks, blob.size)
            self._objects.remove(damage_name(blob.sha256))

        return transfers.upload(
            files,
            self.missing(files),
            put,
            patience=self._patience,
            num_threads=self._objects.num_threads,
        )

    def download(self, files: Mapping[Path, Blob]) -> Transferred:
        def read(blob: Blob, start: int) -> Iterator[bytes]:
            return in_blocks(self._objects, blob_name(blob.sha256), start, blob.size)

        def report_damage(blob: Blob) -> str:
            # So that the next upload replaces it. Who may only read has told people at least.
            with suppress(Exception):
                self._objects.replace(damage_name(blob.sha256), b"damaged\n")
            return "publish it again from where it was built, which replaces it"

        return transfers.download(
            files,
            read,
            report_damage,
            patience=self._patience,
            num_threads=self._objects.num_threads,
        )

    def claim(self, pair: str) -> int:
        number = self._catalogue.highest(pair) + 1
        while number <= records.MAX_NUMBER:
            name = claim_name(pair, number)
            if self._catalogue.create(name, claim_document()):
                entry = self._catalogue.entry(name)
                if entry is not None:
                    collecting.wait(self._catalogue, entry.modified)
                return number
            number += 1
        raise StoreError(f"store {self.url} has no number left for {pair}")

    def commit(self, record: VersionRecord) -> None:
        data = records.write_version(record)
        if lost := self.missing(set(record.files.values())):
            raise StoreError(
                f"store {self.url} lacks {len(lost)} of the files of version {record.number} of "
                f"{record.pair}, such as blob {min(lost).sha256}: publish again"
            )
        if not self._catalogue.create(version_name(record.pair, record.number), data):
            raise NumberTaken(
                f"store {self.url} has a version {record.number} of {record.pair} already"
            )

    def versions(self, pair: str) -> list[VersionRecord]:
        found = self._catalogue.in_threads(
            lambda number: self._catalogue.version(pair, number), self._catalogue.numbers(pair)
        )
        return [record for record in found if record is not None]  # some may just be removed

    def remove(self, pair: str, numbers: Collection[int]) -> int:
        return collecting.remove(self._catalogue, pair, numbers, self._stale_s)

    def clean(self, pair: str) -> list[str]:
        return collecting.clean(self._catalogue, pair, self._stale_s)

    def promotion(self, pair: str) -> Promotion | None:
        data = self._catalogue.read(promotion_name(pair))
        return None if data is None else records.parse_promotion(data, pair)

    def promote(self, pair: str, promotion: Promotion) -> None:
        self._catalogue.replace(promotion_name(pair), records.write_promotion(promotion))

    def artifact(self, key: str) -> Mapping[str, Blob] | None:
        data = self._catalogue.read(artifact_name(key))
        return None if data is None else records.parse_artifact(data)

    def keep_artifact(self, key: str, files: Mapping[str, Blob]) -> None:
        self._catalogue.replace(artifact_name(key), records.write_artifact(files))
