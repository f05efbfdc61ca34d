"""What a built pair was made from, read back from the manifests: stages, checkpoints, files.

The manifests beside the artifacts are followed from the repository to the files that no stage
made. Each one has to be that of what the next stage read, by digest: an artifact that was built
again since is none that the repository came from.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from specpipe.build.repositories import built_repository, find_repository, outdated
from specpipe.config.sections import PipelineConfig
from specpipe.errors import RepositoryError
from specpipe.evaluate.verification.record import verification_fault
from specpipe.machine.manifest import MANIFEST_SUFFIX, FileRecord, Files, Manifest, read_manifest
from specpipe.roles import ROLES, Role

_REPOSITORY = "model_repo"
_QUALITY = "quality"
_HUB_SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})$")
"""Where huggingface_hub keeps a repository: org--name, at a commit."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read.

    name    as the YAML has it, or the hub's id where it comes from there
    folder  where it was read; it may be gone
    commit  of the hub's repository; None: it was a folder
    files   by path below the folder
    """

    role: Role
    name: str
    folder: Path
    commit: str | None
    files: Files

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True, kw_only=True)
class BuiltPair:
    """A built pair and what it was made from.

    manifests    of the stages that made it, by the artifact's path below the folder of the pair: a
                 stage after those that it reads, the repository last
    others       files that were read besides, by name and folder: calibration texts, the
                 hand-written Triton models
    has_quality  whether what quantization costs was measured of these very checkpoints
    """

    config: PipelineConfig
    manifests: Mapping[str, Manifest]
    checkpoints: Mapping[Role, Checkpoint]
    others: tuple[tuple[str, FileRecord], ...]
    has_quality: bool

    @property
    def package(self) -> Manifest:
        """The manifest of the repository."""
        return self.manifests[_REPOSITORY]

    @property
    def repository(self) -> Path:
        return self.config.artifacts.repository

    @property
    def versions(self) -> dict[str, str]:
        """Of specpipe and of each distribution that had a part in it; not what is missing."""
        found: dict[str, str] = {}
        for manifest in self.manifests.values():
            found |= {name: v for name, v in manifest.versions.items() if v != "not installed"}
        return dict(sorted(found.items()))


def check_publishable(config: PipelineConfig) -> None:
    """Hashes the repository; raises RepositoryError where it is not to be published.

    It has to be whole, what the YAML says, and neither changed since it was verified nor found at
    fault. Whether it was verified at all is for whoever publishes.
    """
    for key, url in (("store", config.release.store), ("cache", config.release.cache)):
        if url is not None and urllib.parse.urlsplit(url).password is not None:
            raise RepositoryError(
                f"release.{key} in {config.source} has a password in its URL, and the YAML is "
                "published: take it out, credentials come from the environment"
            )
    repository = find_repository(config, verify=True)
    if repository.fault is not None:
        raise RepositoryError(repository.fault)
    if (fault := verification_fault(config.artifacts_dir)) is not None:
        raise RepositoryError(fault)
    if reasons := outdated(config):
        more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        raise RepositoryError(
            f"{repository.folder} is not what {config.source} would build ({reasons[0]}{more}): "
            f"run `specpipe build --config {config.source}` again"
        )


def read_built(config: PipelineConfig) -> BuiltPair:
    """Reads what was built of a pair from its manifests; hashes nothing.

    Raises RepositoryError where nothing was built, or from artifacts that are others now.
    """
    built_repository(config)
    chain = _Chain(config)
    chain.follow(_REPOSITORY)
    manifests = dict(chain.manifests)
    checkpoints = {role: _checkpoint(config, role, manifests, chain) for role in ROLES}
    folders = [checkpoint.folder for checkpoint in checkpoints.values()]
    others = {
        path: (label, record)
        for manifest in manifests.values()
        for path, label, record in chain.read_by(manifest)
        if not any(path.is_relative_to(folder) for folder in folders)
    }
    return BuiltPair(
        config=config,
        manifests=manifests,
        checkpoints=checkpoints,
        others=tuple(others.values()),
        has_quality=_has_quality(config, chain),
    )


class _Chain:
    """Follows manifests from an artifact to what it was made from."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._folder = config.artifacts_dir
        self.manifests: dict[str, Manifest] = {}

    def follow(self, artifact: str) -> None:
        """Notes an artifact after all that it was made from."""
        manifest = read_manifest(self._folder / artifact)
        if manifest is None:
            raise self._fault(artifact, "is gone, or its manifest cannot be read")
        for read in manifest.inputs:
            if (below := self._below(read.path)) is None:
                continue
            made = self._artifact_of(below)
            if made not in self.manifests:
                self.follow(made)
            outputs = self.manifests[made].outputs
            root = PurePosixPath(below).relative_to(made)
            for name, record in read.files.items():
                built = outputs.get(root.as_posix() if name == "." else (root / name).as_posix())
                if built is None or built.sha256 != record.sha256:
                    raise self._fault(made, f"was built again since {artifact} was made from it")
        self.manifests[artifact] = manifest

    def read_by(self, manifest: Manifest) -> Iterator[tuple[Path, str, FileRecord]]:
        """Yields the files that a stage read and no stage made: path, short name, record."""
        for read in manifest.inputs:
            root = Path(read.path)
            if self._below(read.path) is None:
                for name, record in read.files.items():
                    path, above = (root, root.parent) if name == "." else (root / name, root)
                    yield path, f"{above.name}/{path.relative_to(above).as_posix()}", record

    def _below(self, path: str) -> str | None:
        """Returns where an input lies in the folder of the pair, which may have been moved."""
        if Path(path).is_relative_to(self._folder):
            return Path(path).relative_to(self._folder).as_posix()
        _, moved, below = path.rpartition(f"/{self._config.name}/")
        # No stage reads the repository: that is a checkout's, whose folder has the pair's name.
        return below if moved and self._made(below) not in (None, _REPOSITORY) else None

    def _artifact_of(self, below: str) -> str:
        made = self._made(below)
        if made is None:
            raise self._fault(below, "is gone, or its manifest cannot be read")
        return made

    def _made(self, below: str) -> str | None:
        """Returns the artifact that a path is, or is in."""
        path = PurePosixPath(below)
        for candidate in (path, *path.parents):
            name = candidate.as_posix()
            if name != "." and (self._folder / f"{name}{MANIFEST_SUFFIX}").is_file():
                return name
        return None

    def _fault(self, artifact: str, what: str) -> RepositoryError:
        return RepositoryError(
            f"{self._folder / artifact} {what}: run `specpipe build --config "
            f"{self._config.source}` again"
        )


def _checkpoint(
    config: PipelineConfig, role: Role, manifests: Mapping[str, Manifest], chain: _Chain
) -> Checkpoint:
    own = [
        path
        for manifest in manifests.values()
        if manifest.stage.startswith(f"{role}/")
        for path, _, _ in chain.read_by(manifest)
    ]
    folder = next((path.parent for path in own if path.name == "config.json"), None)
    if folder is None:
        raise RepositoryError(
            f"the manifests in {config.artifacts_dir} name no checkpoint of the {role}: run "
            f"`specpipe build --config {config.source}` again"
        )
    files = {
        path.relative_to(folder).as_posix(): record
        for manifest in manifests.values()
        for path, _, record in chain.read_by(manifest)
        if path.is_relative_to(folder)
    }
    snapshot = _HUB_SNAPSHOT.search(str(folder))
    return Checkpoint(
        role=role,
        name=getattr(config, role).checkpoint
        if snapshot is None
        else snapshot[1].replace("--", "/", 1),
        folder=folder,
        commit=None if snapshot is None else snapshot[2],
        files=dict(sorted(files.items())),
    )


def _has_quality(config: PipelineConfig, chain: _Chain) -> bool:
    """Returns whether the report on quality is about what the repository was made from."""
    if read_manifest(config.artifacts.quality) is None:
        return False
    try:
        chain.follow(_QUALITY)
    except RepositoryError:
        return False
    return True
