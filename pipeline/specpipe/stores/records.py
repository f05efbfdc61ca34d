"""What a store's documents may say, and what is refused: they were written by whoever can write.

Each is JSON of a bounded size; names of files stay below the folder that they are put into.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from specpipe.errors import StoreError, show
from specpipe.machine.own_json import reason
from specpipe.stores.store import Blob, Promotion, VersionRecord

MAX_BYTES = 16 << 20  # of a document; a version of a thousand files has some 150,000
MAX_NUMBER = 999_999
MAX_FILES = 50_000
_MAX_FILE_BYTES = 1 << 44  # 16 TiB
_MAX_PATH = 1024  # characters of a file's name, folders included
_PAIR = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", re.ASCII)
_PART = re.compile(r"[^/\\\x00-\x1f\x7f]{1,200}")

_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
_Number = Annotated[int, Field(ge=1, le=MAX_NUMBER, strict=True)]
_Time = Annotated[str, StringConstraints(pattern=r"^[0-9T:.+Z-]{10,40}\z")]
_Size = Annotated[int, Field(ge=0, le=_MAX_FILE_BYTES, strict=True)]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[1] = 1


class _Blob(BaseModel):
    sha256: _Sha256
    size: _Size


_Files = Annotated[dict[str, _Blob], Field(max_length=MAX_FILES)]


class _Version(_Document):
    pair: str
    number: _Number
    digest: _Sha256
    files: _Files
    requires: dict[str, Any]
    published_at: _Time


class _Promotion(_Document):
    number: _Number
    digest: _Sha256
    promoted_at: _Time
    previous: _Number | None = None


class _Artifact(_Document):
    files: _Files


def check_pair_name(pair: str) -> None:
    """Refuses what cannot be the name of a folder, or of a tag, in every store."""
    if not _PAIR.fullmatch(pair):
        raise StoreError(
            f"{show(pair)!r} cannot be published: expected a name of at most 80 letters, digits, "
            "`.`, `_` and `-`"
        )


def check_files(files: Mapping[str, Blob]) -> None:
    """Refuses names that lead out of a folder, or that one folder cannot hold together."""
    folders = {parent for name in files for parent in _folders_of(name)}
    for name in files:
        if name in folders:
            raise StoreError(f"{show(name)!r} is both a file and a folder")
        if len(name) > _MAX_PATH or any(
            part in (".", "..") or not _PART.fullmatch(part) for part in name.split("/")
        ):
            raise StoreError(f"{show(name)!r} is no name of a file below a folder")


def _folders_of(name: str) -> Iterator[str]:
    for end, character in enumerate(name):
        if character == "/":
            yield name[:end]


def below(folder: Path, files: Mapping[str, Blob]) -> dict[Path, Blob]:
    """Returns where files belong below a folder; refuses names and links that lead out of it."""
    check_files(files)
    for parent in {parent for name in files for parent in _folders_of(name)}:
        if (folder / parent).is_symlink():
            raise StoreError(f"{folder / parent} is a link: remove it, and fetch again")
    return {folder / name: blob for name, blob in files.items()}


def write_version(record: VersionRecord) -> bytes:
    """Returns the document of a version."""
    check_pair_name(record.pair)
    check_files(record.files)
    with _refusing(f"version {record.number} of {record.pair}"):
        return _as_bytes(_Version.model_validate(asdict(record)))


def parse_version(data: bytes, pair: str, number: int) -> VersionRecord:
    """Reads the document of a version; raises StoreError for what is none, or another's."""
    with _refusing(f"version {number} of {pair}"):
        found = _Version.model_validate_json(data)
        if (found.pair, found.number) != (pair, number):
            raise ValueError(f"it is version {found.number} of {show(found.pair)}")
    files = _blobs(found.files)
    check_files(files)
    return VersionRecord(
        pair=pair,
        number=number,
        digest=found.digest,
        files=files,
        requires=found.requires,
        published_at=found.published_at,
    )


def write_promotion(promotion: Promotion) -> bytes:
    """Returns the document that says which version is served."""
    with _refusing("the promotion"):
        return _as_bytes(_Promotion.model_validate(asdict(promotion)))


def parse_promotion(data: bytes, pair: str) -> Promotion:
    """Reads the document that says which version is served."""
    with _refusing(f"the promotion of {pair}"):
        found = _Promotion.model_validate_json(data)
    return Promotion(**found.model_dump(exclude={"format"}))


def write_artifact(files: Mapping[str, Blob]) -> bytes:
    """Returns the document of a stage's artifact."""
    check_files(files)
    with _refusing("the artifact"):
        return _as_bytes(
            _Artifact.model_validate({"files": {name: asdict(b) for name, b in files.items()}})
        )


def parse_artifact(data: bytes) -> dict[str, Blob]:
    """Reads the document of a stage's artifact."""
    with _refusing("an artifact"):
        files = _blobs(_Artifact.model_validate_json(data).files)
    check_files(files)
    return files


def _blobs(files: Mapping[str, _Blob]) -> dict[str, Blob]:
    return {name: Blob(blob.sha256, blob.size) for name, blob in files.items()}


def _as_bytes(document: _Document) -> bytes:
    data = document.model_dump_json(indent=1).encode() + b"\n"
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes, expected at most {MAX_BYTES}")
    return data


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    try:
        yield
    except (ValidationError, ValueError) as exc:
        raise StoreError(f"{what} is not what specpipe writes: {reason(exc)}") from None
