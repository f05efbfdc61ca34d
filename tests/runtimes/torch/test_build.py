from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from specpipe.errors import EngineBuildError
from specpipe.runtimes.torch.build import BuildTorchEngine
from specpipe.stages.convert import convert
from tests.runtimes.torch.engines import build_engine
from tests.toy import write_toy_checkpoint


def shapes(engine: Path) -> dict[str, list[int]]:
    with safe_open(engine / "model.safetensors", framework="np") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def refusal(work: Path, **changes: Any) -> str:
    """Returns why an engine with a changed unified config or stage setting is refused."""
    checkpoint = work / "checkpoint"
    if not checkpoint.exists():
        checkpoint.mkdir()
        convert(write_toy_checkpoint(work / "hf"), checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    settings = {key: changes.pop(key) for key in ("max_seq_len",) if key in changes}
    (checkpoint / "config.json").write_text(json.dumps(config | changes))
    try:
        with pytest.raises(EngineBuildError) as caught:
            build_engine(work / "hf", work, **settings)
    finally:
        (checkpoint / "config.json").write_text(json.dumps(config))
        (work / "engine").rmdir()
    return str(caught.value)


def test_engine_folder(tmp_path: Path) -> None:
    engine = build_engine(write_toy_checkpoint(tmp_path / "hf", "qwen3"), tmp_path)
    config = json.loads((engine / "config.json").read_text())
    unified = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert list(config) == ["version", "runtime", "pretrained_config", "build_config"]
    assert config["pretrained_config"] == unified
    assert config["build_config"] == {
        "max_batch_size": 4,
        "max_seq_len": 320,
        "max_num_tokens": 64,
        "max_draft_len": 8,
        "max_beam_width": 1,
        "kv_cache_type": "CONTINUOUS",
        "dtype": "float32",
        "device": "cpu",
    }
    assert shapes(engine) == {
        "embedding.weight": [256, 32],
        **{
            f"layers.{n}.{name}.weight": shape
            for n in (0, 1)
            for name, shape in {
                "attention_norm": [32],
                "qkv": [32, 64],
                "q_norm": [8],
                "k_norm": [8],
                "dense": [32, 32],
                "mlp_norm": [32],
                "mlp_in": [32, 128],
                "mlp_out": [64, 32],
            }.items()
        },
        "norm.weight": [32],
        "head.weight": [32, 256],
    }


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "hf", tie_word_embeddings=True)
    names = shapes(build_engine(folder, tmp_path))
    assert "embedding.weight" not in names
    assert names["head.weight"] == [32, 256]


def test_splitting_over_ranks_changes_nothing(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "hf", "qwen2")
    whole = build_engine(folder, tmp_path / "whole")
    (tmp_path / "split" / "checkpoint").mkdir(parents=True)
    convert(folder, tmp_path / "split" / "checkpoint", tp_size=4, pp_size=2)
    split = build_engine(folder, tmp_path / "split")
    weights = "model.safetensors"
    assert (split / weights).read_bytes() == (whole / weights).read_bytes()


def test_stage_describes_its_inputs() -> None:
    stage = BuildTorchEngine(
        role="draft",
        checkpoint=Path("draft/checkpoint"),
        max_batch_size=8,
        max_seq_len=1024,
        max_draft_len=4,
        max_num_tokens=256,
    )
    assert stage.name == "draft/build_engine"
    assert stage.inputs().files == (Path("draft/checkpoint"),)
    assert stage.inputs().settings == {
        "format": 1,
        "max_batch_size": 8,
        "max_seq_len": 1024,
        "max_draft_len": 4,
        "max_num_tokens": 256,
        "dtype": "auto",
        "device": "auto",
    }


def test_what_would_compute_something_else_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, max_seq_len=513) == (
        "target: engine.max_seq_len 513 is more than the model's context of 512 tokens; lower it"
    )
    assert refusal(tmp_path, sliding_window=256) == (
        "target: the model attends over a sliding window of 256 tokens, which runtime 'torch' does "
        "not; set engine.max_seq_len to at most 256 (it is 320), where the window makes no "
        "difference"
    )
    assert refusal(tmp_path, quantization={"quant_algo": "FP8", "kv_cache_quant_algo": None}) == (
        "target: quant_algo FP8 is not supported by runtime 'torch', which runs plain weights"
    )


def test_a_window_as_long_as_the_text_is_no_window(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "hf", "mistral", sliding_window=256)
    assert (build_engine(folder, tmp_path, max_seq_len=256) / "config.json").is_file()


def test_linear_scaling_stretches_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    folder = write_toy_checkpoint(tmp_path / "hf", rope_parameters=rope, max_position_embeddings=80)
    assert (build_engine(folder, tmp_path, max_seq_len=320) / "config.json").is_file()


def test_planning_a_build_does_not_import_torch() -> None:
    code = (
        "import sys; from specpipe.runtimes.base import load_runtime; load_runtime('torch'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
