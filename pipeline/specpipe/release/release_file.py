"""`release.json`: which version a folder is, and what it takes to serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter

from specpipe.config.sections import NAME_PATTERN
from specpipe.errors import RepositoryError
from specpipe.evaluate.verification.record import HasDigest, repository_digest
from specpipe.machine.gpus import gpus_here
from specpipe.machine.manifest import record_files
from specpipe.machine.own_json import parse_object, read_bytes, reason, write_object
from specpipe.runtimes import requirements
from specpipe.runtimes.requirements import Requirements

RELEASE_NAME, SIGNATURE_NAME = "release.json", "model.sig"
"""The files of a version that its digest does not cover: one holds it, the other signs all."""

NIGHTLY_NAME = "results/nightly.json"
"""The last good nightly run of a version."""

_FORMAT = 1
_MAX_BYTES = 1 << 20  # one has some thousand
_MAX_NOTES = 64

Number = Annotated[int, Field(ge=1, lt=1 << 31, strict=True)]


def _check_time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


@dataclass(frozen=True, kw_only=True)
class Release:
    """A version of a pair, as its `release.json` says it.

    digest        SHA-256 over names and contents of the other files but the signature
    published_at  UTC, ISO 8601
    specpipe      the version that made it
    previous      the number of the version before it; None: it is the first
    notes         what to know of it, a sentence each
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    pair: Annotated[str, Field(pattern=NAME_PATTERN, max_length=255)]
    number: Number
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    requires: Requirements
    published_at: Annotated[
        str,
        Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$"),
        AfterValidator(_check_time),
    ]
    specpipe: Annotated[str, Field(max_length=64)]
    previous: Number | None = None
    notes: Annotated[
        tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=_MAX_NOTES)
    ] = ()

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = _RELEASES.dump_python(self, mode="json")
        return data

    def write(self, folder: Path) -> None:
        write_object(folder / RELEASE_NAME, {"format": _FORMAT, **self.to_json()})


_RELEASES = TypeAdapter(Release)
_REQUIREMENTS = TypeAdapter(Requirements)


def read_release(folder: Path) -> Release:
    """Reads which version a folder is; raises RepositoryError for what no specpipe wrote.

    Whether the folder holds what it says is for `content_digest`, and for the signature.
    """
    path = folder / RELEASE_NAME
    try:
        return parse_release(read_statement(path))
    except FileNotFoundError:
        raise RepositoryError(f"{folder} is no version: it has no {RELEASE_NAME}") from None
    except (OSError, ValueError) as exc:
        raise RepositoryError(
            f"{path} is not what `specpipe publish` writes: {reason(exc)}"
        ) from exc


def read_statement(path: Path) -> bytes:
    """Reads a `release.json`; OSError or ValueError says why it cannot be read."""
    return read_bytes(path, max_bytes=_MAX_BYTES)


def parse_release(statement: bytes) -> Release:
    """Returns what a `release.json` says; ValueError for what no specpipe wrote."""
    data = parse_object(statement)
    if (found := data.pop("format", None)) != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT}" if found else "it has no format")
    return _RELEASES.validate_python(data)


def content_digest(folder: Path) -> str:
    """Returns the digest of a version's folder as it is now; hashes all of it."""
    return digest_of(record_files(folder))


def digest_of(files: Mapping[str, HasDigest]) -> str:
    """Returns the digest of a version with these files, whatever its number and its signature."""
    return repository_digest(
        {
            name: record
            for name, record in files.items()
            if name not in (RELEASE_NAME, SIGNATURE_NAME)
        }
    )


def requirement_faults(requires: Mapping[str, Any]) -> list[str]:
    """Returns what keeps this machine from serving a version, a sentence each.

    requires  as in `release.json` and in a store's record, which anybody may have written
    """
    try:
        needed = _REQUIREMENTS.validate_python(requires)
    except ValueError as exc:
        return [f"what it needs cannot be read: {reason(exc)}"]
    return list(requirements.faults(needed, gpus_here()))
