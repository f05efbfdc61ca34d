"""What only `trtllm-build` needs, or cannot do, is nothing to other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from specpipe.build.load import load_config
from specpipe.build.planning import plan
from specpipe.errors import SpecpipeError
from specpipe.stage import PlannedStage
from tests.toy import write_toy_checkpoint

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
WINDOW = {"sliding_window": 512}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 512}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONG = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}

Checkpoint = dict[str, Any]


def quantized(format: str, **settings: Any) -> Checkpoint:
    return {"quantization": {"format": format, **settings}}


def target_stages(
    folder: Path, runtime: str, family: str, model: Checkpoint, target: Checkpoint
) -> list[PlannedStage]:
    checkpoint = folder / "hf"
    if not checkpoint.exists():
        write_toy_checkpoint(checkpoint, family, **SIZES, **model)
    config = {
        "name": "toy",
        "draft": {"checkpoint": "hf"},
        "target": {"checkpoint": "hf", **target},
        "engine": {"runtime": runtime, "max_seq_len": 128},
        "quality": {"measure": False},
    }
    path = folder / "pair.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return [made for made in plan(load_config(path)) if made.name.startswith("target/")]


REFUSED = [
    ("qwen3", {}, quantized("fp8_pc_pt")),
    ("gemma2", WINDOW, quantized("fp8_pc_pt")),
    ("phi3", LONG, quantized("fp8_pc_pt")),
    ("phi3", {}, {"pp_size": 2}),
    ("llama", {}, quantized("int8_wo", quantize_lm_head=True)),
    ("llama", {}, quantized("int4_wo", quantize_lm_head=True)),
]
OTHERWISE = [
    ("gemma2", WINDOW, {}),
    ("gemma2", WINDOW, quantized("int8_wo")),
    ("llama", {"rope_parameters": YARN}, {}),
    ("llama", {}, quantized("int8_wo", exclude=["*.mlp.proj"])),
]
THE_SAME = [
    ("llama", {}, {}),
    ("llama", {}, quantized("int8_wo")),
    ("llama", {}, quantized("int8_wo", exclude=["*.mlp*"])),
    ("qwen3", {}, quantized("int4_wo")),
    ("phi3", {}, {"tp_size": 2}),
]


@pytest.mark.parametrize(("family", "model", "target"), REFUSED + OTHERWISE)
def test_torch_runs_them_all(
    family: str, model: Checkpoint, target: Checkpoint, tmp_path: Path
) -> None:
    checkpoint, engine = target_stages(tmp_path, "torch", family, model, target)
    assert "for_trtllm_build" not in checkpoint.stage.inputs().settings
    for planned in (checkpoint, engine):
        planned.artifact.mkdir(parents=True)
        planned.stage.run(planned.artifact)
    assert (engine.artifact / "config.json").is_file()


def test_tensorrt_reads_what_it_did(tmp_path: Path) -> None:
    yarn = {"rope_parameters": YARN}
    checkpoint, *_ = target_stages(tmp_path, "tensorrt", "llama", yarn, {})
    assert checkpoint.stage.inputs().settings == {"tp_size": 1, "pp_size": 1}


@pytest.mark.parametrize(("family", "model", "target"), REFUSED)
def test_trtllm_build_is_given_nothing_that_it_cannot_build(
    family: str, model: Checkpoint, target: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(SpecpipeError):
        target_stages(tmp_path, "tensorrt_llm", family, model, target)


@pytest.mark.parametrize(("family", "model", "target"), OTHERWISE + THE_SAME)
def test_only_what_trtllm_build_needs_otherwise_is_made_again(
    family: str, model: Checkpoint, target: Checkpoint, tmp_path: Path
) -> None:
    checkpoint, _ = target_stages(tmp_path, "tensorrt_llm", family, model, target)
    is_otherwise = (family, model, target) in OTHERWISE
    assert checkpoint.stage.inputs().settings.get("for_trtllm_build", False) is is_otherwise
