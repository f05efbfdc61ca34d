"""What a folder of artifacts holds: its build, its engines, and what was measured of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specpipe.build.quality.report import REPORT_JSON
from specpipe.errors import RepositoryError
from specpipe.evaluate.results import read_result
from specpipe.evaluate.verification import record
from specpipe.machine.artifacts import Artifacts
from specpipe.machine.manifest import MANIFEST_SUFFIX, Manifest, read_manifest
from specpipe.machine.own_json import read_object, reason
from specpipe.roles import ROLES, Role
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION

Json = Mapping[str, Any]

_YAML = (".yaml", ".yml")
_HUB_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})")


@dataclass(frozen=True)
class BuiltArtifact:
    """One artifact of the build; `path` is relative to the folder of all."""

    path: str
    manifest: Manifest

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.manifest.outputs.values())


@dataclass(frozen=True)
class SourceCheckpoint:
    """The checkpoint that a model was built from: a folder, or a hub id at a commit."""

    path: str
    size_bytes: int

    @property
    def name(self) -> str:
        snapshot = _HUB_SNAPSHOT.search(self.path)
        return self.path if snapshot is None else f"{snapshot[1]}/{snapshot[2]}"

    @property
    def commit(self) -> str | None:
        snapshot = _HUB_SNAPSHOT.search(self.path)
        return None if snapshot is None else snapshot[3]


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """Everything that a report shows.

    built         in the order of the build
    runtime       its name; options are those of the pair as it is served
    engines       the config.json of each engine
    verification  None where nothing was verified; the other results likewise
    changed       what of the repository is not as it was verified, a phrase for each file
    """

    folder: Path
    name: str
    built: tuple[BuiltArtifact, ...]
    runtime: str
    options: Json
    engines: Mapping[Role, Json]
    verification: Json | None = None
    changed: tuple[str, ...] = ()
    bench: Json | None = None
    tune: Json | None = None
    quality: Json | None = None
    sources: Mapping[Role, SourceCheckpoint] = field(default_factory=dict)

    @property
    def packaged_at(self) -> str | None:
        """When the repository was built, in ISO 8601."""
        for built in self.built:
            if built.path == Artifacts(self.folder).repository.name:
                return str(built.manifest.build.get("built_at"))
        return None

    @property
    def config(self) -> str:
        """The YAML that it was built from, as the command line of the build named it.

        That of `specpipe nightly` may name several.
        """
        for built in reversed(self.built):
            argv = [str(word) for word in built.manifest.build.get("argv", ())]
            named = [
                word
                for before, word in zip(argv, argv[1:], strict=False)
                if before == "--config" or ("nightly" in argv and word.endswith(_YAML))
            ]
            if len(named) == 1:
                return named[0]
        return "CONFIG.yaml"

    def command(self, name: str) -> str:
        """Returns the command that makes a missing part."""
        return f"specpipe {name} --config {shlex.quote(self.config)}"

    def is_older_than_repository(self, result: Json) -> bool:
        """Returns whether a result is that of an earlier build of the repository."""
        return self.packaged_at is not None and str(result["made_at"]) < self.packaged_at


def own_draft(tune: Json) -> Json:
    """Returns what tuning measured of the pair's own draft."""
    own: Json = next(draft for draft in tune["drafts"] if draft["is_own"])
    return own


def read_artifact(folder: Path) -> Artifact:
    """Reads a folder; RepositoryError where it holds no built pair, or a damaged result."""
    artifacts = Artifacts(folder)
    repository = artifacts.repository
    try:
        pair = read_pair(repository)
    except RepositoryError as exc:
        raise RepositoryError(
            f"{folder} has no built pair in it ({exc}): give the folder of one, such as "
            "engines/NAME, or run `specpipe build` first"
        ) from exc
    built = _read_manifests(folder)
    return Artifact(
        folder=folder,
        name=folder.resolve().name,
        built=built,
        runtime=pair.runtime,
        options=asdict(pair.options),
        engines={role: _read_engine(repository, role) for role in ROLES},
        verification=record.read(folder),
        changed=tuple(record.changes(folder)),
        bench=_read_bench(artifacts),
        tune=_read_if_there(artifacts.result("tune"), "tune"),
        quality=_read_quality(artifacts.quality / REPORT_JSON),
        sources=_sources(built),
    )


def _read_if_there(path: Path, kind: str) -> Json | None:
    return read_result(path, kind) if path.exists() else None


def _read_bench(artifacts: Artifacts) -> Json | None:
    """The newer one of `specpipe bench` and of the last nightly run."""
    results = [
        _read_if_there(artifacts.result("bench"), "bench"),
        _read_if_there(artifacts.result("nightly-bench"), "bench"),
    ]
    existing = [result for result in results if result is not None]
    return max(existing, key=lambda result: str(result.get("made_at")), default=None)


def _read_quality(path: Path) -> Json | None:
    if not path.exists():
        return None
    try:
        return read_object(path)
    except (OSError, ValueError) as exc:
        raise RepositoryError(f"{path} cannot be read ({reason(exc)}): build again") from exc


def _read_engine(repository: Path, role: Role) -> Json:
    """Returns the config of an engine; {} where a runtime leaves none that can be read."""
    try:
        return read_object(repository / SPECULATIVE / VERSION / role / "config.json")
    except (OSError, ValueError):
        return {}


def _read_manifests(folder: Path) -> tuple[BuiltArtifact, ...]:
    """All manifests that can be read, each after those that it was made from."""
    manifests = {}
    name = f"*{MANIFEST_SUFFIX}"
    for path in sorted(folder.glob(name)) + sorted(folder.glob(f"*/{name}")):
        artifact = path.with_name(path.name.removesuffix(MANIFEST_SUFFIX))
        manifest = read_manifest(artifact)
        if manifest is not None and artifact.is_dir():
            manifests[artifact.relative_to(folder).as_posix()] = manifest

    def depth(name: str, above: tuple[str, ...] = ()) -> int:
        made_from = [other for other in _inputs_among(manifests, name) if other not in above]
        return 1 + max((depth(other, (*above, name)) for other in made_from), default=-1)

    return tuple(
        BuiltArtifact(name, manifests[name])
        for name in sorted(manifests, key=lambda n: (depth(n), n))
    )


def _inputs_among(manifests: Mapping[str, Manifest], name: str) -> list[str]:
    """Returns which artifacts one was built from; the folder may have been moved since."""
    paths = [f"{read.path}/" for read in manifests[name].inputs]
    return [o for o in manifests if o != name and any(f"/{o}/" in path for path in paths)]


def _sources(built: Sequence[BuiltArtifact]) -> dict[Role, SourceCheckpoint]:
    """Returns the checkpoints: what the first artifact of each role read that no stage made."""
    sources: dict[Role, SourceCheckpoint] = {}
    for role in ROLES:
        first = next((b for b in built if b.path.startswith(f"{role}/")), None)
        sizes: dict[str, int] = {}
        for read in () if first is None else first.manifest.inputs:
            if any(f"/{b.path}/" in f"{read.path}/" for b in built):
                continue
            folder = str(Path(read.path).parent) if "." in read.files else read.path
            size = sum(file.size for file in read.files.values())
            sizes[folder] = sizes.get(folder, 0) + size
        if sizes:
            folder = next(iter(sizes))
            sources[role] = SourceCheckpoint(folder, sizes[folder])
    return sources
