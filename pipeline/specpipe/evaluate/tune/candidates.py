"""Drafts to compare for one target: the pair's own, and others, built aside by the usual stages."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specpipe.build import execution, planning, repositories
from specpipe.build.execution import Reporter
from specpipe.build.load import load_config
from specpipe.build.planning import Plan
from specpipe.config.sections import PipelineConfig
from specpipe.errors import CheckpointError, ConfigError, PairingError
from specpipe.evaluate.verification.record import repository_digest
from specpipe.machine.manifest import manifest_path, read_manifest, record_files
from specpipe.runtimes.repository_layout import link_folder


@dataclass(frozen=True)
class CandidatePair:
    """A pair to measure: a draft with the target.

    checkpoint  the draft's, as it was named
    is_own      whether it is the one that the config names
    repository  where it was built; None where it cannot be paired, for the reason given
    """

    checkpoint: str
    is_own: bool
    repository: Path | None
    reason: str | None = None

    @property
    def digest(self) -> str | None:
        """SHA-256 over everything that the pair is made of."""
        if self.repository is None:
            return None
        recorded = read_manifest(self.repository)
        return repository_digest(
            record_files(self.repository) if recorded is None else recorded.outputs
        )


def own_pair(
    config: PipelineConfig, max_draft_len: int, work: Path, reporter: Reporter
) -> CandidatePair:
    """Returns the pair as it was built; builds another aside where it must draft more than that."""
    repository = repositories.built_repository(config)
    if max_draft_len > config.speculation.num_draft_tokens:
        derived = _derive(config, work / "own", [_num_draft_tokens(max_draft_len)])
        repository = _build(derived, config, ("draft/", "target/"), reporter)
    return CandidatePair(config.draft.checkpoint, is_own=True, repository=repository)


def candidate(
    checkpoint: str, config: PipelineConfig, max_draft_len: int, work: Path, reporter: Reporter
) -> CandidatePair:
    """Returns the target with another draft: a folder, from the working directory, or a hub id.

    One that cannot be paired is a finding, and no failure.
    """
    folder = Path(checkpoint).expanduser()
    draft = str(folder.resolve()) if folder.is_dir() else checkpoint
    overrides = [
        f"draft.checkpoint={json.dumps(draft)}",
        "draft.revision=null",
        _num_draft_tokens(max(max_draft_len, config.speculation.num_draft_tokens)),
    ]
    try:
        derived = _derive(config, work / _folder_name(draft), overrides)
        repository = _build(derived, config, ("target/",), reporter)
    except (PairingError, CheckpointError, ConfigError) as exc:  # the last: not by this runtime
        return CandidatePair(checkpoint, is_own=False, repository=None, reason=str(exc))
    return CandidatePair(checkpoint, is_own=False, repository=repository)


def _derive(config: PipelineConfig, work: Path, overrides: Sequence[str]) -> PipelineConfig:
    """Returns the same config, built elsewhere, with some settings of its own."""
    # The config may not be what its file says: --set had a say.
    settings = config.model_dump(mode="json", exclude_unset=True)
    kept = [f"{section}={json.dumps(value)}" for section, value in settings.items()]
    elsewhere = f"output_dir={json.dumps(str(work.resolve()))}"
    return load_config(config.source, [*kept, elsewhere, *overrides])


def _num_draft_tokens(max_draft_len: int) -> str:
    return f"speculation.num_draft_tokens={max_draft_len}"


def _folder_name(draft: str) -> str:
    """Returns a name for a draft's folder that no other draft has, even one of the same name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(draft).name)
    return f"{name}-{hashlib.sha256(draft.encode()).hexdigest()[:8]}"


def _build(
    derived: PipelineConfig, config: PipelineConfig, same: tuple[str, ...], reporter: Reporter
) -> Path:
    """Builds what differs; stages whose names begin with one of `same` are taken over if equal."""
    stages = planning.plan(derived)
    _take_over(tuple(s for s in planning.plan(config) if s.name.startswith(same)), stages)
    execution.run(stages, reporter)
    return derived.artifacts.repository


def _take_over(built: Plan, stages: Plan) -> None:
    """Links artifacts that are there already, with their manifests; a build judges them."""
    places = {stage.name: stage.artifact for stage in stages}
    for stage in built:
        artifact = places.get(stage.name)
        manifest = manifest_path(stage.artifact)
        if artifact is None or artifact.exists() or not manifest.is_file():
            continue
        artifact.parent.mkdir(parents=True, exist_ok=True)
        link_folder(stage.artifact, artifact)
        shutil.copyfile(manifest, manifest_path(artifact))
