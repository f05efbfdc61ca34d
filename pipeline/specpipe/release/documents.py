"""The small documents of a version that say what it is, without its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from specpipe.build.lock import lock_path
from specpipe.build.lock import read as read_lock
from specpipe.build.quality.report import REPORT_JSON, QualityReport
from specpipe.config.sections import PipelineConfig
from specpipe.errors import RepositoryError, show
from specpipe.evaluate.nightly.record import NIGHTLY_KIND, Run, read_last_good
from specpipe.evaluate.results import read_result
from specpipe.evaluate.verification import record
from specpipe.machine.artifacts import Artifacts
from specpipe.machine.manifest import Files, manifest_path, read_manifest, record_files
from specpipe.machine.own_json import read_object, reason
from specpipe.release import statements
from specpipe.release.built import read_built
from specpipe.release.release_file import NIGHTLY_NAME
from specpipe.roles import ROLES

BUILT = "built"
"""What `specpipe diff` calls what is built now."""

_MAX_DIGITS = 9  # of a number of a version

PROVENANCE = "attestations/provenance.json"
QUALITY_RESULT = "results/quality.json"
DOCUMENTS = (
    PROVENANCE,
    QUALITY_RESULT,
    "model_repo.manifest.json",
    "verification.json",
    NIGHTLY_NAME,
)
"""What `read_documents` reads, by path below a version's folder: all else need not be there."""

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Dependency:
    """Something that was read or used: a file, a commit, a library, an image."""

    name: str
    uri: str | None = None
    digest: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Documents:
    """What is known of a version, or of what is built now; None: it was not looked at.

    name          what messages call it
    settings      the YAML, resolved
    dependencies  all that it was made from and with
    sizes         bytes of both engines and of the repository
    """

    name: str
    settings: Json
    dependencies: tuple[Dependency, ...]
    gpus: tuple[Mapping[str, str], ...]
    sizes: Mapping[str, int]
    verification: Json | None = None
    night: Run | None = None
    quality: QualityReport | None = None


def read_documents(folder: Path, name: str) -> Documents:
    """Reads the documents of a version; raises RepositoryError where they are not whole."""
    path = folder / PROVENANCE
    try:
        statement = read_object(path)
    except FileNotFoundError:
        raise RepositoryError(
            f"{name} is no version: {folder} has no {PROVENANCE}; give a version's number, its "
            "folder, or `built`"
        ) from None
    except (OSError, ValueError) as exc:
        raise RepositoryError(f"{path} cannot be read: {reason(exc)}") from exc
    manifest = read_manifest(folder / "model_repo")
    if manifest is None:
        raise RepositoryError(f"{manifest_path(folder / 'model_repo')} cannot be read")
    artifacts = Artifacts(folder)
    return Documents(
        name=name,
        **_origin(statement, path),
        sizes=sizes(manifest.outputs),
        verification=record.read(folder),
        night=read_last_good(artifacts.result("nightly")),
        quality=_quality(folder / QUALITY_RESULT),
    )


def built_documents(config: PipelineConfig) -> Documents:
    """Returns the documents that a version of what is built now would have."""
    built = read_built(config)
    path = lock_path(config)
    lock = (read_lock(path), record_files(path)["."].sha256) if path.is_file() else None
    digest = record.repository_digest(built.package.outputs)
    verification = record.read(config.artifacts_dir)
    if verification is not None and verification["repository"].get("digest") != digest:
        verification = None
    return Documents(
        name=BUILT,
        **_origin(statements.provenance(built, lock), config.source),
        sizes=sizes(built.package.outputs),
        verification=verification,
        night=night_of(config, digest),
        quality=_quality(config.artifacts.quality / REPORT_JSON) if built.has_quality else None,
    )


def night_of(config: PipelineConfig, digest: str) -> Run | None:
    """Returns the last good night of a pair, where it was of the repository with that digest."""
    path = config.artifacts.result("nightly")
    if not path.exists() or read_result(path, NIGHTLY_KIND).get("repository") != digest:
        return None
    return read_last_good(path)


def sizes(files: Files) -> dict[str, int]:
    """Returns the bytes of both engines and of the repository, which holds them."""
    found = {
        f"{role} engine": sum(
            file.size for name, file in files.items() if role in PurePosixPath(name).parts
        )
        for role in ROLES
    }
    return {**found, "repository": sum(file.size for file in files.values())}


_DEPENDENCIES = TypeAdapter(tuple[Dependency, ...])
_SETTINGS = TypeAdapter(dict[str, Any])
_GPUS = TypeAdapter(tuple[dict[str, str], ...])


def _origin(statement: Json, path: Path) -> dict[str, Any]:
    try:
        definition = statement["predicate"]["buildDefinition"]
        return {
            "settings": _SETTINGS.validate_python(definition["externalParameters"]["config"]),
            "dependencies": _DEPENDENCIES.validate_python(definition["resolvedDependencies"]),
            "gpus": _GPUS.validate_python(definition["internalParameters"]["gpus"]),
        }
    except (KeyError, TypeError, ValidationError) as exc:
        raise RepositoryError(
            f"{path} is no provenance that specpipe wrote: {show(reason(exc))}"
        ) from exc


def _quality(path: Path) -> QualityReport | None:
    if not path.exists():
        return None
    try:
        read_object(path)  # bounded, and an object
        return QualityReport.read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RepositoryError(f"{path} is no report on quality: {show(reason(exc))}") from exc


Fetch = Callable[[int, Path], None]
"""Brings those of `DOCUMENTS` that a published version has into a folder."""


def find_documents(config: PipelineConfig, wanted: str, fetch: Fetch) -> Documents:
    """Returns what is known of a version: by its number, by its folder, or `built`.

    fetch  asked for a number whose version is not on this machine
    """
    if wanted == BUILT:
        return built_documents(config)
    if not wanted.isascii() or not wanted.isdecimal() or len(wanted) > _MAX_DIGITS:
        return read_documents(Path(wanted), show(wanted))
    number, name = int(wanted), f"version {int(wanted)}"
    folder = config.artifacts.versions / str(number)
    if folder.is_dir():
        return read_documents(folder, name)
    with tempfile.TemporaryDirectory() as fetched:
        fetch(number, Path(fetched))
        return read_documents(Path(fetched), name)
