"""Kind K12: plans and builds with quantization, and what is refused before work starts."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specpipe.build import execution, planning
from specpipe.build.load import load_config
from specpipe.checkpoints.unified import load_unified
from specpipe.cli import group
from specpipe.cli.group import main
from specpipe.config.sections import PipelineConfig
from specpipe.errors import CheckpointError, ConfigError, EngineBuildError
from specpipe.machine.libraries import with_extras
from tests.quiet import Quiet
from tests.recorder import Recorder
from tests.toy import write_toy_checkpoint
from tests.toy_tokenizers import words, write_tokenizer

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

Overrides = Sequence[str]


def quickstart(*overrides: str) -> PipelineConfig:
    return load_config(QUICKSTART, ["output_dir=/built", *overrides])


def names(*overrides: str) -> list[str]:
    return [planned.name for planned in planning.plan(quickstart(*overrides))]


def reasons(config: PipelineConfig) -> dict[str, tuple[str, ...]]:
    """The stages that would run, and why."""
    reports = execution.preview(planning.plan(config))
    return {report.stage: report.reasons for report in reports if report.reasons}


def test_a_quantized_pair_is_measured_before_engines_are_built() -> None:
    stages = planning.plan(
        quickstart(
            "draft.quantization={format: int8_wo}",
            "target.quantization={format: fp8, kv_cache: fp8}",
            "quality.max_mean_kl=0.1",
        )
    )
    folder = "/built/python-code"
    assert [(planned.name, str(planned.artifact)) for planned in stages] == [
        ("check", f"{folder}/check"),
        ("target/calibrate", f"{folder}/target/scales"),
        ("draft/quantize", f"{folder}/draft/checkpoint"),
        ("target/quantize", f"{folder}/target/checkpoint"),
        ("quality", f"{folder}/quality"),
        ("quality_limits", f"{folder}/quality_limits"),
        ("draft/build_engine", f"{folder}/draft/engine"),
        ("target/build_engine", f"{folder}/target/engine"),
        ("package", f"{folder}/model_repo"),
    ]
    reads = {
        planned.name: [other.name for other in stages if planned.reads(other)] for planned in stages
    }
    assert reads["target/quantize"] == ["target/calibrate"]
    assert reads["draft/quantize"] == []
    assert reads["quality"] == ["check", "draft/quantize", "target/quantize"]
    assert reads["quality_limits"] == ["quality"]
    assert reads["target/build_engine"] == ["target/quantize"]


@pytest.mark.parametrize(
    ("overrides", "between"),
    [
        (["target.quantization={format: fp8_pc_pt}"], ["target/quantize", "quality"]),
        (
            ["target.quantization={format: fp8_pc_pt, kv_cache: fp8}", "quality.measure=false"],
            ["target/calibrate", "target/quantize"],
        ),
        (
            ["target.quantization={format: nvfp4, export: true}"],
            ["target/calibrate", "target/export", "target/quantize", "quality"],
        ),
    ],
)
def test_stages_that_a_scheme_asks_for(overrides: list[str], between: list[str]) -> None:
    found = names(*overrides)
    assert [name for name in found if name.startswith(("target/", "quality"))] == [
        *between,
        "target/build_engine",
    ]
    assert found.index("draft/convert") < found.index("draft/build_engine")


def test_backend_pytorch_serves_the_exported_folder() -> None:
    sets = ["engine={runtime: tensorrt_llm, tensorrt_llm: {backend: pytorch}}"]
    sets += ["engine.max_seq_len=512", "target.quantization={format: fp8}"]
    assert names(*sets) == [
        "check",
        "target/calibrate",
        "target/quantize",
        "quality",
        "draft/collect",
        "target/export",
        "package",
    ]
    assert names(*sets, "quality.measure=false") == [
        "check",
        "target/calibrate",
        "draft/collect",
        "target/export",
        "package",
    ]
    package = planning.plan(quickstart(*sets))[-1].stage
    assert str(package.inputs().files[2]) == "/built/python-code/target/huggingface"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["target.quantization={format: int8_wo, exclude: ['*.mlp.down_proj']}"],
            "target: quantization.exclude: '*.mlp.down_proj' names no linear; they are named as"
            " transformer.layers.0.attention.qkv",
        ),
        (
            ["draft.quantization={format: int4_awq, awq_block_size: 96}"],
            "draft: int4_awq does not fit transformer.layers.0.attention.qkv: it has 128 inputs,"
            " which blocks of 96 do not divide; an awq_block_size of 64 divides them",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused_while_planning(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        planning.plan(quickstart(*overrides))
    assert str(caught.value) == f"{QUICKSTART}: {message}"


def test_an_export_that_cannot_be_is_refused_while_planning() -> None:
    scheme = "{format: fp8, export: true, exclude: ['*.mlp.fc']}"
    with pytest.raises(ConfigError) as caught:
        planning.plan(quickstart(f"target.quantization={scheme}"))
    assert str(caught.value) == (
        "target: quantization.exclude names only one of transformer.layers.0.mlp.fc and"
        " transformer.layers.0.mlp.gate, which runtimes that read Hugging Face's layout join into"
        " one; exclude both or none"
    )


def test_nothing_is_quantized_twice(tmp_path: Path) -> None:
    target = write_toy_checkpoint(tmp_path / "t", quantization_config={"quant_method": "awq"})
    with pytest.raises(CheckpointError) as caught:
        planning.plan(
            quickstart(f"target.checkpoint={target}", "target.quantization={format: fp8}")
        )
    assert str(caught.value) == (
        f"target {target}: it is already quantized: leave target.quantization out, or use the"
        " checkpoint that it was quantized from"
    )


FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}


def test_what_others_quantized_is_carried_over_unless_the_runtime_cannot(tmp_path: Path) -> None:
    target = write_toy_checkpoint(tmp_path / "t")
    (target / "hf_quant_config.json").write_text(json.dumps({"quantization": FP8}))
    config = quickstart(f"target.checkpoint={target}", "engine.max_seq_len=512")
    assert [planned.name for planned in planning.plan(config)][2] == "target/convert"
    engine = "engine={runtime: tensorrt, max_seq_len: 512}"
    with pytest.raises(EngineBuildError) as caught:
        planning.plan(quickstart(f"target.checkpoint={target}", engine))
    assert str(caught.value) == (
        "target: kv_cache_quant_algo FP8 is not supported by runtime 'tensorrt': the library's KV"
        " cache takes floating-point types only; engine.runtime torch and tensorrt_llm run it"
    )
    plain_cache = FP8 | {"kv_cache_quant_algo": None}
    (target / "hf_quant_config.json").write_text(json.dumps({"quantization": plain_cache}))
    with pytest.raises(EngineBuildError) as caught:
        planning.plan(
            quickstart(f"target.checkpoint={target}", engine.replace("}", ", weights: beside}"))
        )
    assert str(caught.value) == (
        "target: quantized weights cannot be inputs of an engine; set engine.weights to inside"
    )
    planned = planning.plan(quickstart(f"target.checkpoint={target}", engine))
    built = {one.name: one.stage.inputs().settings for one in planned}
    assert built["target/build_engine"]["compute_capabilities"] == ("8.9", "12.0", "12.1")
    assert built["draft/build_engine"]["compute_capabilities"][0] == "8.0"


def test_calibration_without_its_library_stops_before_any_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "modelopt" else find(name)
    )
    result = build(tmp_path, "target.quantization={format: fp8}")
    assert result.exit_code == 1
    assert result.stderr == (f"Error: quantization needs 'modelopt': {with_extras('quantize')}\n")
    assert not (tmp_path / "engines").exists()


def build(folder: Path, *overrides: str, options: Overrides = ()) -> Result:
    sets = [f"output_dir={folder / 'engines'}", *overrides]
    words_of = [word for override in sets for word in ("--set", override)]
    return CliRunner().invoke(main, ["build", "--config", str(QUICKSTART), *words_of, *options])


@pytest.mark.parametrize("scheme", ["format: int8_wo", "format: fp8, kv_cache: fp8"])
def test_build_quantizes_measures_and_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    few = "calibration: {num_samples: 16, max_seq_len: 64}"
    overrides = [f"{role}.quantization={{{scheme}, {few}}}" for role in ("draft", "target")]
    recorder = Recorder()
    monkeypatch.setattr(group, "StderrDisplay", lambda: recorder)
    result = build(tmp_path, *overrides)
    assert result.exit_code == 0, result.stderr
    artifacts = tmp_path / "engines" / "python-code"
    assert (artifacts / "model_repo" / "speculative" / "1" / "target" / "config.json").is_file()
    has_kv_cache = "kv_cache" in scheme
    assert all(count.done == count.total for count in recorder.counts)
    counted = {(count.phase, count.unit) for count in recorder.counts}
    assert ("target/calibrate" in dict(counted)) == has_kv_cache
    assert counted >= {
        ("target/quantize", "bytes"),
        ("target/build_engine", "bytes"),
        (f"quality: target, {'fp8 + fp8 KV' if has_kv_cache else 'int8_wo'}", "texts"),
        ("quality: acceptance", "answers"),
    }
    for role in ("draft", "target"):
        quantization = load_unified(artifacts / role / "checkpoint").config.quantization
        assert quantization.quant_algo == ("FP8" if has_kv_cache else "W8A16")
        assert quantization.kv_cache_quant_algo == ("FP8" if has_kv_cache else None)
        assert (artifacts / role / "scales").is_dir() == has_kv_cache
    report = json.loads((artifacts / "quality" / "report.json").read_bytes())
    assert [model["role"] for model in report["models"]] == ["draft", "target"]
    assert all(0 < model["divergence"]["mean_kl"] < 0.1 for model in report["models"])
    libraries = manifest(artifacts / "target" / "checkpoint")["versions"]
    assert libraries.keys() == {"specpipe", "torch"}
    if has_kv_cache:
        calibrated = manifest(artifacts / "target" / "scales")["versions"]
        assert calibrated.keys() == {"specpipe", "nvidia-modelopt", "torch", "transformers"}
    again = build(tmp_path, *overrides)
    assert again.stderr.count(": built\n") == 0


def manifest(artifact: Path) -> dict[str, Any]:
    path = artifact.with_name(f"{artifact.name}.manifest.json")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


@pytest.fixture
def toys(tmp_path: Path) -> PipelineConfig:
    """A pair of toys, whose target is calibrated on a file, built already."""
    for role in ("draft", "target"):
        write_tokenizer(write_toy_checkpoint(tmp_path / role), words())
    lines = (" ".join(f"w{4 + (7 * row + n) % 246}" for n in range(12)) for row in range(8))
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    (tmp_path / "toys.yaml").write_text(
        """\
name: toys
draft: {checkpoint: draft}
target:
  checkpoint: target
  quantization:
    format: int4_awq
    awq_block_size: 32
    calibration: {data: texts.txt, num_samples: 8, max_seq_len: 16}
quality: {measure: false}
engine: {max_seq_len: 64}
"""
    )
    config = load_config(tmp_path / "toys.yaml")
    execution.run(planning.plan(config), Quiet())
    assert reasons(config) == {}
    return config


def test_what_changed_is_told_and_what_it_touches_runs(toys: PipelineConfig) -> None:
    def changed(*overrides: str) -> dict[str, tuple[str, ...]]:
        return reasons(load_config(toys.source, overrides))

    built = {
        "target/build_engine": ("upstream target/quantize runs",),
        "package": ("upstream target/build_engine runs",),
    }
    scheme = "target.quantization"
    assert changed(f"{scheme}.awq_block_size=16") == {
        "target/calibrate": ("awq_block_size was 32, is now 16",),
        "target/quantize": ("awq_block_size was 32, is now 16", "upstream target/calibrate runs"),
        **built,
    }
    assert changed(f"{scheme}.calibration.num_samples=4") == {
        "target/calibrate": ("num_samples was 8, is now 4",),
        "target/quantize": ("upstream target/calibrate runs",),
        **built,
    }
    assert changed(f"{scheme}.exclude=['*.mlp.proj']") == {
        "target/calibrate": ('exclude was [], is now ["*.mlp.proj"]',),
        "target/quantize": (
            'exclude was [], is now ["*.mlp.proj"]',
            "upstream target/calibrate runs",
        ),
        **built,
    }
    texts = toys.base_dir / "texts.txt"
    texts.write_text(texts.read_text() + "\nw10 w11 w12")
    assert changed() == {
        "target/calibrate": (f"input {texts} changed",),
        "target/quantize": ("upstream target/calibrate runs",),
        **built,
    }


def test_another_format_is_told(toys: PipelineConfig) -> None:
    data = {"data": "texts.txt", "num_samples": 8, "max_seq_len": 16}
    scheme = {"format": "fp8", "calibration": data}
    found = reasons(load_config(toys.source, [f"target.quantization={json.dumps(scheme)}"]))
    assert "format was int4_awq, is now fp8" in found["target/calibrate"]
    assert "format was int4_awq, is now fp8" in found["target/quantize"]
    plain = reasons(load_config(toys.source, ["target.quantization=null"]))
    assert plain.keys() == {"target/convert", "target/build_engine", "package"}
