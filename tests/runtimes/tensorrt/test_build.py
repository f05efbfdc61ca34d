"""Engines built for real: TensorRT for RTX builds without a GPU."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx as trt

from specpipe import __version__, progress
from specpipe.build.stages.convert import convert
from specpipe.checkpoints.checkpoint import read_safetensors_header
from specpipe.checkpoints.unified import load_unified
from specpipe.errors import CheckpointError, EngineBuildError, RuntimeUnavailable
from specpipe.machine.libraries import with_extras
from specpipe.runtimes.tensorrt import build, library
from specpipe.runtimes.tensorrt.build import PlaceWeights
from specpipe.stage import StageInputs
from tests.recorder import Recorder
from tests.runtimes.tensorrt.engines import build_engine, engine_stage, write_unified
from tests.toy import read_tensor, toy_config, toy_tensors

ALL_GPUS = ("8.0", "8.6", "8.9", "12.0", "12.1")


def document(engine: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((engine / "config.json").read_text())
    return loaded


def tensors_in(plan: Path, unified: Path) -> list[str]:
    """Names the tensors of a checkpoint whose very bytes are in a plan."""
    content, checkpoint = plan.read_bytes(), load_unified(unified)
    return [
        name for name in checkpoint.names() if checkpoint.tensor(name).data.tobytes() in content
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_family_and_dtype_builds(family: str, dtype: str, tmp_path: Path) -> None:
    unified = write_unified(tmp_path, family, dtype=dtype)
    engine = build_engine(unified, tmp_path / "engine", compute_capabilities=ALL_GPUS)
    assert sorted(file.name for file in engine.iterdir()) == ["config.json", "rank0.engine"]
    config = document(engine)
    assert config["pretrained_config"] == document(unified)
    assert config["build_config"]["dtype"] == dtype
    builder = config["builder"]
    assert builder["compute_capabilities"] == list(ALL_GPUS)
    plan = (engine / "rank0.engine").read_bytes()
    assert builder["engine"] == {
        "bytes": len(plan),
        "sha256": hashlib.sha256(plan).hexdigest(),
    }
    # The library may lay out the weights of a product anew; the embedding is read by rows.
    assert "transformer.vocab_embedding.weight" in tensors_in(engine / "rank0.engine", unified)


def test_config_of_an_engine(tmp_path: Path) -> None:
    unified = write_unified(tmp_path, dtype="float16")
    config = document(build_engine(unified, tmp_path / "engine"))
    assert list(config) == ["version", "runtime", "pretrained_config", "build_config", "builder"]
    assert config["version"] == __version__
    assert config["runtime"] == {"name": "tensorrt", "format": 1}
    assert config["build_config"] == {
        "max_batch_size": 4,
        "max_seq_len": 64,
        "max_num_tokens": 32,
        "max_draft_len": 4,
        "max_beam_width": 1,
        "kv_cache_type": "CONTINUOUS",
        "strongly_typed": True,
        "weight_streaming": False,
        "dtype": "float16",
    }
    builder = config["builder"]
    del builder["engine"]
    cache = {"dtype": "half", "shape": [-1, 2, 80, 8]}
    assert builder == {
        "library": "tensorrt_rtx",
        "library_version": trt.__version__,
        "compute_capabilities": ["8.9"],
        "weights": "inside",
        "weight_streaming": False,
        "capacity": 80,
        "profiles": [
            {"name": "decode", "batch": [1, 1, 4], "tokens": [1, 5, 5], "logits": [1, 5, 20]},
            {"name": "prefill", "batch": [1, 1, 1], "tokens": [1, 32, 32], "logits": [1, 1, 5]},
        ],
        "inputs": [
            {"name": "input_ids", "dtype": "int32", "shape": [-1, -1]},
            {"name": "position_ids", "dtype": "int32", "shape": [-1, -1]},
            {"name": "write_indices", "dtype": "int32", "shape": [-1]},
            {"name": "key_value_lengths", "dtype": "int32", "shape": [-1]},
            {"name": "logits_indices", "dtype": "int32", "shape": [-1]},
            {"name": "key_cache.0", **cache},
            {"name": "value_cache.0", **cache},
            {"name": "key_cache.1", **cache},
            {"name": "value_cache.1", **cache},
        ],
        "outputs": [
            {"name": "key_cache.0.out", **cache},
            {"name": "value_cache.0.out", **cache},
            {"name": "key_cache.1.out", **cache},
            {"name": "value_cache.1.out", **cache},
            {"name": "logits", "dtype": "float", "shape": [-1, 256]},
        ],
        "layers": builder["layers"],
        "precisions": builder["precisions"],
    }
    # Per layer: qkv, dense, fc, gate, proj; the head.
    counted = ("matrix_multiply", "attention_output", "kv_cache_update", "rotary_embedding")
    assert {kind: builder["layers"][kind] for kind in counted} == {
        "matrix_multiply": 2 * 5 + 1,
        "attention_output": 2,
        "kv_cache_update": 4,
        "rotary_embedding": 4,
    }
    assert sum(builder["layers"].values()) == sum(builder["precisions"].values())
    assert set(builder["precisions"]) == {"float", "half", "int64"}


def test_the_library_says_how_far_it_is(tmp_path: Path) -> None:
    recorder, unified = Recorder(), write_unified(tmp_path)
    with progress.shown(recorder):
        build_engine(unified, tmp_path / "engine")
    (count,) = recorder.counts
    assert (count.unit, count.total is not None) == ("steps", True)
    assert 1 < count.done <= (count.total or 0)  # it does not tell of the last one


def test_a_draft_is_fastest_where_it_decodes(tmp_path: Path) -> None:
    config = document(build_engine(write_unified(tmp_path), tmp_path / "engine", role="draft"))
    assert config["builder"]["profiles"][0] == {
        "name": "decode",
        "batch": [1, 1, 4],
        "tokens": [1, 1, 5],
        "logits": [1, 1, 20],
    }


def test_engine_in_another_dtype_than_the_checkpoint(tmp_path: Path) -> None:
    unified = write_unified(tmp_path, dtype="float32")
    config = document(build_engine(unified, tmp_path / "engine", dtype="bfloat16"))
    assert config["pretrained_config"]["dtype"] == "float32"
    assert config["build_config"]["dtype"] == "bfloat16"
    (cache,) = (x for x in config["builder"]["inputs"] if x["name"] == "key_cache.0")
    assert cache["dtype"] == "bf16"


def test_weight_streaming(tmp_path: Path) -> None:
    engine = build_engine(write_unified(tmp_path), tmp_path / "engine", weight_streaming=True)
    config = document(engine)
    assert config["build_config"]["weight_streaming"] is True
    assert config["builder"]["weight_streaming"] is True


def test_a_tied_embedding_is_in_the_engine_once(tmp_path: Path) -> None:
    embedding: dict[str, Any] = {"vocab_size": 8192}  # 8192 x 32 bfloat16: 512 KiB
    sizes = {}
    for is_tied in (False, True):
        work = tmp_path / str(is_tied)
        unified = write_unified(work, "qwen2", tie_word_embeddings=is_tied, **embedding)
        engine = build_engine(unified, work / "engine") / "rank0.engine"
        raw = load_unified(unified).tensor("transformer.vocab_embedding.weight").data.tobytes()
        assert engine.read_bytes().count(raw) == 1
        sizes[is_tied] = engine.stat().st_size
    assert 0.9 * 2**19 < sizes[False] - sizes[True] < 1.1 * 2**19


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_beside_the_engine(is_tied: bool, tmp_path: Path) -> None:
    unified = write_unified(tmp_path, "qwen3", tie_word_embeddings=is_tied)
    shape_only = tmp_path / "shape-only"
    shape_only.mkdir()
    shutil.copy(unified / "config.json", shape_only)
    plan = build_engine(shape_only, tmp_path / "plan", weights="beside")
    assert sorted(file.name for file in plan.iterdir()) == ["config.json", "rank0.engine"]
    assert tensors_in(plan / "rank0.engine", unified) == []

    engine = tmp_path / "engine"
    engine.mkdir()
    PlaceWeights(role="target", plan=plan, checkpoint=unified).run(engine)
    weights = engine / "rank0_managed_weights.safetensors"
    assert sorted(file.name for file in engine.iterdir()) == [
        "config.json",
        "rank0.engine",
        weights.name,
    ]
    assert (engine / "rank0.engine").samefile(plan / "rank0.engine")
    expected = document(plan)
    expected["builder"]["weights_bytes"] = weights.stat().st_size
    assert document(engine) == expected

    inputs = {tensor["name"]: tensor for tensor in expected["builder"]["inputs"]}
    stored = read_safetensors_header(weights)
    checkpoint = load_unified(unified)
    names = set(checkpoint.names()) - ({"lm_head.weight"} if is_tied else set())
    assert names == set(inputs) & set(checkpoint.names())
    # The checkpoint's own file, where a tied head stands too.
    assert weights.samefile(unified / "rank0.safetensors")
    for name in names:
        info = stored[name]
        assert np.array_equal(read_tensor(info), checkpoint.tensor(name).data)
        shape = list(info.shape)
        assert inputs[name]["shape"] == [1] * (len(inputs[name]["shape"]) - len(shape)) + shape


def test_weights_beside_are_in_the_dtype_of_the_engine(tmp_path: Path) -> None:
    unified = write_unified(tmp_path, dtype="float32")
    plan = build_engine(unified, tmp_path / "plan", weights="beside", dtype="float16")
    engine = tmp_path / "engine"
    engine.mkdir()
    PlaceWeights(role="target", plan=plan, checkpoint=unified).run(engine)
    stored = read_safetensors_header(engine / "rank0_managed_weights.safetensors")
    assert {info.dtype for info in stored.values()} == {"F16"}
    name = "transformer.ln_f.weight"
    expected = load_unified(unified).tensor(name).data.view(np.float32).astype(np.float16)
    assert np.array_equal(read_tensor(stored[name]).view(np.float16), expected)


def test_a_checkpoint_of_several_ranks_is_merged(tmp_path: Path) -> None:
    unified = write_unified(tmp_path)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    convert(tmp_path / "hf", ranks, tp_size=2, pp_size=2)
    engine = build_engine(ranks, tmp_path / "engine") / "rank0.engine"
    whole = build_engine(unified, tmp_path / "whole") / "rank0.engine"
    assert tensors_in(engine, unified) == tensors_in(whole, unified) != []


def test_what_the_builder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(build, "_write_plan", lambda *arguments: told.extend(arguments))
    settings = {"compute_capabilities": ("8.6", "12.0"), "weight_streaming": True}
    refusal(write_unified(tmp_path), tmp_path / "engine", **settings)
    _, _, network, config, _ = told
    assert network.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert not config.get_flag(trt.BuilderFlag.TF32)
    assert config.get_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    assert config.num_optimization_profiles == 2
    assert [config.get_compute_capability(i) for i in range(config.num_compute_capabilities)] == [
        trt.ComputeCapability.SM86,
        trt.ComputeCapability.SM120,
    ]


def test_inputs_of_the_stages(tmp_path: Path) -> None:
    settings = {
        "format": 1,
        "max_batch_size": 4,
        "max_seq_len": 64,
        "max_draft_len": 4,
        "max_num_tokens": 32,
        "dtype": "auto",
        "library": "tensorrt_rtx",
        "compute_capabilities": ("8.9",),
        "weights": "inside",
        "weight_streaming": False,
    }
    stage = engine_stage(tmp_path)
    assert (stage.name, stage.inputs()) == (
        "target/build_engine",
        StageInputs(
            files=(tmp_path,),
            settings=settings,
            libraries=("tensorrt-rtx-cu13",),
            varies="rank0.engine, and its digest in config.json: TensorRT for RTX writes other "
            "bytes each time",
        ),
    )
    beside = engine_stage(tmp_path, weights="beside", library="tensorrt")
    changed = {"weights": "beside", "library": "tensorrt"}
    assert (beside.name, beside.inputs()) == (
        "target/build_plan",
        StageInputs(
            files=(tmp_path / "config.json",),  # other weights of that shape take no build
            settings=settings | changed,
            libraries=("tensorrt",),
            varies="rank0.engine, and its digest in config.json: TensorRT chooses kernels by "
            "timing them",
        ),
    )
    place = PlaceWeights(role="draft", plan=tmp_path / "plan", checkpoint=tmp_path / "checkpoint")
    assert (place.name, place.inputs()) == (
        "draft/place_weights",
        StageInputs(files=(tmp_path / "plan", tmp_path / "checkpoint"), settings={}),
    )


def refusal(unified: Path, out: Path, **settings: Any) -> str:
    with pytest.raises(EngineBuildError) as caught:
        build_engine(unified, out, **settings)
    return str(caught.value)


def test_numbers_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = toy_tensors(toy_config())[name]
    tensor[3, 4] = 0x4974  # 999424 in bfloat16
    unified = write_unified(tmp_path, tensors={name: tensor})
    expected = (
        f"target: {name}[3, 4] is 999424, but float16 holds 65504 at most; set engine.dtype to "
        "bfloat16"
    )
    assert refusal(unified, tmp_path / "engine", dtype="float16") == expected
    plan = build_engine(unified, tmp_path / "plan", dtype="float16", weights="beside")
    with pytest.raises(EngineBuildError) as caught:
        PlaceWeights(role="target", plan=plan, checkpoint=unified).run(plan)
    assert str(caught.value) == expected


def test_a_head_that_is_not_the_embedding_is_refused(tmp_path: Path) -> None:
    unified = write_unified(tmp_path)
    config = document(unified) | {"tie_word_embeddings": True}
    (unified / "config.json").write_text(json.dumps(config))
    assert refusal(unified, tmp_path / "engine") == (
        "target: config.json says tie_word_embeddings, but lm_head.weight is not the embedding in "
        f"{unified}; convert again"
    )


def test_a_text_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    unified = write_unified(tmp_path)
    assert refusal(unified, tmp_path / "engine", max_seq_len=513) == (
        "target: engine.max_seq_len 513 is more than the model's context of 512 tokens; lower it"
    )


def test_what_the_network_cannot_express_is_refused(tmp_path: Path) -> None:
    unified = write_unified(tmp_path, "gemma2")
    message = refusal(unified, tmp_path / "engine", role="draft")
    assert message.startswith("draft: runtime 'tensorrt' does not build Gemma2ForCausalLM")


def test_an_unreadable_checkpoint(tmp_path: Path) -> None:
    messages = {None: "has no config.json; convert again", "{": "config.json cannot be read: "}
    for content, message in messages.items():
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            build_engine(tmp_path, tmp_path / f"engine-{content}")


def test_a_failure_of_the_library_ends_with_its_own_words(tmp_path: Path) -> None:
    """Turing has no bfloat16."""
    message = refusal(write_unified(tmp_path), tmp_path / "engine", compute_capabilities=("7.5",))
    first, *errors = message.splitlines()
    assert first == f"target: tensorrt_rtx {trt.__version__} built no engine:"
    assert len(errors) == 1
    assert "Cannot compile for target(s) sm75" in errors[0]


@pytest.mark.parametrize(
    ("name", "extra"), [("tensorrt_rtx", "tensorrt-rtx"), ("tensorrt", "tensorrt")]
)
def test_a_library_that_is_not_installed(
    name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda library: None)
    with pytest.raises(RuntimeUnavailable) as caught:
        build_engine(write_unified(tmp_path), tmp_path / "engine", library=name)
    assert str(caught.value) == (f"runtime 'tensorrt' needs '{name}': {with_extras(extra)}")


def test_a_library_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("tensorrt")
    old.__version__ = "10.3.0"  # type: ignore[attr-defined]
    old.IAttention = object  # type: ignore[attr-defined]
    old.__spec__ = importlib.util.spec_from_loader("tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt", old)
    with pytest.raises(RuntimeUnavailable) as caught:
        library.load("tensorrt")
    assert str(caught.value) == (
        "tensorrt 10.3.0 lacks KVCacheMode, CausalMaskKind, IRotaryEmbeddingLayer: a decoder needs "
        "KV cache updates, rotary embedding and attention with a causal mask aligned to the lower "
        "right; install a newer one"
    )


def test_the_last_errors_of_a_library() -> None:
    severities: Mapping[str, Any] = trt.ILogger.Severity.__members__
    logger = library.make_logger(trt)
    assert library.last_errors(logger) == "the library gave no reason"
    for count in range(7):
        logger.log(severities["ERROR"], f"error {count}")
        logger.log(severities["WARNING"], "a warning")
    assert library.last_errors(logger) == "error 2\nerror 3\nerror 4\nerror 5\nerror 6"
    no_gpu = library.make_logger(trt)
    cuda = "[checkMacros.cpp::catchCudaError::250] no driver"
    no_gpu.log(severities["INTERNAL_ERROR"], cuda)
    assert library.last_errors(no_gpu) == cuda
    no_gpu.log(severities["ERROR"], "what went wrong")
    assert library.last_errors(no_gpu) == "what went wrong"
