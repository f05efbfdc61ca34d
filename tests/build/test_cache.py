from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specpipe import __version__
from specpipe.build import cache
from specpipe.errors import SpecpipeError
from specpipe.stage import StageInputs
from specpipe.version import BUILDS_ALIKE


@dataclass(frozen=True)
class Join:
    """Joins its input files into `joined`; the hook runs before."""

    files: tuple[Path, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    hook: Callable[[Path], object] = lambda out: None
    libraries: tuple[str, ...] = ()
    name: str = "draft/join"

    def inputs(self) -> StageInputs:
        return StageInputs(files=self.files, settings=self.settings, libraries=self.libraries)

    def run(self, out: Path) -> None:
        assert list(out.iterdir()) == []
        self.hook(out)
        paths = [f for root in self.files for f in ([root] if root.is_file() else root.iterdir())]
        (out / "joined").write_bytes(b"".join(p.read_bytes() for p in sorted(paths)))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a").write_text("one")
    (folder / "b").write_text("two")
    return folder


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return tmp_path / "built" / "draft" / "joined"


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")


def set_time(path: Path, seconds: int) -> None:
    os.utime(path, ns=(seconds * 10**9, seconds * 10**9))


def test_first_build_makes_the_artifact_and_its_manifest(source: Path, artifact: Path) -> None:
    built = cache.build(Join((source,), {"size": 4}), artifact)
    assert built.reasons == ("not built yet",)
    assert (artifact / "joined").read_text() == "onetwo"
    assert visible(artifact.parent) == ["joined", "joined.manifest.json"]
    manifest = json.loads((artifact.parent / "joined.manifest.json").read_text())
    assert manifest["stage"] == "draft/join"
    assert manifest["settings"] == {"size": 4}
    assert manifest["inputs"][0]["path"] == str(source)
    assert manifest["inputs"][0]["files"]["a"]["size"] == 3
    assert manifest["inputs"][0]["files"]["a"]["sha256"] == (
        "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    )
    assert list(manifest["outputs"]) == ["joined"]


def test_second_build_does_nothing(source: Path, artifact: Path) -> None:
    cache.build(Join((source,)), artifact)
    before = (artifact.parent / "joined.manifest.json").stat().st_mtime_ns
    built = cache.build(Join((source,), hook=lambda out: pytest.fail("ran")), artifact)
    assert built.reasons == ()
    assert (artifact.parent / "joined.manifest.json").stat().st_mtime_ns == before


def test_artifact_is_readable_by_others(source: Path, artifact: Path) -> None:
    umask = os.umask(0o022)
    try:
        cache.build(Join((source,)), artifact)
    finally:
        os.umask(umask)
    assert artifact.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("old", "new", "reasons"),
    [
        ({"max_batch_size": 4}, {"max_batch_size": 8}, ["max_batch_size was 4, is now 8"]),
        ({"dtype": "auto"}, {"dtype": "float32"}, ["dtype was auto, is now float32"]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ["a.c was 2, is now 3"]),
        ({}, {"a": None}, ["a was not set, is now null"]),
        ({"a": [1]}, {}, ["a was [1], is now not set"]),
        ({"a": (1, 2)}, {"a": [1, 2]}, []),
        ({"a": "x" * 70 + "1"}, {"a": "x" * 70 + "2"}, ["a changed"]),
        ({"a": True}, {"a": 1}, ["a was true, is now 1"]),
    ],
)
def test_changed_settings_say_so(
    source: Path, artifact: Path, old: dict[str, Any], new: dict[str, Any], reasons: list[str]
) -> None:
    cache.build(Join((source,), old), artifact)
    assert cache.stale_reasons(Join((source,), new), artifact) == reasons


def test_changed_input_says_so(source: Path, artifact: Path) -> None:
    cache.build(Join((source,)), artifact)
    (source / "a").write_text("ONE")
    assert cache.stale_reasons(Join((source,)), artifact) == [f"input {source}/a changed"]
    cache.build(Join((source,)), artifact)
    assert (artifact / "joined").read_text() == "ONEtwo"


def test_new_and_missing_inputs_say_so(source: Path, artifact: Path) -> None:
    cache.build(Join((source,)), artifact)
    (source / "c").write_text("three")
    (source / "a").unlink()
    assert cache.stale_reasons(Join((source,)), artifact) == [
        f"input {source}/a is gone",
        f"input {source}/c is new",
    ]


def test_hidden_files_and_bytecode_are_no_inputs(source: Path, artifact: Path) -> None:
    cache.build(Join((source / "a",)), artifact)
    for name in (".cache/download", "__pycache__/model.pyc", ".hidden"):
        (artifact / name).parent.mkdir(exist_ok=True)
        (artifact / name).write_text("x")
    assert cache.stale_reasons(Join((source / "a",)), artifact) == []


def test_number_of_inputs_may_change(source: Path, artifact: Path) -> None:
    cache.build(Join((source / "a", source / "b")), artifact)
    assert cache.stale_reasons(Join((source / "a",)), artifact) == [f"input {source}/b is gone"]
    cache.build(Join((source / "a",)), artifact)
    assert cache.stale_reasons(Join((source / "a", source / "b")), artifact) == [
        f"input {source}/b is new"
    ]


def test_swapped_inputs_are_noticed(source: Path, artifact: Path) -> None:
    cache.build(Join((source / "a", source / "b")), artifact)
    assert cache.stale_reasons(Join((source / "b", source / "a")), artifact) == [
        f"input {source}/b changed",
        f"input {source}/a changed",
    ]


def test_touched_input_with_equal_bytes_is_unchanged_and_hashed_once(
    source: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.build(Join((source,)), artifact)
    set_time(source / "a", 1_000_000_000)
    assert cache.stale_reasons(Join((source,)), artifact) == []
    assert cache.build(Join((source,)), artifact).reasons == ()
    monkeypatch.setattr(
        "specpipe.machine.manifest._digest", lambda path, status: pytest.fail(f"hashed {path}")
    )
    assert cache.build(Join((source,)), artifact).reasons == ()


def test_equal_bytes_elsewhere_cause_no_build(source: Path, artifact: Path) -> None:
    cache.build(Join((source,)), artifact)
    moved = source.rename(source.with_name("moved"))
    assert cache.build(Join((moved,)), artifact).reasons == ()


def test_times_are_trusted_only_for_the_same_path(source: Path, artifact: Path) -> None:
    for name in ("a", "b"):
        set_time(source / name, 1_000_000_000)
    cache.build(Join((source / "a",)), artifact)
    assert cache.stale_reasons(Join((source / "b",)), artifact) == [f"input {source}/b changed"]


def test_an_upgrade_that_builds_alike_builds_nothing_again(
    source: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specpipe.machine.provenance.__version__", "0.1.0")
    cache.build(Join((source,)), artifact)
    monkeypatch.undo()
    assert cache.stale_reasons(Join((source,)), artifact) == []
    assert __version__ in BUILDS_ALIKE


def test_versions_count(source: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.build(Join((source,), libraries=("no-such-library",)), artifact)
    monkeypatch.setattr("specpipe.machine.provenance.__version__", "9.9.9")
    assert cache.stale_reasons(Join((source,), libraries=("pyyaml",)), artifact) == [
        f"specpipe was {__version__}, is now 9.9.9",
        f"pyyaml was not set, is now {importlib.metadata.version('pyyaml')}",
        "no-such-library was not installed, is now not set",
    ]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda a: (a / "joined").write_text("onetwO"), "file joined is not what was built"),
        (lambda a: (a / "joined").write_text(""), "file joined is not what was built"),
        (lambda a: (a / "joined").unlink(), "file joined is missing"),
        (lambda a: (a / "more").write_text("x"), "file more was not built"),
    ],
)
def test_damage_is_found_and_mended(
    source: Path, artifact: Path, damage: Callable[[Path], object], reason: str
) -> None:
    cache.build(Join((source,)), artifact)
    damage(artifact)
    assert cache.stale_reasons(Join((source,)), artifact) == [f"damaged: {reason}"]
    cache.build(Join((source,)), artifact)
    assert (artifact / "joined").read_text() == "onetwo"
    assert visible(artifact) == ["joined"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 1, "inputs": 3}', '{"format": 0}'])
def test_unreadable_manifest_means_missing(source: Path, artifact: Path, text: str) -> None:
    cache.build(Join((source,)), artifact)
    (artifact.parent / "joined.manifest.json").write_text(text)
    assert cache.stale_reasons(Join((source,)), artifact) == ["not built yet"]


@pytest.mark.parametrize("fault", [SpecpipeError("no"), ValueError("bug"), KeyboardInterrupt()])
def test_failed_stage_leaves_no_folder(source: Path, artifact: Path, fault: BaseException) -> None:
    def fail(out: Path) -> None:
        (out / "half").write_text("x")
        raise fault

    with pytest.raises(type(fault)):
        cache.build(Join((source,), hook=fail), artifact)
    assert visible(artifact.parent) == []
    cache.build(Join((source,)), artifact)
    with pytest.raises(type(fault)):
        cache.build(Join((source,), {"new": 1}, hook=fail), artifact)
    assert visible(artifact.parent) == ["joined", "joined.manifest.json"]
    assert cache.stale_reasons(Join((source,)), artifact) == []


def test_leftovers_of_a_killed_build_are_removed(source: Path, artifact: Path) -> None:
    for name in (".joined.staging", ".joined.old"):
        (artifact.parent / name).mkdir(parents=True)
        (artifact.parent / name / "half").write_text("x")
    cache.build(Join((source,)), artifact)
    assert visible(artifact.parent) == ["joined", "joined.manifest.json"]


def test_two_builds_wait_for_each_other(source: Path, artifact: Path) -> None:
    running, waiting = threading.Event(), threading.Event()
    runs = []

    def slow(out: Path) -> None:
        runs.append(out)
        running.set()
        assert waiting.wait(10)

    first = threading.Thread(target=cache.build, args=(Join((source,), hook=slow), artifact))
    first.start()
    assert running.wait(10)
    second = cache.build(Join((source,), hook=slow), artifact, on_wait=waiting.set)
    first.join()
    assert second.reasons == ()
    assert len(runs) == 1


def test_input_that_changes_during_the_run_is_refused(source: Path, artifact: Path) -> None:
    stage = Join((source,), hook=lambda out: (source / "b").write_text("other"))
    with pytest.raises(SpecpipeError) as caught:
        cache.build(stage, artifact)
    assert str(caught.value) == (
        f"draft/join: input {source}/b changed while the stage ran: build again"
    )
    assert visible(artifact.parent) == []


def test_missing_input_is_named(source: Path, artifact: Path) -> None:
    with pytest.raises(SpecpipeError) as caught:
        cache.build(Join((source / "nothing",)), artifact)
    assert str(caught.value) == f"draft/join: input {source}/nothing does not exist"


def test_full_disk_is_one_sentence(source: Path, artifact: Path) -> None:
    def fill(out: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(out / "joined"))

    with pytest.raises(SpecpipeError) as caught:
        cache.build(Join((source,), hook=fill), artifact)
    assert str(caught.value) == (
        f"draft/join: {artifact.parent}/.joined.staging/joined: No space left on device"
    )


def test_file_written_twice_within_a_clock_tick_is_noticed(tmp_path: Path, artifact: Path) -> None:
    source = tmp_path / "file"
    for round_ in range(20):
        source.write_text(f"{round_:04}")
        cache.build(Join((source,)), artifact)
        assert (artifact / "joined").read_text() == f"{round_:04}"


def test_checking_a_thousand_files_takes_no_second_of_a_processor(
    tmp_path: Path, artifact: Path
) -> None:
    source = tmp_path / "many"
    source.mkdir()
    for index in range(1000):
        (source / str(index)).write_text(str(index))
    cache.build(Join((source,)), artifact)
    started_s = time.process_time()
    assert cache.build(Join((source,)), artifact).reasons == ()
    assert time.process_time() - started_s < 1
