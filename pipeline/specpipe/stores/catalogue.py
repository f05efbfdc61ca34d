"""What a store of contents by name holds, and by which names.

blobs/sha256/ab/abcd…           contents, by their SHA-256
pairs/NAME/claims/000007        a number that somebody has, whether or not a version came of it
pairs/NAME/versions/000007.json the record of a version, written last
pairs/NAME/removed/000007       a number whose version or claim was removed: it is not given again
pairs/NAME/promoted.json        which version is served
artifacts/ab/abcd….json         the files of a stage's artifact, by its key
damaged/abcd…                   a content of which somebody found that it has another digest
collecting/…                    somebody is removing contents: see collecting.py
staging/                        what is being written, in a folder or behind SSH
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TypeVar

from specpipe.errors import StoreError
from specpipe.machine.signals import thread_pool
from specpipe.stores import records
from specpipe.stores.objects import Entry, Objects
from specpipe.stores.patience import Patience
from specpipe.stores.store import VersionRecord

BLOBS = "blobs/sha256"
DAMAGED = "damaged"
FLAGS = "collecting"

_KEY = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"pairs/([^/]+)/versions/([0-9]{6})\.json")
_CLAIM = re.compile(r"pairs/([^/]+)/claims/([0-9]{6})")
_NUMBER = re.compile(r"pairs/[^/]+/(?:claims|removed|versions)/([0-9]{6})(?:\.json)?")
_ARTIFACT = re.compile(r"artifacts/[0-9a-f]{2}/[0-9a-f]{64}\.json")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Claim:
    """A number that somebody has, since when, in the store's seconds since 1970."""

    pair: str
    number: int
    since: float


class Catalogue:
    """Reads and writes documents by name, again where that fails for a reason that passes."""

    def __init__(self, objects: Objects, patience: Patience) -> None:
        self.objects = objects
        self.patience = patience

    def entry(self, name: str) -> Entry | None:
        """Returns what is there by a name."""
        return self.patience(lambda: self.objects.entry(name))

    def entries(self, prefix: str) -> dict[str, Entry]:
        """Returns what is below a folder, by whole name."""
        return self.patience(lambda: self.objects.entries(prefix))

    def read(self, name: str) -> bytes | None:
        """Returns a document; None where there is none."""
        return self.patience(lambda: self.objects.read(name))

    def replace(self, name: str, data: bytes) -> None:
        """Writes a document, in place of what is there."""
        self.patience(lambda: self.objects.replace(name, data))

    def create(self, name: str, data: bytes) -> bool:
        """Writes a document where there is nothing; returns whether it is there then.

        An answer that got lost makes a second attempt, which finds what the first one wrote.
        """
        return self.patience(lambda: self.objects.create(name, data)) or self.read(name) == data

    def remove(self, name: str) -> None:
        """Removes a content or a document, if it is there."""
        self.patience(lambda: self.objects.remove(name))

    def in_threads(
        self, call: Callable[[_Item], _Result], items: Collection[_Item]
    ) -> list[_Result]:
        """Returns what a call makes of each item, several at once."""
        with thread_pool(max(1, min(self.objects.num_threads, len(items)))) as pool:
            return list(pool.map(call, items))

    def numbers(self, pair: str) -> list[int]:
        """Returns the numbers of the versions of a pair, in order."""
        records.check_pair_name(pair)
        names = self.entries(f"pairs/{pair}/versions")
        return sorted(int(match[2]) for name in names if (match := _VERSION.fullmatch(name)))

    def highest(self, pair: str) -> int:
        """Returns the highest number that was ever claimed, 0 for none."""
        records.check_pair_name(pair)
        names = self.entries(f"pairs/{pair}")
        return max((int(m[1]) for name in names if (m := _NUMBER.fullmatch(name))), default=0)

    def version(self, pair: str, number: int) -> VersionRecord | None:
        """Returns a version; None where there is none."""
        data = self.read(version_name(pair, number))
        if data is None:
            return None
        try:
            return records.parse_version(data, pair, number)
        except StoreError as exc:
            raise StoreError(f"store {self.patience.url}: {exc}") from None

    def referred(self) -> set[str]:
        """Returns the digests of all contents that a version or an artifact has."""
        names = [*self.entries("pairs"), *self.entries("artifacts")]
        return {digest for some in self.in_threads(self._digests, names) for digest in some}

    def _digests(self, name: str) -> set[str]:
        if match := _VERSION.fullmatch(name):
            record = self.version(match[1], int(match[2]))
            files = {} if record is None else record.files
        elif _ARTIFACT.fullmatch(name):
            data = self.read(name)
            files = {} if data is None else records.parse_artifact(data)
        else:
            files = {}
        return {blob.sha256 for blob in files.values()}

    def open_claims(self) -> list[Claim]:
        """Returns the claims of all pairs that no version came of yet."""
        entries = self.entries("pairs")
        return [
            Claim(match[1], int(match[2]), entry.modified)
            for name, entry in sorted(entries.items())
            if (match := _CLAIM.fullmatch(name))
            and version_name(match[1], int(match[2])) not in entries
        ]


def blob_name(sha256: str) -> str:
    """Returns the name of a content."""
    return f"{BLOBS}/{sha256[:2]}/{sha256}"


def claim_name(pair: str, number: int) -> str:
    """Returns the name of a claim."""
    return f"pairs/{pair}/claims/{number:06d}"


def version_name(pair: str, number: int) -> str:
    """Returns the name of a version's record."""
    return f"pairs/{pair}/versions/{number:06d}.json"


def removed_name(pair: str, number: int) -> str:
    """Returns the name of what says that a number was taken, and is free no more."""
    return f"pairs/{pair}/removed/{number:06d}"


def promotion_name(pair: str) -> str:
    """Returns the name of what says which version is served."""
    records.check_pair_name(pair)
    return f"pairs/{pair}/promoted.json"


def artifact_name(key: str) -> str:
    """Returns the name of an artifact's document."""
    if not _KEY.fullmatch(key):
        raise StoreError("the key of an artifact is a SHA-256 in hexadecimal")
    return f"artifacts/{key[:2]}/{key}.json"


def damage_name(sha256: str) -> str:
    """Returns the name of what says that a content is damaged."""
    return f"{DAMAGED}/{sha256}"


def claim_document() -> bytes:
    """Returns what a claim says: which one it is, since two are made in one second."""
    claim = {"claim": uuid.uuid4().hex, "claimed_at": now()}
    return json.dumps(claim).encode() + b"\n"


def now() -> str:
    """Returns the time in UTC and ISO 8601, in seconds."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
