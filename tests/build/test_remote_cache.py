"""Artifacts of other machines: found by all that decides them, checked, and never needed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specpipe.build import execution, planning
from specpipe.build.load import load_config
from specpipe.build.remote_cache import RemoteCache, remote_cache
from specpipe.machine import provenance
from specpipe.machine.manifest import read_manifest, record_files
from specpipe.stage import PlannedStage, StageInputs

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class _Copy:
    """Copies its input, beside a file of its own; counts how often."""

    source: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str = "draft/copy"
    varies: str = ""

    def inputs(self) -> StageInputs:
        return StageInputs(files=(self.source,), settings=self.settings, varies=self.varies)

    def run(self, out: Path) -> None:
        _runs.append(self.name)
        (out / "folder").mkdir()
        (out / "folder/own").write_text(f"{self.name} {self.settings}")
        (out / "copied").write_bytes(self.source.read_bytes())


_runs: list[str] = []


class _Quiet:
    def planned(self, reports: Sequence[execution.StageReport]) -> None: ...

    def started(self, stage: str, reasons: Sequence[str]) -> None: ...

    def waiting(self, stage: str) -> None: ...

    def finished(self, report: execution.StageReport) -> None: ...


class _Machine:
    """A machine with a folder of its own, and the cache that all have."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.source = folder / "input"
        self.source.write_text("what it is made of")
        self.artifact = folder / "artifact"
        self._cache = cache

    def build(
        self, tool: Callable[[], Mapping[str, str]] | None = None, **stage: Any
    ) -> dict[str, bytes]:
        """Builds the artifact; its files and their contents."""
        planned = PlannedStage(_Copy(self.source, **stage), self.artifact, tool_facts=tool)
        remote = RemoteCache(str(self._cache), self.folder)
        execution.run((planned,), _Quiet(), remote=remote)
        return {name: (self.artifact / name).read_bytes() for name in record_files(self.artifact)}


@pytest.fixture
def machines(tmp_path: Path) -> Callable[[], _Machine]:
    _runs.clear()
    numbers = iter(range(100))
    return lambda: _Machine(tmp_path / f"machine{next(numbers)}", tmp_path / "cache")


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_artifact_of_another_machine_is_fetched_with_the_record_of_its_build(
    machines: Callable[[], _Machine], tmp_path: Path
) -> None:
    first, second = machines(), machines()
    made = first.build(varies="own: for this test")
    assert second.build(varies="own: for this test") == made
    assert _runs == ["draft/copy"]
    ours, theirs = read_manifest(second.artifact), read_manifest(first.artifact)
    assert ours is not None and theirs is not None
    assert ours.build == {
        **{name: value for name, value in theirs.build.items() if name != "argv"},
        "fetched_from": str(tmp_path / "cache"),
    }
    assert [root.path for root in ours.inputs] == [str(second.source)]
    # It counts as built here: nothing runs again, and nothing is fetched again.
    second.build(varies="own: for this test")
    assert _runs == ["draft/copy"]
    # Only what its inputs lack was fetched, and the checkpoint of the user is nobody else's file.
    assert not (second.artifact / "copied").samefile(second.source)


@pytest.mark.parametrize(
    "change", ["settings", "name", "input", "gpu", "machine", "library", "tool", "processor"]
)
def test_whatever_decides_an_artifact_is_in_its_key(
    machines: Callable[[], _Machine], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    settings = {"device": "auto"}
    machines().build(lambda: {"version": "1.2.1"}, settings=settings)
    other = machines()
    stage: dict[str, Any] = {"settings": settings}
    tool = {"version": "1.2.1"}
    if change == "settings":
        stage["settings"] = {"device": "cuda"}
    elif change == "name":
        stage["name"] = "target/copy"
    elif change == "input":
        other.source.write_text("something else")
    elif change == "gpu":
        gpu = {"name": "H100", "compute_cap": "9.0", "driver_version": "580"}
        monkeypatch.setattr(provenance, "gpus", lambda: [gpu])
    elif change == "machine":
        monkeypatch.setattr("platform.machine", lambda: "riscv64")
    elif change == "library":
        monkeypatch.setattr(provenance, "__version__", "99.0")
    elif change == "tool":
        tool = {"version": "1.2.2"}
    else:
        monkeypatch.setattr("specpipe.build.remote_cache._cpu", lambda: "another one")
    other.build(lambda: tool, **stage)
    assert len(_runs) == 2


def test_stage_whose_tool_is_not_known_is_not_shared(machines: Callable[[], _Machine]) -> None:
    for _ in range(2):
        machines().build(lambda: {"image_digest": "unknown"})
    assert len(_runs) == 2


def _damage_content(cache: Path) -> None:
    for path in (cache / "blobs").rglob("*"):
        if path.is_file() and b"draft/copy" in path.read_bytes()[:20]:
            path.write_bytes(path.read_bytes()[::-1])


def _lose_contents(cache: Path) -> None:
    for path in (cache / "blobs").rglob("*"):
        if path.is_file():
            path.unlink()


def _document(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(cache: Path) -> None:
        (path,) = cache.glob("artifacts/*/*.json")
        document = json.loads(path.read_text())
        change(document["files"])
        path.write_text(json.dumps(document))

    return damage


def _other_name(files: dict[str, Any]) -> None:
    files["files/../../escaped"] = files.pop("files/folder/own")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_damage_content, "is damaged there"),
        (_lose_contents, "does not hold blob"),
        (_document(_other_name), "is no name of a file below a folder"),
        (_document(lambda files: files.pop("files/copied")), "another one than its manifest says"),
        (_document(lambda files: files.pop("manifest.json")), "an artifact has no manifest"),
        (
            _document(lambda files: files.update({"manifest.json": files["files/copied"]})),
            "manifest is not one that this version can read",
        ),
    ],
)
def test_damaged_artifact_is_a_warning_and_is_made_here(
    machines: Callable[[], _Machine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    said: str,
) -> None:
    made = machines().build()
    damage(tmp_path / "cache")
    assert machines().build() == made
    assert len(_runs) == 2
    assert [said in warning for warning in _warnings(caplog)] == [True]
    assert machines().build() == made  # what was made replaced what was damaged
    assert (len(_runs), len(_warnings(caplog))) == (2, 1)
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("oci://127.0.0.1:9/x", "the connection is refused"),
        ("s3://key:secret@bucket/x", "has a password or other settings in it"),
        ("/proc/nothing", "No such file or directory"),
    ],
)
def test_cache_that_cannot_be_used_is_one_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    said: str,
) -> None:
    monkeypatch.setattr("specpipe.build.remote_cache._PATIENCE_S", 0.2)
    machine = _Machine(tmp_path / "machine", tmp_path / "cache")
    _runs.clear()
    remote = RemoteCache(url, tmp_path)
    for number in range(2):
        planned = PlannedStage(_Copy(machine.source), machine.folder / f"artifact{number}")
        execution.run((planned,), _Quiet(), remote=remote)
    assert len(_runs) == 2
    (warning,) = _warnings(caplog)
    assert said in warning
    assert "secret" not in warning


def test_pair_is_fetched_with_equal_bytes(tmp_path: Path) -> None:
    built = []
    for folder in ("first", "second"):
        config = load_config(
            ROOT / "configs/quickstart.yaml",
            [f"output_dir={tmp_path / folder}", f"release.cache={tmp_path / 'cache'}"],
        )
        stages = planning.plan(config)
        execution.run(stages, _Quiet(), remote=remote_cache(config))
        manifests = {planned.name: read_manifest(planned.artifact) for planned in stages}
        built.append(
            {
                (name, file): record.sha256
                for name, manifest in manifests.items()
                if manifest is not None
                for file, record in manifest.outputs.items()
            }
        )
    assert built[0] == built[1]
    # The engine, which packaging takes over, lies there once.
    weights = max(config.artifacts.side("draft").engine.iterdir(), key=lambda p: p.stat().st_size)
    assert any(path.samefile(weights) for path in config.artifacts.repository.rglob(weights.name))
    fetched = [m is not None and "fetched_from" in m.build for m in manifests.values()]
    assert fetched == [True] * len(stages)
