"""`verification.json`: what was verified, what came of it, and whether that is still what is there.

An artifact without one is served: verifying takes a GPU and minutes, and is the user's act. One
that was verified once stays under its verdict: a fault is not served, and neither is what was
changed since, a new build included, until it is verified again or the user says otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from specpipe.checkpoints.files import quoted
from specpipe.errors import RepositoryError
from specpipe.evaluate.results import read_result, write_result
from specpipe.machine.artifacts import Artifacts
from specpipe.machine.manifest import FileRecord, Files, compare_files, read_manifest, record_files
from specpipe.machine.own_json import reason

VERIFY_KIND = "verify"

_FILES = TypeAdapter(dict[str, FileRecord])


def write(artifacts_dir: Path, data: Mapping[str, Any], files: Files) -> Path:
    """Writes the result of a verification beside the repository, whose files it is about."""
    path = Artifacts(artifacts_dir).verification
    repository = {
        "digest": repository_digest(files),
        "files": {name: asdict(record) for name, record in files.items()},
    }
    write_result(path, {**data, "repository": repository})
    return path


def record_repository(artifacts_dir: Path) -> Files:
    """Hashes every file of the repository; to be done before it is verified."""
    return record_files(Artifacts(artifacts_dir).repository)


class HasDigest(Protocol):
    """A file of which the SHA-256 is known, in hexadecimal."""

    @property
    def sha256(self) -> str: ...


def repository_digest(files: Mapping[str, HasDigest]) -> str:
    """Returns one SHA-256 over the names and contents of all files."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name].sha256}\n".encode())
    return digest.hexdigest()


def read(artifacts_dir: Path) -> dict[str, Any] | None:
    """Reads the result; None where nothing was verified, RepositoryError where it is damaged."""
    path = Artifacts(artifacts_dir).verification
    if not path.exists():
        return None
    data = read_result(path, VERIFY_KIND)
    try:
        if data["reason"] is None and data["verdict"] not in ("identical", "tie"):
            raise ValueError(f"its verdict is {quoted(data['verdict'])}")
        _recorded_files(data)
    except (KeyError, TypeError, ValueError) as exc:
        raise RepositoryError(
            f"{path} is not what `specpipe verify` writes ({reason(exc)}): run it again"
        ) from exc
    return data


def changes(artifacts_dir: Path) -> list[str]:
    """Returns how the repository differs from the one that was verified, a phrase for each file.

    A file that is untouched since it was recorded, here or in the manifest, is not read.
    """
    data = read(artifacts_dir)
    if data is None:
        return []
    repository = Artifacts(artifacts_dir).repository
    recorded = _recorded_files(data)
    manifest = read_manifest(repository)
    for name, built in ({} if manifest is None else manifest.outputs).items():
        # The manifest of a repository that was moved tells what its files are now.
        if name in recorded and recorded[name].sha256 == built.sha256:
            recorded[name] = built
    compared = compare_files(repository, recorded, trust_times=True)
    return [f"{name} {change}" for name, change in compared.differences.items()]


def verification_fault(artifacts_dir: Path) -> str | None:
    """Returns why an artifact is not to be served, as a sentence; None where it may be."""
    try:
        data = read(artifacts_dir)
        if data is None:
            return None
        changed = changes(artifacts_dir)
    except RepositoryError as exc:
        return str(exc)
    name = data.get("pair", artifacts_dir.name)
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return (
            f"{name} was changed since it was verified ({changed[0]}{more}): run `specpipe verify` "
            "again"
        )
    if data["reason"] is not None:
        return f"{name} did not pass its verification: {data['reason']}"
    return None


def _recorded_files(data: Mapping[str, Any]) -> dict[str, FileRecord]:
    return _FILES.validate_python(data["repository"]["files"])
