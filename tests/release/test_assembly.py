"""What a version's folder holds, and what is never made one."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from specpipe.build import cache
from specpipe.build.load import load_config
from specpipe.config.sections import PipelineConfig
from specpipe.errors import RepositoryError
from specpipe.evaluate.verification.record import verification_fault
from specpipe.machine.manifest import files_below, read_manifest, record_files
from specpipe.release.assembly import assemble
from specpipe.release.release_file import Release, content_digest, read_release
from specpipe.runtimes.requirements import Requirements
from specpipe.version import __version__
from tests.release.built_pair import build, read, write_night, write_verification

TIME = "2026-11-29T04:00:00+00:00"


def make(config: PipelineConfig, number: int = 7) -> tuple[Path, Release]:
    folder = config.artifacts.versions / str(number)
    return folder, assemble(config, number, folder, previous=6, published_at=TIME)


def refusal(config: PipelineConfig) -> str:
    with pytest.raises(RepositoryError) as caught:
        make(config)
    assert not config.artifacts.versions.exists() or not os.listdir(config.artifacts.versions)
    return str(caught.value)


def test_a_version_holds_the_repository_and_all_that_is_known_of_it(
    built: PipelineConfig,
) -> None:
    folder, release = make(built)

    repository = built.artifacts.repository
    linked = files_below(folder / "model_repo")
    assert linked.keys() == files_below(repository).keys()
    assert all(path.samefile(repository / name) for name, path in linked.items())
    assert sorted(set(files_below(folder)) - {f"model_repo/{name}" for name in linked}) == [
        "attestations/acceptance.json",
        "attestations/bench.json",
        "attestations/provenance.json",
        "attestations/verification.json",
        "bom.cdx.json",
        "licenses/draft/LICENSE",
        "licenses/draft/NOTICE.txt",
        "licenses/draft/README.md",
        "model_repo.manifest.json",
        "pair.yaml",
        "release.json",
        "results/nightly-bench.json",
        "results/nightly.json",
        "verification.json",
    ]
    assert release == read_release(folder)
    assert release == Release(
        pair="pair",
        number=7,
        digest=content_digest(folder),
        requires=Requirements(runtime="torch", libraries={"torch": ""}),
        published_at=TIME,
        specpipe=__version__,
        previous=6,
        notes=("no licence file found in the target's checkpoint target",),
    )
    assert verification_fault(folder) is None  # laid out as a built pair is
    # Linking changed the files' status, which the build's manifest knows: nothing is read again.
    assert cache.check_integrity(repository).hashed.num_files == 0


def test_the_same_content_has_the_same_digest_whatever_its_number(built: PipelineConfig) -> None:
    _, release = make(built)
    folder = built.artifacts.versions / "8"
    again = assemble(built, 8, folder, previous=7, published_at="2027-01-01T00:00:00+00:00")
    assert again.digest == release.digest
    (folder / "model.sig").write_text("a signature")
    assert content_digest(folder) == release.digest
    (folder / "pair.yaml").write_text("name: other")
    assert content_digest(folder) != release.digest


def test_the_published_manifest_says_nothing_of_the_machine(built: PipelineConfig) -> None:
    folder, _ = make(built)
    text = (folder / "model_repo.manifest.json").read_text()
    assert str(built.base_dir) not in text and str(built.base_dir.parent) not in text
    manifest = read_manifest(folder / "model_repo")
    assert manifest is not None
    assert {(f.mtime_ns, f.ctime_ns, f.inode) for f in manifest.outputs.values()} == {(0, 0, 0)}
    assert [read.path for read in manifest.inputs][:4] == [
        "check/pair.json",
        "draft/engine",
        "target/engine",
        "target/tokenizer.json",
    ]


def test_a_folder_that_is_there_is_never_changed(built: PipelineConfig) -> None:
    folder, _ = make(built)
    before = record_files(folder)
    with pytest.raises(RepositoryError, match="is there already: a version is never changed"):
        make(built)
    assert record_files(folder) == before


def test_what_was_not_built_is_refused(built: PipelineConfig) -> None:
    shutil.rmtree(built.artifacts.repository)
    assert "model_repo does not exist: run `specpipe build" in refusal(built)


def test_a_damaged_repository_is_refused(built: PipelineConfig) -> None:
    path = built.artifacts.repository / "speculative/1/pair.json"
    path.write_text(path.read_text() + " ")
    assert "is not what was built: file speculative/1/pair.json" in refusal(built)


def test_what_was_packaged_anew_since_it_was_verified_is_refused(built: PipelineConfig) -> None:
    config = load_config(built.source, ["speculation.adaptive=false"])
    build(config)
    assert refusal(config) == (
        "pair was changed since it was verified (speculative/1/pair.json changed): run "
        "`specpipe verify` again"
    )


def test_a_verification_that_found_a_fault_is_refused(built: PipelineConfig) -> None:
    write_verification(built, reason="greedy, K = 3: prompt 1 differs")
    assert refusal(built) == ("pair did not pass its verification: greedy, K = 3: prompt 1 differs")


def test_a_yaml_that_says_other_than_what_was_built_is_refused(built: PipelineConfig) -> None:
    config = load_config(built.source, ["speculation.adaptive=false"])
    assert refusal(config) == (
        f"{built.artifacts.repository} is not what {built.source} would build (package: adaptive "
        f"was true, is now false): run `specpipe build --config {built.source}` again"
    )


def test_an_engine_that_was_built_again_is_none_that_the_repository_came_from(
    built: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where a build was killed between the engine and the repository, of checkpoints on a hub.
    monkeypatch.setattr("specpipe.release.built.outdated", lambda config: [])
    engine = built.artifacts.side("draft").engine
    manifest = read_manifest(engine)
    assert manifest is not None
    other = {
        name: replace(record, sha256="0" * 64) if name == "config.json" else record
        for name, record in manifest.outputs.items()
    }
    replace(manifest, outputs=other).write(engine.with_name("engine.manifest.json"))
    assert f"{engine} was built again since model_repo was made from it" in refusal(built)


def test_results_of_another_build_are_left_out_and_noted(built: PipelineConfig) -> None:
    write_night(built, repository="0" * 64)
    folder, release = make(built)
    assert not (folder / "results").exists()
    assert release.notes[-1] == (
        "the last good nightly run, of 2026-11-29T03:00:09+00:00, is of another build"
    )


def test_an_interrupted_assembly_leaves_nothing(
    built: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Release, folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Release, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        make(built)
    assert os.listdir(built.artifacts.versions) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "its format is not 1"),
        ({"number": 0}, "number: Input should be greater than or equal to 1"),
        ({"number": "7"}, "number: Input should be a valid integer"),
        ({"pair": "../up"}, "pair: String should match pattern"),
        ({"digest": "abc"}, "digest: String should match pattern"),
        ({"signed": True}, "signed: Unexpected keyword argument"),
        ({"requires": {"runtime": "torch", "libraries": {}, "x": 1}}, "requires.x: Unexpected"),
        ({"notes": ["a" * 1001]}, "notes.0: String should have at most 1000 characters"),
        ({"requires": []}, "requires: "),
    ],
)
def test_a_release_file_that_no_specpipe_wrote_is_refused(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    release = Release(
        pair="pair",
        number=7,
        digest="ab" * 32,
        requires=Requirements(runtime="torch", libraries={"torch": ""}),
        published_at=TIME,
        specpipe="0.2.0",
    )
    release.write(tmp_path)
    assert read_release(tmp_path) == release
    path = tmp_path / "release.json"
    path.write_text(json.dumps({**read(path), **change}))
    with pytest.raises(RepositoryError) as caught:
        read_release(tmp_path)
    assert str(caught.value).startswith(f"{path} is not what `specpipe publish` writes: {reason}")
    assert len(str(caught.value)) < len(str(path)) + 200


def test_a_folder_without_a_release_file_is_no_version(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="is no version: it has no release.json"):
        read_release(tmp_path)
