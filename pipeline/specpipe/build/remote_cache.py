"""Artifacts of stages that other machines made: `release.cache` of the YAML.

An artifact is found by the digest of all that decides what its stage makes: what makes a stage
stale (settings, versions, digests of its input files), the tool that it calls, and the machine, as
far as an artifact may fit only such a one. What is fetched is held against the maker's manifest.
A cache that is unreachable, damaged or full is a warning, and the stage is run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from specpipe.config.sections import PipelineConfig
from specpipe.errors import SpecpipeError, StoreError, to_sentence
from specpipe.machine import provenance
from specpipe.machine.manifest import (
    Files,
    InputRecord,
    Manifest,
    manifest_path,
    parse_manifest,
    read_manifest,
    record_files,
)
from specpipe.runtimes.repository_layout import link_file
from specpipe.stage import PlannedStage
from specpipe.stores.patience import StoreFailed
from specpipe.stores.places import open_store
from specpipe.stores.records import below
from specpipe.stores.store import Blob, Store
from specpipe.version import BUILDS_ALIKE

_FORMAT = 1  # of keys, and of what is kept by them
_MANIFEST = "manifest.json"
_FILES = "files/"
_PATIENCE_S = 10.0  # a build can do without

_log = logging.getLogger(__name__)


def remote_cache(config: PipelineConfig) -> RemoteCache | None:
    """Returns the cache that a config names; None where it names none."""
    url = config.release.cache
    return None if url is None else RemoteCache(url, config.base_dir)


class RemoteCache:
    """A store of artifacts, asked before a stage runs; once it fails, not any more."""

    def __init__(self, url: str, base_dir: Path) -> None:
        self._url, self._base_dir = url, base_dir
        self._store: Store | None = None
        self._has_failed = False

    def fetch(
        self, planned: PlannedStage, inputs: Sequence[InputRecord], out: Path
    ) -> dict[str, Any] | None:
        """Fetches an artifact into an empty folder; returns its maker's record of the build.

        None where there is no such artifact, or none that is whole: then the folder is empty.
        """
        if self._has_failed:
            return None
        wanted = planned.stage.inputs()
        expected = Manifest(
            stage=planned.name,
            inputs=tuple(inputs),
            settings=_as_json(wanted.settings),
            versions=_versions(provenance.versions(wanted.libraries)),
            outputs={},
            build={},
        )
        try:
            build = self._fetch(planned, expected, out)
        except Exception as exc:  # whatever a library raises, the stage can be run
            self._warn(planned, exc)
            for path in out.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            return None
        if build is not None:
            _log.info("%s: fetched from %s", planned.name, self._opened().url)
        return build

    def keep(self, planned: PlannedStage) -> None:
        """Puts the artifact of a stage that ran there."""
        if self._has_failed:
            return
        try:
            self._keep(planned)
        except Exception as exc:  # the artifact is built, whatever a library raises
            self._warn(planned, exc)

    def _fetch(self, planned: PlannedStage, expected: Manifest, out: Path) -> dict[str, Any] | None:
        key = _key(planned, expected)
        files = None if key is None else self._opened().artifact(key)
        if files is None:
            return None
        contents = {
            name.removeprefix(_FILES): blob
            for name, blob in files.items()
            if name.startswith(_FILES)
        }
        manifest = self._manifest(files)
        if (
            replace(manifest, inputs=expected.inputs, outputs={}, build={}) != expected
            or _blobs(manifest.outputs) != contents
            or not contents
        ):
            raise StoreError(f"artifact {key} is another one than its manifest says")
        try:
            build = _Build.model_validate(manifest.build)
        except ValidationError:
            raise StoreError(
                f"the manifest of artifact {key} is not what specpipe writes"
            ) from None
        # What a stage takes over from its inputs is here: a packaged engine, a tokenizer.
        here = _Here.of(expected.inputs)
        destinations = below(out, contents)
        for path, blob in destinations.items():
            if blob in here:
                path.parent.mkdir(parents=True, exist_ok=True)
                here[blob].bring(path)
        self._opened().download({p: b for p, b in destinations.items() if b not in here})
        if _blobs(record_files(out)) != contents:
            raise StoreError(f"artifact {key} did not come as its manifest says")
        return {**build.model_dump(exclude_unset=True), "fetched_from": self._opened().url}

    def _manifest(self, files: Mapping[str, Blob]) -> Manifest:
        if _MANIFEST not in files:
            raise StoreError("an artifact has no manifest")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, _MANIFEST)
            self._opened().download({path: files[_MANIFEST]})
            manifest = parse_manifest(path)
        if manifest is None:
            raise StoreError("an artifact's manifest is not one that this version can read")
        return replace(manifest, versions=_versions(manifest.versions))

    def _keep(self, planned: PlannedStage) -> None:
        manifest = read_manifest(planned.artifact)
        key = None if manifest is None else _key(planned, manifest)
        if manifest is None or key is None:
            return
        # Where its inputs lay on this machine, and how it was called, is nobody else's business.
        build = {name: value for name, value in manifest.build.items() if name != "argv"}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, _MANIFEST)
            replace(manifest, inputs=(), build=build).write(path)
            record = record_files(path)["."]
            kept = {_MANIFEST: Blob(record.sha256, record.size)}
            kept |= {f"{_FILES}{n}": blob for n, blob in _blobs(manifest.outputs).items()}
            sources = {
                blob: planned.artifact / name for name, blob in _blobs(manifest.outputs).items()
            }
            self._opened().upload({**sources, kept[_MANIFEST]: path})
            self._opened().keep_artifact(key, kept)

    def _opened(self) -> Store:
        if self._store is None:
            self._has_failed = True  # unless it can be opened
            self._store = open_store(self._url, self._base_dir, patience_s=_PATIENCE_S)
            self._has_failed = False
        return self._store

    def _warn(self, planned: PlannedStage, exc: Exception) -> None:
        # An artifact that is damaged is made here, and replaces what is there.
        self._has_failed |= isinstance(exc, StoreFailed) or not isinstance(exc, StoreError)
        why = exc if isinstance(exc, (SpecpipeError, OSError)) else type(exc).__name__
        what = "is not used any more" if self._has_failed else "has nothing that could be used"
        _log.warning("%s: the cache of artifacts %s: %s", planned.name, what, to_sentence(why))


class _Build(BaseModel):
    """What a manifest says of a build, of which the maker's words are taken over."""

    built_at: Annotated[str, Field(max_length=100)] = ""
    duration_s: Annotated[float, Field(ge=0)] = 0.0
    python: Annotated[str, Field(max_length=100)] = ""
    platform: Annotated[str, Field(max_length=300)] = ""
    gpus: Annotated[list[dict[str, str]], Field(max_length=64)] = []
    varies: Annotated[str, Field(max_length=1000)] = ""


def _key(planned: PlannedStage, made: Manifest) -> str | None:
    """Returns what an artifact is found by; None where it is not told which tool makes it."""
    tool = {} if planned.tool_facts is None else dict(planned.tool_facts())
    if tool and set(tool.values()) == {"unknown"}:
        return None
    document = {
        "format": _FORMAT,
        "stage": made.stage,
        "settings": made.settings,
        "versions": _versions(made.versions),
        "inputs": [
            # The name of a folder is its owner's; that of a file may say what it is for.
            [Path(root.path).name if "." in root.files else "", _digests(root.files)]
            for root in made.inputs
        ],
        "tool": tool,
        "machine": platform.machine(),
        # Engines fit a GPU, and a library chooses by it how it computes.
        "gpus": sorted({json.dumps(gpu, sort_keys=True) for gpu in provenance.gpus()}),
        # What is computed on a device may have other last bits on another one.
        "cpu": _cpu() if "device" in made.settings else "",
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _versions(versions: Mapping[str, str]) -> dict[str, str]:
    """Returns versions with one specpipe for all that build alike."""
    alike = versions.get("specpipe") in BUILDS_ALIKE
    return {**versions, **({"specpipe": min(BUILDS_ALIKE)} if alike else {})}


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    normalised: dict[str, Any] = json.loads(json.dumps(settings))
    return normalised


def _digests(files: Files) -> dict[str, str]:
    return {name: record.sha256 for name, record in files.items()}


def _blobs(files: Files) -> dict[str, Blob]:
    return {name: Blob(record.sha256, record.size) for name, record in files.items()}


@dataclass(frozen=True)
class _Here:
    """A content that a stage's inputs have; what we made ourselves is linked, as packaging does."""

    path: Path
    is_artifact: bool

    @classmethod
    def of(cls, inputs: Sequence[InputRecord]) -> dict[Blob, _Here]:
        return {
            blob: cls(
                Path(root.path) if name == "." else Path(root.path, name),
                manifest_path(Path(root.path)).exists(),
            )
            for root in inputs
            for name, blob in _blobs(root.files).items()
        }

    def bring(self, path: Path) -> None:
        if self.is_artifact:
            link_file(self.path, path)
        else:
            shutil.copyfile(self.path, path)


def _cpu() -> str:
    """Returns the model of this machine's processor."""
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
