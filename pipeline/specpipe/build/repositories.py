"""What was built of a pair, found and held against its manifests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specpipe.build import cache
from specpipe.build.execution import preview
from specpipe.build.planning import Plan, plan
from specpipe.config.sections import PipelineConfig
from specpipe.errors import RepositoryError
from specpipe.machine.manifest import MANIFEST_SUFFIX, Hashed, read_anew

_LISTED = 8  # files that a fault names; the others are counted. A guess at what is read.


@dataclass(frozen=True)
class BuiltRepository:
    """A Triton repository, held against its manifest.

    fault  why it is not what was built, as a sentence; None: it is
    """

    folder: Path
    fault: str | None
    hashed: Hashed


def find_repository(config: PipelineConfig, *, verify: bool = False) -> BuiltRepository:
    """Returns the Triton repository of a pair; raises RepositoryError where none was built.

    A file that is untouched since it was packaged is not read, unless `verify` asks for all.
    """
    folder = config.artifacts.repository
    if not folder.is_dir():
        why = "does not exist"
        if cache.old_artifact(folder).is_dir():
            why = "is missing, since a build was killed while it replaced it"
        raise RepositoryError(
            f"{folder} {why}: run `specpipe build --config {config.source}` first"
        )
    if verify:
        read_anew()
    integrity = cache.check_integrity(folder, verify=verify)
    return BuiltRepository(
        folder, _damage_fault(config, folder, integrity.damage), integrity.hashed
    )


def _damage_fault(config: PipelineConfig, folder: Path, damage: Sequence[str]) -> str | None:
    if not damage:
        return None
    listed = "; ".join(damage[:_LISTED])
    more = f"; and {len(damage) - _LISTED} more" if len(damage) > _LISTED else ""
    return (
        f"{folder} is not what was built: {listed}{more}: run "
        f"`specpipe build --config {config.source}` again"
    )


def built_repository(config: PipelineConfig) -> Path:
    """Returns the Triton repository of a pair; raises RepositoryError for one that is not whole."""
    repository = find_repository(config)
    if repository.fault is not None:
        raise RepositoryError(repository.fault)
    return repository.folder


def check_artifacts(config: PipelineConfig) -> Hashed:
    """Hashes a built pair all the way back; raises RepositoryError where a file was changed.

    Every artifact that is there is held against its manifest, and what the manifests say that it
    was made from against what is there now: engines, checkpoints, tokenizer. Inputs that are gone
    are nothing to compare with.
    """
    repository = find_repository(config, verify=True)
    if repository.fault is not None:
        raise RepositoryError(repository.fault)
    total = repository.hashed
    for manifest in sorted(config.artifacts_dir.glob(f"*/*{MANIFEST_SUFFIX}")):
        artifact = manifest.with_name(manifest.name.removesuffix(MANIFEST_SUFFIX))
        if artifact.is_dir():
            integrity = cache.check_integrity(artifact, verify=True)
            total += integrity.hashed
            if (fault := _damage_fault(config, artifact, integrity.damage)) is not None:
                raise RepositoryError(fault)
    for planned in _local_plan(config):
        integrity = cache.changed_inputs(planned.stage, planned.artifact)
        total += integrity.hashed
        if integrity.damage:
            more = f" and {len(integrity.damage) - 1} more" if len(integrity.damage) > 1 else ""
            raise RepositoryError(
                f"{planned.artifact} was made from other files than those of today: "
                f"{integrity.damage[0]}{more}: run `specpipe build --config {config.source}` again"
            )
    return total


def outdated(config: PipelineConfig) -> list[str]:
    """Returns what a build would do now, as sentences, where that is known without the hub.

    Serving needs no checkpoint: where one is gone, there is nothing to compare with.
    """
    reports = preview(_local_plan(config))
    return [f"{report.stage}: {reason}" for report in reports for reason in report.reasons]


def _local_plan(config: PipelineConfig) -> Plan:
    """Returns the stages where both checkpoints are folders that are there; else none."""
    folders = [config.base_dir / side.checkpoint for side in (config.draft, config.target)]
    return plan(config) if all(folder.is_dir() for folder in folders) else ()
