from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specpipe import cache
from specpipe.errors import EngineBuildError, RuntimeUnavailable
from specpipe.runtimes.base import PairPlan
from specpipe.runtimes.tensorrt_llm import build, refusals
from specpipe.runtimes.tensorrt_llm.engine_config import read_engine
from specpipe.runtimes.tensorrt_llm.quantize import Quantize
from tests.runtimes.tensorrt_llm.tools import Tools, install, make, toy_pair

AWQ = {"format": "int4_awq", "awq_block_size": 16}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "gpus", list)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return install(tmp_path, monkeypatch, "docker")


def quantized(folder: Path, scheme: dict[str, Any], **changes: Any) -> PairPlan:
    return toy_pair(folder, target={"quantization": scheme, **changes})


def stage_of(pair: PairPlan) -> Quantize:
    _, (planned, _) = build.engine_stages(pair)
    assert isinstance(planned.stage, Quantize)
    return planned.stage


def failure(folder: Path, scheme: dict[str, Any], **changes: Any) -> str:
    stage = stage_of(quantized(folder, scheme, **changes))
    with pytest.raises(EngineBuildError) as caught:
        cache.build(stage, folder / "checkpoint")
    assert not (folder / "checkpoint").exists()
    return str(caught.value)


def test_quantization_takes_the_place_of_conversion(tmp_path: Path, docker: Tools) -> None:
    pair = quantized(tmp_path, {"format": "fp8", "kv_cache": "fp8"}, tp_size=2)
    draft, target = build.engine_stages(pair)
    assert [planned.name for planned in (*draft, *target)] == [
        "draft/convert",
        "draft/build_engine",
        "target/quantize",
        "target/build_engine",
    ]
    engine = make(pair, "target")
    built = read_engine(engine)
    assert (built.quant_algo, built.kv_cache_quant_algo) == ("FP8", "FP8")
    assert built.use_paged_context_fmha
    assert (built.world_size, built.logits_dtype) == (2, "float32")


def test_exact_command(tmp_path: Path, docker: Tools) -> None:
    pair = quantized(tmp_path, {"format": "fp8", "kv_cache": "fp8"}, tp_size=2)
    _, (planned, _) = build.engine_stages(pair)
    assert planned.commands is not None
    (line,) = planned.commands(planned.artifact)
    image = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    assert " ".join(line[line.index(image) + 1 :]) == (
        "python3 /app/examples/quantization/quantize.py --model_dir /specpipe/model"
        " --output_dir /specpipe/checkpoint --qformat fp8 --kv_cache_dtype fp8 --dtype auto"
        " --device cuda --device_map auto --calib_dataset cnn_dailymail --calib_size 512"
        " --calib_max_seq_length 512 --tokenizer_max_seq_length 2048 --batch_size 1"
        " --awq_block_size 128 --tp_size 2 --pp_size 1 --cp_size 1 --seed 1234"
    )
    assert line[line.index("--gpus") + 1] == '"device=0,1"'
    assert f"type=bind,source={pair.target.folder},target=/specpipe/model,readonly" in line


def test_logits_dtype_is_mended(tmp_path: Path, docker: Tools) -> None:
    stage = stage_of(quantized(tmp_path, {"format": "fp8"}))
    cache.build(stage, tmp_path / "checkpoint")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["logits_dtype"] == "float32"


def test_kv_cache_type_that_nobody_asked_for_is_taken_out(tmp_path: Path, docker: Tools) -> None:
    """An older ModelOpt leaves FP8 with int4_awq; the engine could then not verify drafts."""
    engine = make(quantized(tmp_path, AWQ), "target")
    built = read_engine(engine)
    assert (built.quant_algo, built.kv_cache_quant_algo) == ("W4A16_AWQ", None)
    assert built.use_paged_context_fmha


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (
            "config['quantization']['quant_algo'] = None",
            "quant_algo is None, but target.quantization.format fp8 is FP8",
        ),
        (
            "config['quantization']['kv_cache_quant_algo'] = None",
            "kv_cache_quant_algo is None, not FP8",
        ),
        ("config['vocab_size'] = 320", "the vocabulary has 320 rows, expected 256 (256 before)"),
        ("config['mapping']['world_size'] = 2", "it is for 2 ranks, not 1"),
        ("(out / 'rank0.safetensors').unlink()", "rank0.safetensors is missing"),
    ],
)
def test_other_weights_than_asked_for_never_land(
    tmp_path: Path, docker: Tools, monkeypatch: pytest.MonkeyPatch, edit: str, line: str
) -> None:
    monkeypatch.setenv("FAKE_EDIT", edit)
    assert failure(tmp_path, {"format": "fp8", "kv_cache": "fp8"}) == (
        f"target: quantization ended well, but not with what was asked for:\n  - {line}"
    )


def test_config_that_cannot_be_read(
    tmp_path: Path, docker: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EDIT", "del config['mapping']")
    assert failure(tmp_path, {"format": "fp8"}) == (
        "target: quantization ended well, but config.json of its checkpoint cannot be read"
        " (KeyError: 'mapping')"
    )


def test_calibration_texts_of_this_machine_are_mounted_and_count_as_input(
    tmp_path: Path, docker: Tools
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "train.jsonl").write_text("{}\n")
    calibration = {"dataset": str(texts), "num_samples": 8, "max_seq_len": 64, "batch_size": 2}
    stage = stage_of(quantized(tmp_path, {"format": "fp8", "calibration": calibration}))
    cache.build(stage, tmp_path / "checkpoint")
    line = docker.docker_calls()[-1]
    assert line[line.index("--calib_dataset") + 1] == "/specpipe/calibration"
    assert line[line.index("--calib_size") + 1] == "8"
    assert line[line.index("--batch_size") + 1] == "2"
    (texts / "train.jsonl").write_text('{"text": "x"}\n')
    assert cache.stale_reasons(stage, tmp_path / "checkpoint") == [
        f"input {texts / 'train.jsonl'} changed"
    ]


def test_links_of_a_hub_snapshot_are_followed_into_the_mount(tmp_path: Path, docker: Tools) -> None:
    pair = quantized(tmp_path, {"format": "fp8"})
    snapshot, blobs = pair.target.folder, tmp_path / "blobs"
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("..", "blobs", path.name))
    cache.build(stage_of(pair), tmp_path / "checkpoint")
    line = docker.docker_calls()[-1]
    assert f"type=bind,source={tmp_path},target=/specpipe/model,readonly" in line
    assert line[line.index("--model_dir") + 1] == "/specpipe/model/target"


def test_tokenizer_and_settings_are_inputs(tmp_path: Path, docker: Tools) -> None:
    stage = stage_of(quantized(tmp_path, {"format": "fp8"}))
    cache.build(stage, tmp_path / "checkpoint")
    other = stage_of(quantized(tmp_path, {"format": "fp8", "calibration": {"num_samples": 64}}))
    assert cache.stale_reasons(other, tmp_path / "checkpoint") == [
        "quantization.calibration.num_samples was 512, is now 64"
    ]
    assert stage.checkpoint / "tokenizer.json" in stage.inputs().files


def test_failure_names_the_cause(tmp_path: Path, docker: Tools) -> None:
    calibration = {"dataset": str(tmp_path / "config")}
    (tmp_path / "config").write_text("no folder")
    message = failure(tmp_path, {"format": "fp8", "calibration": calibration})
    assert message.startswith(
        "target: quantization failed: the calibration texts cannot be had: set"
        " target.quantization.calibration.dataset to a folder of this machine\n"
    )


def test_image_without_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "trtllm-build")
    stage = stage_of(quantized(tmp_path, {"format": "fp8"}))
    with pytest.raises(RuntimeUnavailable, match="needs /app/examples/quantization/quantize.py"):
        stage.run(tmp_path)
