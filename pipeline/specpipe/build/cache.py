"""Artifacts that are built once: why one is stale, and how one appears whole or not at all.

Beside an artifact `engine/` stands `engine.manifest.json`: what it was made from (digests of the
input files, settings, versions) and what it consists of. An artifact is stale exactly when one of
these differs; a file that was touched, copied or fetched again is hashed, noted anew and causes no
build.

    .engine.lock      held while `engine/` is made; a second build waits and finds the work done
    .engine.staging/  where the stage writes; changes places with `engine/` when it is whole
    .engine.old/      the artifact that is being replaced, where the file system can only rename:
                      lives for two renames, between which there is no `engine/`

    .engine.pending   the manifest of what is in `.engine.staging/`, until it is that of `engine/`

What a killed build leaves of these is removed by the next one. At any other moment one whole
version of the artifact stands in its place, and one of the two manifests is its own.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specpipe.errors import SpecpipeError, to_sentence
from specpipe.machine import provenance
from specpipe.machine.exchange import exchange
from specpipe.machine.manifest import (
    Hashed,
    InputRecord,
    Manifest,
    compare_files,
    file_faults,
    manifest_path,
    parse_manifest,
    read_manifest,
    record_files,
    relinked,
)
from specpipe.machine.signals import deferred, thread_pool
from specpipe.stage import Stage
from specpipe.version import BUILDS_ALIKE

NOT_BUILT = "not built yet"
"""The reason of a stage whose artifact is missing, or cannot be read by this version."""

_MAX_SHOWN = 60  # characters of a value that a reason quotes

_MACHINE_FAULTS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EBUSY,
    errno.EXDEV,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EMFILE,
    errno.ENFILE,
)


def stale_reasons(
    stage: Stage, artifact: Path, *, verify: bool = False, verify_inputs: bool = False
) -> list[str]:
    """Returns sentences on why the artifact is not what the stage would make now; [] if it is.

    A file with the recorded size, times and inode counts as unchanged. `verify` asks for the
    digests of the artifact's files, `verify_inputs` for those of what it was made from. Equal files
    that had to be hashed are noted as they are now, so that they are not hashed again.
    """
    with _naming_os_faults(stage, artifact):
        comparison = _compare(stage, artifact, verify=verify, verify_inputs=verify_inputs)
        _note(artifact, comparison.recorded, comparison.current)
        return comparison.reasons


@dataclass(frozen=True)
class Integrity:
    """An artifact held against its manifest: a sentence for each file that is another one now."""

    damage: tuple[str, ...]
    hashed: Hashed


def check_integrity(artifact: Path, *, verify: bool = False) -> Integrity:
    """Returns how an artifact compares with its manifest, whatever it was made from.

    What has the recorded size, times and inode is not read, unless `verify` asks for all digests.
    """
    recorded = read_manifest(artifact)
    if recorded is not None:
        compared = compare_files(artifact, recorded.outputs, trust_times=not verify)
        if not compared.differences:
            _note(artifact, recorded, replace(recorded, outputs=compared.current))
            return Integrity((), compared.hashed)
    # A build that was killed once its artifact was there, and before its manifest was.
    unfinished = parse_manifest(_pending(artifact))
    if unfinished is not None:
        pending = compare_files(artifact, unfinished.outputs, trust_times=not verify)
        if not pending.differences:
            return Integrity((), pending.hashed)
    if recorded is None:
        name = manifest_path(artifact).name
        return Integrity((f"its manifest {name} is missing",), Hashed(0, 0, 0.0))
    return Integrity(tuple(file_faults(compared.differences)), compared.hashed)


def changed_inputs(stage: Stage, artifact: Path) -> Integrity:
    """Returns which of the files that an artifact was made from are others now; hashes them all.

    What is not there any more is passed over.
    """
    recorded = read_manifest(artifact)
    sentences, total = [], Hashed(0, 0, 0.0)
    for root, old in _pair_up(stage.inputs().files, () if recorded is None else recorded.inputs):
        if root is None or old is None or not root.exists():
            continue
        compared = compare_files(root, old.files, trust_times=False)
        total += compared.hashed
        sentences += [
            f"{root / name} {change} since {stage.name} read it"
            for name, change in compared.differences.items()
        ]
    return Integrity(tuple(sentences), total)


Fetch = Callable[[Sequence[InputRecord], Path], Mapping[str, Any] | None]
"""Brings an artifact into an empty folder instead of making it of these inputs; returns what the
record of its build says, None where it leaves the folder empty."""


@dataclass(frozen=True)
class BuildResult:
    """What `build` did: nothing where there are no reasons."""

    reasons: tuple[str, ...]
    duration_s: float
    was_fetched: bool = False


def build(
    stage: Stage,
    artifact: Path,
    *,
    verify: bool = False,
    verify_inputs: bool = False,
    on_start: Callable[[list[str]], None] = lambda reasons: None,
    on_wait: Callable[[], None] = lambda: None,
    fetch: Fetch | None = None,
) -> BuildResult:
    """Makes the artifact unless it is there already; what is hashed as in `stale_reasons`.

    on_start gets the reasons before the stage runs; on_wait is called when another build of this
    artifact has to finish first; fetch is tried before the stage is run.
    """
    with _naming_os_faults(stage, artifact):
        comparison = _compare(stage, artifact, verify=verify, verify_inputs=verify_inputs)
        if not comparison.reasons:
            _note(artifact, comparison.recorded, comparison.current)
            return BuildResult((), 0.0)
        artifact.parent.mkdir(parents=True, exist_ok=True)
        with locked(_file_lock(artifact), on_wait):
            reasons = _compare(stage, artifact, verify=verify, verify_inputs=verify_inputs).reasons
            if not reasons:
                return BuildResult((), 0.0)
            on_start(reasons)
            started = time.monotonic()
            was_fetched = _make(stage, artifact, started, fetch)
            return BuildResult(tuple(reasons), time.monotonic() - started, was_fetched)


@dataclass(frozen=True)
class _Comparison:
    reasons: list[str]
    recorded: Manifest | None = None
    current: Manifest | None = None  # `recorded` with today's paths, and what equal files are today


def _compare(stage: Stage, artifact: Path, *, verify: bool, verify_inputs: bool) -> _Comparison:
    recorded = read_manifest(artifact)
    if recorded is None or not artifact.is_dir():
        return _Comparison([NOT_BUILT])
    wanted = stage.inputs()
    versions = provenance.versions(wanted.libraries)
    builder = recorded.versions.get("specpipe")
    if {builder, versions["specpipe"]} <= BUILDS_ALIKE:
        versions["specpipe"] = str(builder)
    reasons = _value_reasons(recorded.versions, versions)
    reasons += _value_reasons(recorded.settings, _as_json(wanted.settings))
    inputs = []
    for root, old in _pair_up(wanted.files, recorded.inputs):
        if root is None or old is None:
            reasons.append(f"input {root} is new" if old is None else f"input {old.path} is gone")
            continue
        path = os.path.abspath(root)
        compared = compare_files(
            root, old.files, trust_times=old.path == path and not verify_inputs
        )
        reasons += [
            f"input {root / name} {change}" for name, change in compared.differences.items()
        ]
        inputs.append(InputRecord(path, {**old.files, **compared.current}))
    compared = compare_files(artifact, recorded.outputs, trust_times=not verify)
    reasons += [f"damaged: {sentence}" for sentence in file_faults(compared.differences)]
    if len(inputs) < len(recorded.inputs):
        return _Comparison(reasons)
    outputs = {**recorded.outputs, **compared.current}
    current = replace(recorded, inputs=tuple(inputs), outputs=outputs)
    return _Comparison(reasons, recorded, current)


def _pair_up(
    roots: Sequence[Path], recorded: Sequence[InputRecord]
) -> Iterator[tuple[Path | None, InputRecord | None]]:
    """Yields pairs of inputs in order, since the place of an input says what it is for.

    Where their number changed, the artifact is stale anyhow; then paths say best what came or went.
    """
    if len(roots) == len(recorded):
        yield from zip(roots, recorded, strict=True)
        return
    by_path = {old.path: old for old in recorded}
    for root in roots:
        yield root, by_path.pop(os.path.abspath(root), None)
    for old in by_path.values():
        yield None, old


def _value_reasons(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns which values changed; a nested mapping counts as settings with dotted names."""
    was, now = dict(_leaves(old)), dict(_leaves(new))
    reasons = []
    for key in [*now, *(key for key in was if key not in now)]:
        before, after = was.get(key, "not set"), now.get(key, "not set")
        if before != after:
            is_long = max(len(before), len(after)) > _MAX_SHOWN
            change = "changed" if is_long else f"was {before}, is now {after}"
            reasons.append(f"{key} {change}")
    return reasons


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields dotted names and printed values; printed, since in Python True == 1 == 1.0."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as they come back from the manifest: tuples as lists, keys as strings."""
    normalised: dict[str, Any] = json.loads(json.dumps(settings))
    return normalised


def _make(stage: Stage, artifact: Path, started: float, fetch: Fetch | None) -> bool:
    """Runs the stage in a staging folder and renames that into place; the lock is held.

    Returns whether the artifact was fetched instead.
    """
    staging = artifact.with_name(f".{artifact.name}.staging")
    replaced = old_artifact(artifact)
    if replaced.is_dir() and not os.path.lexists(artifact):
        replaced.rename(artifact)
    for leftover in (staging, replaced):
        _remove(leftover)
    wanted = stage.inputs()
    with thread_pool(len(os.sched_getaffinity(0))) as pool:  # shards are hashed together
        inputs = tuple(pool.map(partial(_record_input, stage), wanted.files))
    try:
        staging.mkdir()
        try:
            fetched = None if fetch is None else fetch(inputs, staging)
            if fetched is None:
                stage.run(staging)
        except (FileNotFoundError, SpecpipeError):
            _check_unchanged(stage, wanted.files, inputs)
            raise
        _check_unchanged(stage, wanted.files, inputs)
        manifest = Manifest(
            stage=stage.name,
            inputs=inputs,
            settings=_as_json(wanted.settings),
            versions=provenance.versions(wanted.libraries),
            outputs=record_files(staging),
            build=fetched
            or {
                **provenance.describe_build(duration_s=time.monotonic() - started),
                **({"varies": wanted.varies} if wanted.varies else {}),
            },
        )
        assert manifest.outputs, f"{stage.name} made nothing"
        with deferred():
            _commit(manifest, staging, artifact)
        return fetched is not None
    finally:
        with deferred():
            _remove(staging)


def _commit(manifest: Manifest, staging: Path, artifact: Path) -> None:
    pending = _pending(artifact)
    manifest.write(pending)
    replaced = _put_in_place(staging, artifact)
    with relinked(artifact / name for name in manifest.outputs):
        # Before the manifest: once that is there, no build looks at what is left here.
        _remove(replaced)
    # What was linked into both has another time of change now.
    current = compare_files(artifact, manifest.outputs, trust_times=True).current
    replace(manifest, outputs={**manifest.outputs, **current}).write(pending)
    pending.replace(manifest_path(artifact))


def _put_in_place(staging: Path, artifact: Path) -> Path:
    """Gives a whole artifact its name; returns where the artifact is that had it."""
    replaced = old_artifact(artifact)
    if os.path.lexists(artifact):
        if exchange(staging, artifact):
            return staging
        try:
            artifact.rename(replaced)
            staging.rename(artifact)
        except BaseException:
            if not os.path.lexists(artifact):
                replaced.rename(artifact)
            raise
    else:
        staging.rename(artifact)
    return replaced


def old_artifact(artifact: Path) -> Path:
    """Returns where an artifact is that is being replaced, if the file system can only rename."""
    return artifact.with_name(f".{artifact.name}.old")


def _pending(artifact: Path) -> Path:
    return artifact.with_name(f".{artifact.name}.pending")


def _remove(path: Path) -> None:
    """Removes a folder, or the file or link that somebody put in an artifact's place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _record_input(stage: Stage, root: Path) -> InputRecord:
    if not root.exists():
        raise SpecpipeError(f"{stage.name}: input {root} does not exist")
    try:
        return InputRecord(os.path.abspath(root), record_files(root))
    except FileNotFoundError as exc:
        raise SpecpipeError(
            f"{stage.name}: input {exc.filename} vanished while it was read: build again"
        ) from exc


def _check_unchanged(stage: Stage, roots: Sequence[Path], inputs: Sequence[InputRecord]) -> None:
    """Refuses what was made while another program, or another build, wrote its inputs."""
    for root, record in zip(roots, inputs, strict=True):
        for name, change in compare_files(root, record.files, trust_times=True).differences.items():
            raise SpecpipeError(
                f"{stage.name}: input {root / name} {change} while the stage ran: build again"
            )


def _note(artifact: Path, recorded: Manifest | None, current: Manifest | None) -> None:
    """Records what equal files are today, so that they need not be hashed again."""
    if current is None or current == recorded:
        return
    # Only a shortcut is lost where another build holds the lock or the folder is read-only.
    with suppress(OSError, Timeout), _file_lock(artifact).acquire(timeout=0):
        if read_manifest(artifact) == recorded:
            current.write(manifest_path(artifact))


@contextmanager
def locked(lock: FileLock, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds a lock for the time of a `with` block; on_wait is called if another process has it."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _file_lock(artifact: Path) -> FileLock:
    return FileLock(artifact.with_name(f".{artifact.name}.lock"))


@contextmanager
def _naming_os_faults(stage: Stage, artifact: Path) -> Iterator[None]:
    """Raises one sentence for full disks, missing permissions and the like, which are no bugs."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in _MACHINE_FAULTS:
            raise
        if exc.filename is None:
            exc.filename = str(artifact)
        raise SpecpipeError(f"{stage.name}: {to_sentence(exc)}") from exc
