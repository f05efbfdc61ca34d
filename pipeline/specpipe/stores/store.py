"""What a place of versions offers, whatever it is: a folder, S3, GCS, a machine behind SSH, OCI.

A version is a set of files that never changes. Its files are kept by their SHA-256, once for all
versions and pairs; its record names them, and is written last: what has no record is no version.
A number is claimed before the record is written, since what is signed holds the number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specpipe.errors import StoreError


class NumberTaken(StoreError):
    """Somebody else has the number: claim the next one, and sign again."""


@dataclass(frozen=True, order=True)
class Blob:
    """The content of a file: its SHA-256 in hexadecimal, and its size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class VersionRecord:
    """A published version of a pair.

    digest        SHA-256 over names and contents of all files but the signature: what it is
    files         contents by path below the version's folder, with "/"
    requires      what a machine must be to serve it, as facts by name
    published_at  time of publishing, in UTC and ISO 8601
    """

    pair: str
    number: int
    digest: str
    files: Mapping[str, Blob]
    requires: Mapping[str, Any]
    published_at: str


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """Which version is served: its number and digest, since when, and the one before it."""

    number: int
    digest: str
    promoted_at: str
    previous: int | None = None


@dataclass(frozen=True)
class Transferred:
    """What was moved, and what was there already."""

    num_files: int
    num_bytes: int
    num_bytes_present: int


class Store(Protocol):
    """A place of versions and artifacts; every call raises StoreError where it fails.

    url                 where it is, as messages and records may show it: without credentials
    claims_exclusively  whether it can refuse to write what exists; if not, `commit` finds out
                        afterwards that another one took the number
    """

    url: str
    claims_exclusively: bool

    def missing(self, blobs: Collection[Blob]) -> set[Blob]:
        """Returns those that are not there, or not whole."""

    def upload(self, files: Mapping[Blob, Path]) -> Transferred:
        """Puts files there, several at once; those that are there are left alone."""

    def download(self, files: Mapping[Path, Blob]) -> Transferred:
        """Fetches contents to paths, several at once, and checks each one's SHA-256.

        A path appears when it is whole; what an interrupted call fetched is gone on with.
        """

    def claim(self, pair: str) -> int:
        """Takes the next number of a pair, which nobody else gets then, and returns it."""

    def commit(self, record: VersionRecord) -> None:
        """Makes a version of a claimed number and uploaded files; raises NumberTaken."""

    def versions(self, pair: str) -> list[VersionRecord]:
        """Returns the versions of a pair, oldest first."""

    def remove(self, pair: str, numbers: Collection[int]) -> int:
        """Removes versions and what only they hold; returns the bytes that this set free."""

    def clean(self, pair: str) -> list[str]:
        """Removes what interrupted publishes left; returns a phrase for each."""

    def promotion(self, pair: str) -> Promotion | None:
        """Returns which version of a pair is promoted; None where none was."""

    def promote(self, pair: str, promotion: Promotion) -> None:
        """Says which version is served."""

    def artifact(self, key: str) -> Mapping[str, Blob] | None:
        """Returns the files of a stage's artifact by the key of what it is made from, if there."""

    def keep_artifact(self, key: str, files: Mapping[str, Blob]) -> None:
        """Makes an artifact of uploaded files."""
