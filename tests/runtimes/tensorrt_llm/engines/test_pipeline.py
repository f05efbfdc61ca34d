"""The whole road by the command line, with stand-ins for NVIDIA's tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specpipe.cli.group import main
from specpipe.runtimes.tensorrt_llm.engines.engine_config import read_engine
from tests.fake_nvml import be
from tests.runtimes.tensorrt_llm.engines.tools import Tools, install
from tests.toy import write_toy_checkpoint
from tests.toy_tokenizers import words, write_tokenizer

YAML = """\
name: toy
draft:
  checkpoint: draft
target:
  checkpoint: target
  tp_size: 2
  quantization:
    format: fp8
    kv_cache: fp8
    calibration: {data: texts.txt, num_samples: 8, max_seq_len: 16}
speculation:
  num_draft_tokens: 3
engine:
  runtime: tensorrt_llm
  max_batch_size: 4
  max_seq_len: 128
  tensorrt_llm:
    compute_capability: "9.0"
    draft_gpu_ids: [0]
    target_gpu_ids: [1, 2]
"""


@pytest.fixture(autouse=True)
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for role in ("draft", "target"):
        write_tokenizer(write_toy_checkpoint(tmp_path / role), words())
    Path("pair.yaml").write_text(YAML)
    lines = (" ".join(f"w{4 + (7 * row + n) % 246}" for n in range(12)) for row in range(8))
    Path("texts.txt").write_text("\n".join(lines))


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return install(tmp_path, monkeypatch, "docker")


def build(*options: str) -> Result:
    return CliRunner().invoke(main, ["build", "--config", "pair.yaml", *options])


VARIES = "rank*.engine and the timing cache: trtllm-build chooses kernels by timing them"


def test_two_checkpoints_become_a_repository(docker: Tools) -> None:
    result = build()
    assert result.exit_code == 0, result.output
    manifests = {
        name: json.loads(Path(f"engines/toy/target/{name}.manifest.json").read_text())["build"]
        for name in ("checkpoint", "engine")
    }
    assert "varies" not in manifests["checkpoint"]
    assert manifests["engine"]["varies"] == VARIES
    engine = Path("engines/toy/model_repo/target/1/engine")
    assert sorted(path.name for path in engine.glob("rank*.engine")) == [
        "rank0.engine",
        "rank1.engine",
    ]
    facts = json.loads((engine / "specpipe.json").read_text())
    assert (facts["tensorrt_llm"], facts["world_size"]) == ("1.2.1", 2)
    built = read_engine(engine)
    assert (built.quant_algo, built.kv_cache_quant_algo) == ("FP8", "FP8")
    assert built.use_paged_context_fmha
    assert "target/build_engine: [TensorRT-LLM] TensorRT-LLM version: 1.2.1" in result.stderr
    num_calls = len(docker.docker_calls())
    again = build()
    assert again.stderr.count("up to date") == 8
    assert len(docker.docker_calls()) == num_calls


def test_dry_run_prints_a_command_for_each_tool(docker: Tools) -> None:
    result = build("--dry-run", "--json")
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)["stages"]
    stages = {report["stage"]: report.get("commands", []) for report in reports}
    assert {name: len(lines) for name, lines in stages.items()} == {
        "check": 0,
        "draft/convert": 0,
        "target/calibrate": 0,
        "target/quantize": 0,
        "quality": 0,
        "draft/build_engine": 1,
        "target/build_engine": 1,
        "package": 0,
    }
    assert not Path("engines").exists()
    assert not (docker.state / "calls.jsonl").exists()


def test_nothing_runs_where_engines_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    result = build()
    assert result.exit_code == 1
    assert "needs trtllm-build or docker, and neither is on the PATH" in result.stderr
    assert not Path("engines").exists()


def test_what_cannot_work_is_refused_before_anything_runs(docker: Tools) -> None:
    result = build("--set", "engine.tensorrt_llm.compute_capability='8.6'")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: target.quantization.format 'fp8' does not run on a GPU of compute capability 8.6;"
        " formats that do: int8_sq, int4_awq, int8_wo, int4_wo; or leave quantization out\n"
    )
    assert not Path("engines").exists()


def test_a_failed_engine_leaves_the_repository_as_it_was(
    docker: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build().exit_code == 0
    before = Path("engines/toy/target/engine/config.json").read_text()
    monkeypatch.setenv("FAKE_FAIL", "gpu_memory")
    result = build("--set", "engine.max_batch_size=8")
    assert result.exit_code == 1
    assert "Error: draft: trtllm-build failed: the GPU ran out of memory" in result.stderr
    assert Path("engines/toy/target/engine/config.json").read_text() == before
    monkeypatch.delenv("FAKE_FAIL")
    assert build().stderr.count("up to date") == 8


def lock() -> tuple[Any, Result]:
    result = CliRunner().invoke(main, ["lock", "--config", "pair.yaml"])
    assert result.exit_code == 0, result.output
    return json.loads(Path("pair.lock").read_text()), result


def test_lock_has_the_digest_of_the_builders_image(
    docker: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "registry.example/b@sha256:bb registry.example/a@sha256:aa"
    monkeypatch.setenv("FAKE_DIGESTS", names)
    locked, result = lock()
    stages = ("draft/build_engine", "target/build_engine")
    assert result.stderr == ""
    assert [locked["stages"][name]["tool"] for name in stages] == [
        {"image_digest": "sha256:aa"},
        {"image_digest": "sha256:aa"},
    ]
    assert locked["not_reproducible"] == dict.fromkeys(stages, VARIES)
    monkeypatch.setenv("FAKE_DIGESTS", "registry.example/a@sha256:cc")
    assert build("--locked").stderr.splitlines()[1:3] == [
        "  - stages.draft/build_engine.tool.image_digest: locked sha256:aa, here sha256:cc",
        "  - stages.target/build_engine.tool.image_digest: locked sha256:aa, here sha256:cc",
    ]


def test_an_image_that_docker_has_no_digest_of_is_not_compared(
    docker: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = ("draft/build_engine", "target/build_engine")
    entries = ", ".join(f"stages.{name}.tool.image_digest" for name in digests)
    _, result = lock()
    assert result.stderr == f"not compared, since unknown: {entries}\n"
    monkeypatch.setenv("FAKE_DIGESTS", "registry.example/a@sha256:aa")
    result = build("--locked", "--dry-run")
    assert (result.exit_code, result.stderr) == (0, f"not compared, since unknown: {entries}\n")


def test_lock_has_the_versions_of_a_builder_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "trtllm-build")
    metadata = tmp_path / "tensorrt_llm-1.2.1.dist-info"  # for the builder's Python, this one
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.2.1\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VERSION", "13.1.0.036")
    assert lock()[0]["stages"]["target/build_engine"]["tool"] == {
        "image_digest": "unknown",
        "tensorrt_llm": "1.2.1",
        "tensorrt": "unknown",
        "cuda": "13.1.0.036",
    }


def test_lock_is_written_where_no_engine_can_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    assert lock()[0]["stages"]["target/build_engine"]["tool"] == {"image_digest": "unknown"}
