"""The folder of a version: the repository as built, and all that is known of it.

release.json                 which version it is (release_file.py)
model_repo/                  the Triton repository; its files are links to those of the build
model_repo.manifest.json     what it was packaged from
pair.yaml, pair.lock         the YAML, and the lock where there is one
verification.json, results/  what was proved and measured of this very repository, as far as it was
attestations/                where it comes from, what was proved and measured (statements.py)
bom.cdx.json                 its bill of materials (bom.py)
licenses/draft, /target      the licence files of both checkpoints

The digest covers all but release.json, and so depends on neither number nor time.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from specpipe.build import cache
from specpipe.build.lock import lock_path
from specpipe.build.lock import read as read_lock
from specpipe.build.quality.report import REPORT_JSON
from specpipe.checkpoints.licences import Licences, find_licences, read_licence
from specpipe.config.sections import PipelineConfig
from specpipe.errors import RepositoryError, show
from specpipe.evaluate.nightly.record import NIGHTLY_KIND, Run, read_last_good
from specpipe.evaluate.results import read_result
from specpipe.evaluate.verification.record import VERIFY_KIND, repository_digest
from specpipe.machine.artifacts import Artifacts, ResultName
from specpipe.machine.libraries import require_installed
from specpipe.machine.manifest import (
    FileRecord,
    Files,
    InputRecord,
    Manifest,
    manifest_path,
    record_files,
)
from specpipe.machine.own_json import write_object
from specpipe.machine.signals import deferred
from specpipe.release import statements
from specpipe.release.bom import bill_of_materials
from specpipe.release.built import BuiltPair, check_publishable, read_built
from specpipe.release.documents import QUALITY_RESULT
from specpipe.release.release_file import Release, content_digest
from specpipe.roles import ROLES, Role
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.repository_layout import link_file
from specpipe.runtimes.requirements import Requirements
from specpipe.runtimes.runtime import load_runtime
from specpipe.version import __version__

STATEMENTS = "attestations"
BOM_NAME = "bom.cdx.json"
_NIGHTLY_RESULTS: tuple[ResultName, ...] = ("nightly", "nightly-bench")


def assemble(
    config: PipelineConfig,
    number: int,
    folder: Path,
    *,
    previous: int | None = None,
    published_at: str | None = None,
) -> Release:
    """Makes the folder of a version of what was built, whole or not at all.

    published_at  UTC, ISO 8601; None: now. Raises RepositoryError where there is nothing that may
    be published, and where the folder is there already.
    """
    require_installed("publishing", "cyclonedx", extra="release")
    if folder.exists():
        raise RepositoryError(f"{folder} is there already: a version is never changed")
    check_publishable(config)
    built = read_built(config)
    licences = {
        role: find_licences(role, checkpoint.name, checkpoint.folder)
        for role, checkpoint in built.checkpoints.items()
    }
    notes = [note for role in ROLES for note in licences[role].notes]
    staging = folder.with_name(f".{folder.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        _link_repository(built, staging)
        notes += _copy_records(built, staging)
        _copy_licences(licences, staging)
        _write_statements(built, staging)
        bom = bill_of_materials(
            built, licences, read_results(staging), read_night(staging), content_digest(staging)
        )
        (staging / BOM_NAME).write_text(bom, encoding="utf-8")
        release = Release(
            pair=config.name,
            number=number,
            digest=content_digest(staging),
            requires=_requirements(built),
            published_at=published_at or datetime.now(timezone.utc).isoformat(timespec="seconds"),
            specpipe=__version__,
            previous=previous,
            notes=tuple(notes),
        )
        release.write(staging)
        with deferred():
            staging.rename(folder)
    finally:
        with deferred():
            shutil.rmtree(staging, ignore_errors=True)
    cache.check_integrity(built.repository)  # notes that links to its files were made
    return release


def _link_repository(built: BuiltPair, out: Path) -> None:
    repository, outputs = built.repository, built.package.outputs
    copy = out / repository.name
    for name in outputs:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        link_file(repository / name, copy / name)
    if repository_digest(record_files(copy)) != repository_digest(outputs):
        raise RepositoryError(f"{repository} was changed while it was published: publish again")
    _portable(built).write(manifest_path(copy))


def _copy_records(built: BuiltPair, out: Path) -> list[str]:
    """Copies what says how the repository came to be; returns a note on what is not about it."""
    config, artifacts = built.config, built.config.artifacts
    _copy(config.source, out / "pair.yaml")
    _copy(lock_path(config), out / "pair.lock")
    _copy(artifacts.verification, out / artifacts.verification.name)
    results = Artifacts(out)
    if built.has_quality:
        _copy(artifacts.quality / REPORT_JSON, out / QUALITY_RESULT)
    nightly = artifacts.result("nightly")
    if not nightly.exists():
        return []
    run = read_result(nightly, NIGHTLY_KIND)
    if run.get("repository") != repository_digest(built.package.outputs):
        return [f"the last good nightly run, of {show(run.get('made_at'))}, is of another build"]
    for name in _NIGHTLY_RESULTS:
        _copy(artifacts.result(name), results.result(name))
    return []


def _write_statements(built: BuiltPair, out: Path) -> None:
    lock = out / "pair.lock"
    found = (read_lock(lock), record_files(lock)["."].sha256) if lock.exists() else None
    results, subject = read_results(out), built.package.outputs
    made = {
        "provenance": statements.provenance(built, found),
        "acceptance": statements.acceptance(subject, results.get("verification"), read_night(out)),
    }
    if "verification" in results:
        made["verification"] = statements.verification(subject, results["verification"])
    if "nightly-bench" in results:
        made["bench"] = statements.bench(subject, results["nightly-bench"])
    (out / STATEMENTS).mkdir()
    for name, found_statement in made.items():
        if found_statement is not None:
            write_object(out / STATEMENTS / f"{name}.json", found_statement)


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns what was proved and measured, by the names of the files in a version's folder."""
    artifacts = Artifacts(folder)
    kinds = {
        "verification": (artifacts.verification, VERIFY_KIND),
        "nightly": (artifacts.result("nightly"), NIGHTLY_KIND),
        "nightly-bench": (artifacts.result("nightly-bench"), "bench"),
    }
    return {name: read_result(path, kind) for name, (path, kind) in kinds.items() if path.exists()}


def read_night(folder: Path) -> Run | None:
    """Returns the night of a version that is being made."""
    return read_last_good(Artifacts(folder).result("nightly"))


def _copy(source: Path, destination: Path) -> None:
    """Copies a small file where it is there: its own may be written over later."""
    if source.is_file():
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, destination)


def _copy_licences(licences: Mapping[Role, Licences], out: Path) -> None:
    for role, found in licences.items():
        for name, path in found.files.items():
            copy = out / "licenses" / role / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(read_licence(path))


def _portable(built: BuiltPair) -> Manifest:
    """Returns the repository's manifest without what is of one machine: times, inodes, folders."""
    folder, build = built.config.artifacts_dir, built.package.build
    argv = [str(word) for word in build.get("argv", ())]
    return replace(
        built.package,
        inputs=tuple(
            InputRecord(_short(Path(read.path), folder), _timeless(read.files))
            for read in built.package.inputs
        ),
        outputs=_timeless(built.package.outputs),
        build={**build, "argv": [Path(argv[0]).name, *argv[1:]] if argv else []},
    )


def _short(path: Path, folder: Path) -> str:
    if path.is_relative_to(folder):
        return path.relative_to(folder).as_posix()
    return f"{path.parent.name}/{path.name}"


def _timeless(files: Files) -> Files:
    return {name: FileRecord(record.size, 0, record.sha256) for name, record in files.items()}


def _requirements(built: BuiltPair) -> Requirements:
    """Returns what the runtime needs of a machine, given the driver that built it."""
    drivers = [
        str(gpu["driver_version"])
        for artifact, manifest in built.manifests.items()
        if artifact.endswith("/engine")
        for gpu in manifest.build.get("gpus", ())
    ]
    runtime = load_runtime(read_pair(built.repository).runtime)
    return runtime.requirements(built.repository, driver=next(iter(drivers), None))
