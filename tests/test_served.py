"""What is served is what was built: the repository is held against its manifest, file by file."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specpipe.build import execution, planning, repositories
from specpipe.build.load import load_config
from specpipe.checkpoints.checkpoint import read_safetensors_header
from specpipe.cli.group import main
from specpipe.config.sections import PipelineConfig
from specpipe.errors import RepositoryError
from specpipe.machine import manifest as manifests
from specpipe.triton.server import launcher
from tests.quiet import Quiet

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "models" / "python-code"
VERSION = Path("speculative", "1")
TARGET = VERSION / "target" / "model.safetensors"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart pair, its checkpoints and x.yaml."""
    folder = tmp_path_factory.mktemp("pair")
    shutil.copytree(PAIR, folder / "models")
    text = (ROOT / "configs" / "quickstart.yaml").read_text()
    text = text.replace("../models/python-code", "models").replace("../engines", "engines")
    (folder / "x.yaml").write_text(text)
    config = load_config(folder / "x.yaml")
    execution.run(planning.plan(config), Quiet())
    return folder


@pytest.fixture
def config(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineConfig:
    """A copy of it, with links where the original has them; the working directory."""
    folder = tmp_path / "pair"
    subprocess.run(["cp", "-a", built, folder], check=True)
    monkeypatch.chdir(folder)
    config = load_config(Path("x.yaml"))
    execution.run(planning.plan(config), Quiet())
    return config


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The repositories for which a Triton would have been started."""
    found: list[Path] = []
    monkeypatch.setattr(launcher, "serve", lambda repository, *_, **__: found.append(repository))
    return found


def run(*words: str) -> Result:
    return CliRunner().invoke(main, [words[0], "--config", "x.yaml", *words[1:]])


def keeping_time(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Writes a file over in place and puts its size and modification time back."""
    status = path.stat()
    content = change(path.read_bytes())
    assert len(content) == status.st_size
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def flip_last(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def scale_a_matrix(path: Path) -> None:
    """Multiplies one matrix of a file in float32 by 1.03, as another training step might."""
    np = pytest.importorskip("numpy")
    info = max(read_safetensors_header(path).values(), key=lambda info: info.num_bytes)
    assert info.dtype == "F32"
    content = bytearray(path.read_bytes())
    values = np.frombuffer(content, np.float32, info.num_bytes // 4, info.offset)
    values *= np.float32(1.03)
    path.write_bytes(content)


def replaced(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a matrix of the target": (
        lambda repository: scale_a_matrix(repository / TARGET),
        f"file {TARGET} is not what was built",
    ),
    "a byte of the draft, size and time kept": (
        lambda repository: keeping_time(
            repository / VERSION / "draft" / "model.safetensors", flip_last
        ),
        f"file {VERSION}/draft/model.safetensors is not what was built",
    ),
    "model.py": (
        lambda repository: replaced(repository / VERSION / "model.py", "import os\n"),
        f"file {VERSION}/model.py is not what was built",
    ),
    "pair.json": (
        lambda repository: keeping_time(
            repository / VERSION / "pair.json", lambda text: text.replace(b"4,", b"3,", 1)
        ),
        f"file {VERSION}/pair.json is not what was built",
    ),
    "a config.pbtxt": (
        lambda repository: (repository / "ensemble" / "config.pbtxt").write_text("name: 'x'"),
        "file ensemble/config.pbtxt is not what was built",
    ),
    "a tokenizer that is a link now": (
        lambda repository: (
            (repository / VERSION / "tokenizer" / "tokenizer.json").unlink(),
            (repository / VERSION / "tokenizer" / "tokenizer.json").symlink_to("/etc/hostname"),
        ),
        f"file {VERSION}/tokenizer/tokenizer.json is not what was built",
    ),
    "a file more": (
        lambda repository: (repository / "postprocessing" / "1" / "torch.py").write_text("x"),
        "file postprocessing/1/torch.py was not built",
    ),
    "a file less": (
        lambda repository: (repository / "postprocessing" / "1" / "model.py").unlink(),
        "file postprocessing/1/model.py is missing",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_what_was_built_is_neither_served_nor_verified(
    name: str, config: PipelineConfig, launched: list[Path]
) -> None:
    change, damage = CHANGES[name]
    repository = config.artifacts.repository
    change(repository)
    refused = run("serve")
    said = f"Error: {repository} is not what was built: {damage}: run `specpipe build"
    assert refused.exit_code == 1
    assert refused.stderr.startswith(said)
    assert refused.stderr.endswith("or serve it as it is with --allow-damaged\n")
    assert launched == []
    verified = run("verify", "--in-process", "--limit", "1")
    assert (verified.exit_code, verified.stderr.splitlines()[-1].startswith(said)) == (1, True)
    assert not (config.artifacts_dir / "verification.json").exists()

    allowed = run("serve", "--allow-damaged")
    assert allowed.exit_code == 0
    assert f"warning: {repository} is not what was built: {damage}" in allowed.stderr
    assert launched == [repository]

    assert run("build").exit_code == 0
    mended = run("serve", "--verify-files")
    assert mended.exit_code == 0, mended.stderr
    assert "warning" not in mended.stderr


def test_what_was_built_is_served_without_reading_it(
    config: PipelineConfig, launched: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> str:
        raise AssertionError("hashed")

    monkeypatch.setattr(manifests, "_digest", read)
    served = run("serve")
    assert (served.exit_code, served.stderr) == (0, "starting Triton ...\n")
    assert len(launched) == 1


def test_verify_files_says_how_much_it_hashed(config: PipelineConfig, launched: list[Path]) -> None:
    served = run("serve", "--verify-files")
    files = manifests.record_files(config.artifacts.repository)
    size = sum(record.size for record in files.values()) / 1e6
    assert re.fullmatch(
        rf"engines/python-code/model_repo: {len(files)} files hashed, {size:,.1f} MB at \d+\.\d\d "
        r"GB/s\nstarting Triton \.\.\.\n",
        served.stderr,
    )


def test_a_repository_without_its_manifest_is_refused(
    config: PipelineConfig, launched: list[Path]
) -> None:
    repository = config.artifacts.repository
    (repository.parent / "model_repo.manifest.json").unlink()
    refused = run("serve")
    assert refused.exit_code == 1
    assert "its manifest model_repo.manifest.json is missing" in refused.stderr
    assert launched == []


@pytest.mark.parametrize("how", ["copied", "moved"])
def test_a_repository_elsewhere_is_hashed_once(
    how: str, config: PipelineConfig, launched: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Path.cwd() / "elsewhere"
    shutil.copytree("engines", elsewhere, symlinks=True)  # times are kept, inodes are not
    if how == "moved":
        shutil.rmtree("engines")
    shutil.rmtree("models")  # only what is served is there
    monkeypatch.setattr(manifests, "_digests", {})
    hashed: list[Path] = []
    digest = manifests._digest
    monkeypatch.setattr(
        manifests, "_digest", lambda path, status: hashed.append(path) or digest(path, status)
    )
    first = run("serve", "--set", f"output_dir={elsewhere}")
    assert (first.exit_code, first.stderr) == (0, "starting Triton ...\n")
    assert elsewhere / "python-code" / "model_repo" / TARGET in hashed
    hashed.clear()
    assert run("serve", "--set", f"output_dir={elsewhere}").exit_code == 0
    assert hashed == []


def test_a_build_is_checked_back_to_its_checkpoints(config: PipelineConfig) -> None:
    repositories.check_artifacts(config)
    weights = Path("models/target/model.safetensors").resolve()
    keeping_time(weights, flip_last)
    with pytest.raises(RepositoryError) as caught:
        repositories.check_artifacts(config)
    assert str(caught.value) == (
        f"{config.artifacts_dir}/target/checkpoint was made from other files than those of today: "
        f"{weights} changed since target/convert read it: run `specpipe build --config x.yaml` "
        "again"
    )
    verified = run("verify", "--in-process", "--limit", "1")
    assert verified.exit_code == 1 and "made from other files" in verified.stderr


@pytest.mark.parametrize("stage", ["checkpoint", "engine"])
def test_verify_finds_damage_on_the_way(stage: str, config: PipelineConfig) -> None:
    """A file that was replaced, so that what was linked to it is whole."""
    folder = config.artifacts_dir / "target" / stage
    path = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    keeping_time(copy, flip_last)
    copy.replace(path)
    verified = run("verify", "--in-process", "--limit", "1")
    assert verified.exit_code == 1
    assert f"{folder} is not what was built: file {path.name} is not what was built" in (
        verified.stderr
    )


def in_place(path: Path) -> None:
    keeping_time(path, flip_last)


def by_rename(path: Path) -> None:
    """As rsync -t and tar do it."""
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    keeping_time(copy, flip_last)
    copy.replace(path)


@pytest.mark.parametrize("change", [in_place, by_rename])
def test_other_weights_of_equal_size_and_time_are_built(
    change: Callable[[Path], None], config: PipelineConfig
) -> None:
    weights = Path("models/draft/model.safetensors").resolve()
    change(weights)
    before = (config.artifacts_dir / "draft" / "engine" / "model.safetensors").read_bytes()
    preview = run("build", "--dry-run", "--json")
    stages = {stage["stage"]: stage["reasons"] for stage in json.loads(preview.stdout)["stages"]}
    assert stages["draft/convert"] == [f"input {weights} changed"]
    assert stages["target/convert"] == []
    assert run("build").exit_code == 0
    after = (config.artifacts_dir / "draft" / "engine" / "model.safetensors").read_bytes()
    assert before != after


@pytest.mark.parametrize("touch", ["chmod", "link", "touch", "copy"])
def test_a_file_that_is_the_same_is_hashed_once_and_built_never(
    touch: str, config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = Path("models/draft/model.safetensors").resolve()
    if touch == "chmod":
        weights.chmod(0o600)
    elif touch == "link":
        os.link(weights, weights.with_name("another.bin"))
    elif touch == "touch":
        weights.touch()
    else:
        shutil.copy2(weights, weights.with_name("copy"))
        weights.with_name("copy").replace(weights)
    monkeypatch.setattr(manifests, "_digests", {})
    hashed: list[Path] = []
    digest = manifests._digest
    monkeypatch.setattr(
        manifests, "_digest", lambda path, status: hashed.append(path) or digest(path, status)
    )
    built = run("build")
    assert built.stderr.count("up to date") == 6
    assert hashed == [weights]
    hashed.clear()
    assert run("build").stderr.count("up to date") == 6
    assert hashed == []


def test_verify_inputs_hashes_everything(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what no time and no inode tells, as a disk that forgets a bit."""
    weights = Path("models/draft/model.safetensors").resolve()
    is_untouched = manifests.FileRecord.is_untouched
    monkeypatch.setattr(
        manifests.FileRecord,
        "is_untouched",
        lambda self, status: status.st_ino == weights.stat().st_ino or is_untouched(self, status),
    )
    in_place(weights)
    monkeypatch.setattr(manifests, "_digests", {})
    assert run("build").stderr.count("up to date") == 6
    built = run("build", "--verify-inputs")
    assert f"draft/convert: input {weights} changed" in built.stderr
    assert "target/convert: up to date" in built.stderr
