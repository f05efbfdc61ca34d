"""configs/quickstart-rtx.yaml from checkpoints to a repository, by the commands, without a GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specpipe.checkpoints.checkpoint import read_safetensors_header
from specpipe.cli.group import main
from specpipe.triton.repository import lint
from tests.fake_nvml import be

trt = pytest.importorskip("tensorrt_rtx")
pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "quickstart-rtx.yaml"
DISTRIBUTION = "tensorrt-rtx-cu13"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch)


def run(command: str, output_dir: Path, *options: str, config: Path = CONFIG) -> Result:
    """Runs a command on the pair; what it builds goes into a folder of the test."""
    into = ["--config", str(config), "--set", f"output_dir={output_dir}"]
    return CliRunner().invoke(main, [command, *into, *options])


def built(output_dir: Path, *options: str, config: Path = CONFIG) -> dict[str, str]:
    """Builds; returns what became of each stage, in order."""
    result = run("build", output_dir, *options, config=config)
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith("to build: ")]
    return dict(line.rsplit(": ", 1) for line in lines)


def reasons(output_dir: Path) -> dict[str, list[str]]:
    """Why each stage would run that would."""
    result = run("build", output_dir, "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    stages = json.loads(result.stdout)["stages"]
    return {stage["stage"]: stage["reasons"] for stage in stages if stage["reasons"]}


def inspected(folder: Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(main, ["inspect", str(folder), "--verify", "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["engines"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pair is built, once."""
    folder = tmp_path_factory.mktemp("rtx")
    stages = built(folder)
    assert stages == dict.fromkeys(
        (
            "check",
            "draft/convert",
            "target/convert",
            "draft/build_engine",
            "target/build_engine",
            "package",
        ),
        "built",
    )
    return folder


@pytest.fixture
def copied(output_dir: Path, tmp_path: Path) -> Path:
    """A copy of what was built, to be spoilt; files keep their times, and share no disk."""
    shutil.copytree(output_dir, tmp_path / "copied", copy_function=shutil.copy2)
    return tmp_path / "copied"


def test_two_engines_and_a_repository(output_dir: Path) -> None:
    pair = output_dir / "python-code-rtx"
    assert lint.lint(pair / "model_repo") == []
    for role in ("draft", "target"):
        packed = pair / "model_repo/speculative/1" / role
        for name in ("config.json", "rank0.engine"):
            assert (packed / name).samefile(pair / role / "engine" / name)
    engines = inspected(pair)
    assert [engine["engine"] for engine in engines] == [
        str(pair / role / "engine") for role in ("draft", "target")
    ]
    for engine, num_layers in zip(engines, (2, 6), strict=True):
        assert engine["runtime"] == "tensorrt"
        assert engine["versions"]["tensorrt_rtx"] == trt.__version__
        assert engine["compute_capabilities"] == ["8.0", "8.6", "8.9", "12.0", "12.1"]
        assert engine["layers"]["attention_output"] == num_layers
        assert engine["layers"]["kv_cache_update"] == 2 * num_layers
        assert engine["limits"]["max_seq_len"] == 1024
        assert engine["dtype"] == "bfloat16"
        # The weights are in it.
        assert engine["files"]["rank0.engine"] > engine["memory"]["weights_bytes"]


def test_a_second_build_does_nothing(output_dir: Path) -> None:
    assert set(built(output_dir).values()) == {"up to date"}


def test_new_weights_beside_an_engine_take_no_build(tmp_path: Path) -> None:
    """Other weights of the same shape: what was built for the shape stays."""
    shutil.copytree(ROOT / "models/python-code", tmp_path / "models/python-code")
    (tmp_path / "configs").mkdir()
    config = tmp_path / "configs/pair.yaml"
    config.write_text(
        CONFIG.read_text().replace("runtime: tensorrt\n", "runtime: tensorrt\n  weights: beside\n")
    )
    first = built(tmp_path / "out", config=config)
    assert [stage for stage in first if stage.startswith("draft/")] == [
        "draft/convert",
        "draft/build_plan",
        "draft/place_weights",
    ]
    assert set(first.values()) == {"built"}
    draft = tmp_path / "out/python-code-rtx/draft"
    plan = (draft / "plan/rank0.engine").read_bytes()
    before = (draft / "engine/rank0_managed_weights.safetensors").read_bytes()
    change_a_weight(tmp_path / "models/python-code/draft/model.safetensors")
    again = built(tmp_path / "out", config=config)
    assert [stage for stage, what in again.items() if what == "built"] == [
        "draft/convert",
        "draft/place_weights",
        "package",
    ]
    after = (draft / "engine/rank0_managed_weights.safetensors").read_bytes()
    assert len(after) == len(before)
    # The embedding, which stands there as the head too.
    assert sum(a != b for a, b in zip(after, before, strict=True)) == 2
    packed = tmp_path / "out/python-code-rtx/model_repo/speculative/1/draft"
    assert (packed / "rank0.engine").read_bytes() == plan
    assert (packed / "rank0_managed_weights.safetensors").read_bytes() == after
    (engine,) = inspected(packed)
    assert engine["settings"]["weights"] == "beside"
    assert engine["files"]["rank0.engine"] == len(plan)


def change_a_weight(path: Path) -> None:
    """Changes one bit of the first number of one tensor."""
    offset = min(info.offset for info in read_safetensors_header(path).values())
    flip_a_bit(path, offset)


def flip_a_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_changed_byte_is_found_and_mended(copied: Path) -> None:
    engine = copied / "python-code-rtx/draft/engine"
    flip_a_bit(engine / "rank0.engine", 1000)
    result = CliRunner().invoke(main, ["inspect", str(engine)])
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: {engine} is damaged: file rank0.engine is not what was built: build it again\n"
    )
    assert reasons(copied)["draft/build_engine"] == [
        "damaged: file rank0.engine is not what was built"
    ]
    assert [stage for stage, what in built(copied).items() if what == "built"] == [
        "draft/build_engine",
        "package",
    ]
    inspected(engine)


def test_a_changed_byte_is_not_served(copied: Path) -> None:
    repository = copied / "python-code-rtx/model_repo"
    flip_a_bit(repository / "speculative/1/target/rank0.engine", 1000)
    result = run("serve", copied)
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"Error: {repository} is not what was built: file speculative/1/target/rank0.engine is not "
        "what was built: run "
    )
    result = run("serve", copied, "--allow-damaged")
    assert result.exit_code == 1
    (fault,) = refusal(result, repository)
    assert fault.startswith("target: rank0.engine is damaged")


def test_another_version_of_the_library(copied: Path) -> None:
    """Its engines are stale, and those of the repository are not served."""
    pair = copied / "python-code-rtx"
    manifest = pair / "draft/engine.manifest.json"
    recorded = json.loads(manifest.read_text())
    here = recorded["versions"][DISTRIBUTION]
    recorded["versions"][DISTRIBUTION] = "1.6.0.99"
    manifest.write_text(json.dumps(recorded))
    assert reasons(copied) == {
        "draft/build_engine": [f"{DISTRIBUTION} was 1.6.0.99, is now {here}"],
        "package": ["upstream draft/build_engine runs"],
    }
    packed = pair / "model_repo/speculative/1/draft/config.json"
    config = json.loads(packed.read_text())
    config["builder"]["library_version"] = "1.6.0.99"
    packed.write_text(json.dumps(config))
    result = run("serve", copied, "--allow-damaged")
    assert result.exit_code == 1
    assert refusal(result, pair / "model_repo") == [
        f"draft: built with tensorrt_rtx 1.6.0.99, here is {trt.__version__}"
    ]


def refusal(result: Result, repository: Path) -> list[str]:
    """What a refused `serve` says of the engines, before what is unknown and what to do."""
    said = result.stderr.partition("Error: ")[2]
    first, *faults = said.partition("\nalso unknown:")[0].splitlines()
    assert first == f"the engines of {repository} do not fit what would run them:"
    return [fault.strip() for fault in faults]


def test_nothing_is_served_without_a_gpu(output_dir: Path) -> None:
    result = run("serve", output_dir)
    assert result.exit_code == 1
    assert "the GPU here is unknown: NVIDIA's driver shows none" in result.stderr
    assert result.stderr.splitlines()[-2:] == [
        f"build them again here: specpipe build --config {CONFIG} --set output_dir={output_dir}"
        " --set engine.runtime=torch",
        "or serve them as they are with --allow-unknown-engine-facts",
    ]
