from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from specpipe.build.stages.convert import convert
from specpipe.errors import EngineBuildError
from specpipe.runtimes.torch.build import BuildTorchEngine
from tests.runtimes.torch.engines import build_engine
from tests.toy import toy_config, toy_tensors, write_tensors, write_toy_checkpoint

GEMMA2_NORMS = ("attention_norm", "dense_norm", "mlp_norm", "mlp_out_norm")


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
    settings = {k: changes.pop(k) for k in ("max_seq_len", "kv_cache_tokens") if k in changes}
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


@pytest.mark.parametrize(
    ("family", "name", "place"),
    [
        ("llama", "model.layers.1.mlp.down_proj.weight", (3, 5)),
        ("llama", "model.layers.0.self_attn.v_proj.weight", (15, 0)),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight", (100, 31)),
        ("llama", "lm_head.weight", (255, 1)),
    ],
)
def test_what_the_engines_dtype_cannot_hold_is_refused(
    family: str, name: str, place: tuple[int, int], tmp_path: Path
) -> None:
    """Also where the engine moves or joins what stands there."""
    hf = write_toy_checkpoint(tmp_path / "hf", family)
    tensors = toy_tensors(toy_config(family))
    tensors[name][place] = 0x4789  # 70144 in bfloat16
    (hf / "model.safetensors").unlink()
    write_tensors(hf / "model.safetensors", tensors)
    with pytest.raises(EngineBuildError) as caught:
        build_engine(hf, tmp_path, dtype="float16")
    assert str(caught.value) == (
        f"target: {name}{list(place)} is 70144, but float16 holds 65504 at most; set engine.dtype "
        "to bfloat16"
    )


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
    assert refusal(tmp_path, kv_cache_tokens=640, max_seq_len=320) == (
        "target: engine.kv_cache_memory has no effect on a CPU, and torch sees no GPU here: leave "
        "it out"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_that_are_one_plus_a_weight_stay_in_float32(dtype: str, tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "hf", "gemma2", tie_word_embeddings=True)
    engine = build_engine(folder, tmp_path, dtype=dtype)
    with safe_open(engine / "model.safetensors", framework="np") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    norms = {f"layers.{n}.{name}.weight" for n in (0, 1) for name in GEMMA2_NORMS}
    stored = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    assert {name for name in dtypes if "norm" in name} == norms | {"norm.weight"}
    assert dtypes == {name: "F32" if "norm" in name else stored for name in dtypes}


def test_norms_that_trtllm_build_has_rounded_are_computed_with_as_they_are(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path / "hf", "gemma2", tie_word_embeddings=True)
    norms = {}
    for name in ("exact", "rounded"):
        checkpoint = tmp_path / name / "checkpoint"
        checkpoint.mkdir(parents=True)
        convert(folder, checkpoint, for_trtllm_build=name == "rounded")
        engine = build_engine(folder, tmp_path / name, dtype="bfloat16")
        with safe_open(engine / "model.safetensors", framework="pt") as file:
            assert file.get_slice("norm.weight").get_dtype() == "F32"
            norms[name] = file.get_tensor("norm.weight")
    assert torch.equal(norms["rounded"], norms["exact"].bfloat16().float())
    assert not torch.equal(norms["rounded"], norms["exact"])


def test_linear_scaling_stretches_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    folder = write_toy_checkpoint(tmp_path / "hf", rope_parameters=rope, max_position_embeddings=80)
    assert (build_engine(folder, tmp_path, max_seq_len=320) / "config.json").is_file()


def test_yarn_stretches_the_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 80}
    folder = write_toy_checkpoint(tmp_path / "hf", rope_parameters=rope, max_position_embeddings=80)
    assert (build_engine(folder, tmp_path, max_seq_len=320) / "config.json").is_file()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf", vocab_size=250)
    (tmp_path / "other").mkdir()
    whole = build_engine(checkpoint, tmp_path, dtype=dtype)
    monkeypatch.setattr("specpipe.runtimes.torch.layout._BLOCK_BYTES", 4 * 250 * 3)
    in_pieces = build_engine(checkpoint, tmp_path / "other", dtype=dtype)
    for path in sorted(whole.iterdir()):
        assert path.read_bytes() == (in_pieces / path.name).read_bytes()


def test_planning_a_build_does_not_import_torch() -> None:
    code = (
        "import sys; from specpipe.runtimes.runtime import load_runtime; load_runtime('torch'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
