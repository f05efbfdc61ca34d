from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from specpipe.build import execution, planning, repositories
from specpipe.errors import CheckpointError, EngineMismatch, RuntimeUnavailable
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.requirements import EngineGpus, Requirements
from specpipe.runtimes.runtime import load_runtime
from specpipe.runtimes.tensorrt_llm.llmapi import backend
from specpipe.runtimes.tensorrt_llm.llmapi.collect import CollectCheckpoint
from specpipe.runtimes.tensorrt_llm.llmapi.llm_pair import LlmPair
from specpipe.speculative.request import Request
from tests.quiet import Quiet
from tests.runtimes.table_engine import ids, run
from tests.runtimes.tensorrt_llm.llmapi.test_model_yaml import PAIR, config_of
from tests.runtimes.torch.engines import load_engine
from tests.speculative.table import WordDetokenizer
from tests.tensorrt_llm_stand_ins.llm_api import installed, runtime_settings
from tests.toy import toy_config, toy_tensors, write_tensors, write_toy_checkpoint


@pytest.fixture
def fake() -> Iterator[ModuleType]:
    with installed() as module:
        yield module


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def collect(checkpoint: Path, out: Path) -> Path:
    out.mkdir()
    CollectCheckpoint("target", checkpoint).run(out)
    return out


@pytest.mark.parametrize(("raw", "value"), [(0x7FC0, "nan"), (0x7F80, "inf"), (0xFF80, "-inf")])
def test_numbers_that_cannot_be_are_refused(raw: int, value: str, tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    tensors = toy_tensors(toy_config())
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = raw
    (checkpoint / "model.safetensors").unlink()
    write_tensors(checkpoint / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        collect(checkpoint, tmp_path / "out")
    assert str(caught.value) == (
        f"target: {checkpoint}/model.safetensors: model.layers.1.mlp.down_proj.weight[3, 5] is "
        f"{value}, which no weight can be: the checkpoint is damaged; download it again, or use "
        "another one"
    )


def test_the_repository_holds_checkpoints_and_yaml(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    stages = planning.plan(config)
    assert [s.name for s in stages] == ["check", "draft/collect", "target/collect", "package"]
    execution.run(stages, Quiet())
    repository = repositories.built_repository(config)
    assert names(repository) == {"ensemble", "preprocessing", "speculative", "postprocessing"}
    version = repository / "speculative" / "1"
    assert names(version) == {
        "limits.json",
        "model.py",
        "model.yaml",
        "pair.json",
        "tokenizer",
        "draft",
        "target",
    }
    assert yaml.safe_load((version / "model.yaml").read_text())["speculative_config"] == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 4,
        "speculative_model": "draft",
    }
    assert names(version / "target") == names(PAIR / "target")
    pair = PairFile.read(version / "pair.json")
    assert pair.runtime == "tensorrt_llm"
    assert pair.options.runtime_settings["backend"] == "pytorch"
    assert [r.reasons for r in execution.preview(planning.plan(config))] == [()] * 4
    assert load_runtime("tensorrt_llm").requirements(repository, driver="570.1") == Requirements(
        runtime="tensorrt_llm",
        libraries={"tensorrt_llm": "1.2"},
        engines={"target": EngineGpus(gpu_ids=(0,))},
    )


def test_another_release_packages_again_and_collects_nothing(tmp_path: Path) -> None:
    execution.run(planning.plan(config_of(tmp_path)), Quiet())
    config = config_of(tmp_path, "engine.tensorrt_llm.version=1.1.0")
    reasons = {r.stage: r.reasons for r in execution.preview(planning.plan(config))}
    assert [stage for stage, why in reasons.items() if why] == ["package"]


def test_collecting_leaves_pickles_and_code_behind(tmp_path: Path) -> None:
    source = write_toy_checkpoint(tmp_path / "source", num_shards=2)
    for name in ("pytorch_model.bin", "modeling_toy.py", "training_args.pt", "README.md"):
        (source / name).write_text("x")
    (source / "generation_config.json").write_text("{}")
    out = collect(source, tmp_path / "out")
    assert names(out) == {
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }


def test_weights_are_linked_and_never_as_symbolic_links(tmp_path: Path) -> None:
    """The hub's cache is made of symbolic links to blobs."""
    repository = tmp_path / "models--org--toy"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    blobs = write_toy_checkpoint(repository / "blobs")
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    weights = collect(snapshot, tmp_path / "out") / "model.safetensors"
    assert not weights.is_symlink()
    assert weights.samefile(blobs / "model.safetensors")


def test_without_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", refuse)
    source = write_toy_checkpoint(tmp_path / "source")
    weights = collect(source, tmp_path / "out") / "model.safetensors"
    assert not weights.samefile(source / "model.safetensors")
    assert weights.read_bytes() == (source / "model.safetensors").read_bytes()


def test_damaged_checkpoints_are_refused_by_role(tmp_path: Path) -> None:
    source = write_toy_checkpoint(tmp_path / "source", num_shards=2)
    (source / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="^target: .* lacks model-00002-of-00002"):
        collect(source, tmp_path / "out")
    assert names(tmp_path / "out") == set()


QUANTIZED = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """The quickstart target, said to be quantized by ModelOpt."""
    target = tmp_path / "target"
    target.mkdir()
    for path in (PAIR / "target").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    (target / "hf_quant_config.json").write_text(json.dumps(QUANTIZED))
    config_json = json.loads((target / "config.json").read_text())
    config_json["quantization_config"] = {"quant_method": "modelopt", **QUANTIZED["quantization"]}
    (target / "config.json").write_text(json.dumps(config_json))
    return target


def test_what_modelopt_quantized_goes_in_as_it_is(tmp_path: Path, quantized: Path) -> None:
    config = config_of(tmp_path, target=quantized)
    execution.run(planning.plan(config), Quiet())
    collected = repositories.built_repository(config) / "speculative" / "1" / "target"
    assert json.loads((collected / "hf_quant_config.json").read_text()) == QUANTIZED
    assert json.loads((collected / "config.json").read_text()) == json.loads(
        (quantized / "config.json").read_text()
    )


def test_engines_carry_over_what_modelopt_quantized(tmp_path: Path, quantized: Path) -> None:
    config = config_of(tmp_path, "engine.tensorrt_llm.backend=tensorrt", target=quantized)
    stages = {planned.name: planned.stage for planned in planning.plan(config)}
    assert list(stages)[1:3] == ["draft/convert", "target/convert"]
    flags = stages["target/build_engine"].inputs().settings["flags"]
    assert (flags["gemm_plugin"], flags["use_fp8_context_fmha"]) == ("disable", True)


@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
def test_nothing_is_quantized_twice(tmp_path: Path, quantized: Path, backend: str) -> None:
    config = config_of(
        tmp_path,
        f"engine.tensorrt_llm.backend={backend}",
        "target.quantization={format: fp8}",
        target=quantized,
    )
    with pytest.raises(CheckpointError) as caught:
        planning.plan(config)
    assert str(caught.value) == (
        f"target {quantized}: it is already quantized: leave target.quantization out, or use the "
        "checkpoint that it was quantized from"
    )


def packaged(folder: Path, **changes: Any) -> tuple[Path, Path, PairOptions]:
    """What `load_pair` gets, of a repository with the quickstart pair."""
    config = config_of(folder)
    execution.run(planning.plan(config), Quiet())
    version = repositories.built_repository(config) / "speculative" / "1"
    options = PairFile.read(version / "pair.json").options
    settings = {**options.runtime_settings, **changes}
    return (
        version / "draft",
        version / "target",
        dataclasses.replace(options, runtime_settings=settings),
    )


def load(folder: Path, **changes: Any) -> LlmPair:
    draft, target, options = packaged(folder, **changes)
    pair = load_runtime("tensorrt_llm").load_pair(
        draft, target, options, lambda prompt, **_: WordDetokenizer()
    )
    assert isinstance(pair, LlmPair)
    return pair


def test_a_loaded_pair_answers_as_the_target_alone(
    tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pair = load(tmp_path, target_gpu_ids=[5])
    try:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
        prompt = (40, 41, 42, 43, 44)
        chunks = run(pair, [Request(request_id="r", prompt_token_ids=prompt, max_tokens=20)])["r"]
    finally:
        pair.close()
    engine = load_engine(PAIR / "target", tmp_path / "alone")
    sequence = engine.allocate(prompt_length=5, max_tokens=25)
    alone: list[int] = []
    feed = list(prompt)
    for _ in range(20):
        logits = engine.forward([(sequence, feed)], [1])
        feed = [int(logits.argmax())]
        alone += feed
    assert ids(chunks) == alone
    assert pair._llm.arguments["model"] == str(
        tmp_path / "engines" / "toy" / "model_repo" / "speculative" / "1" / "target"
    )


def test_without_tensorrt_llm_the_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable) as caught:
        backend.load_pair(
            tmp_path, tmp_path, PairOptions(runtime_settings=runtime_settings()), lambda p: None
        )
    assert str(caught.value) == (
        "runtime 'tensorrt_llm' needs 'tensorrt_llm', which comes with NVIDIA's image "
        "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    )


def test_another_release_line_is_refused(tmp_path: Path, fake: ModuleType) -> None:
    with pytest.raises(EngineMismatch) as caught:
        load(tmp_path, tensorrt_llm="1.1.0")
    assert str(caught.value) == (
        "the repository was written for TensorRT-LLM 1.1.0, and 1.2.1 is installed; set "
        "engine.tensorrt_llm.version to the one that serves, and build again"
    )


def test_a_yaml_that_tensorrt_llm_refuses(tmp_path: Path, fake: ModuleType) -> None:
    draft, target, options = packaged(tmp_path)
    path = target.parent / "model.yaml"
    path.write_text(path.read_text().replace("max_draft_len", "max_draft_length"))
    with pytest.raises(EngineMismatch, match=r"^TensorRT-LLM 1\.2\.1 refuses .*model\.yaml: "):
        backend.load_pair(draft, target, options, lambda p: WordDetokenizer())


def test_checkpoints_that_tensorrt_llm_cannot_load(tmp_path: Path, fake: ModuleType) -> None:
    draft, target, options = packaged(tmp_path)
    path = target.parent / "model.yaml"
    path.write_text(path.read_text() + "no_such_argument: 1\n")
    with pytest.raises(
        RuntimeUnavailable, match=r"could not load .*model\.yaml: ValidationError: 1 validation"
    ):
        backend.load_pair(draft, target, options, lambda p: WordDetokenizer())
