from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpipe import __version__
from specpipe.build.stages.convert import convert
from specpipe.errors import EngineMismatch
from specpipe.runtimes.tensorrt.build import BuildTensorRTEngine, PlaceWeights
from specpipe.runtimes.tensorrt.engine_config import TensorRTEngineSpec, check_files
from specpipe.runtimes.tensorrt.shapes import Profile
from tests.runtimes.tensorrt.table_library import write_engine
from tests.toy import write_toy_checkpoint


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("weights", ["inside", "beside"])
def test_an_engine_as_built(tmp_path: Path, weights: Any) -> None:
    pytest.importorskip("tensorrt_rtx")
    checkpoint, plan = tmp_path / "checkpoint", tmp_path / "plan"
    checkpoint.mkdir()
    plan.mkdir()
    convert(write_toy_checkpoint(tmp_path / "hf", "llama"), checkpoint)
    BuildTensorRTEngine(
        role="target",
        checkpoint=checkpoint,
        max_batch_size=3,
        max_seq_len=60,
        max_draft_len=4,
        max_num_tokens=20,
        dtype="auto",
        library="tensorrt_rtx",
        compute_capabilities=("8.6", "12.0"),
        weights=weights,
        weight_streaming=False,
    ).run(plan)
    engine = plan
    if weights == "beside":
        engine = tmp_path / "engine"
        engine.mkdir()
        PlaceWeights(role="target", plan=plan, checkpoint=checkpoint).run(engine)
    spec = TensorRTEngineSpec.read(engine)
    check_files(spec)
    assert (spec.library, spec.compute_capabilities) == ("tensorrt_rtx", ("8.6", "12.0"))
    assert (spec.max_batch_size, spec.max_seq_len, spec.max_draft_len) == (3, 60, 4)
    assert (spec.dtype, spec.vocab_size, spec.capacity) == ("bfloat16", 256, 72)
    assert spec.profiles == (
        Profile("decode", (1, 1, 3), (1, 5, 5), (1, 5, 15)),
        Profile("prefill", (1, 1, 1), (1, 20, 20), (1, 1, 5)),
    )
    assert spec.cache_names == ("key_cache.0", "value_cache.0", "key_cache.1", "value_cache.1")
    assert spec.inputs["key_cache.0"] == (-1, 2, 72, 8)
    assert (spec.row_bytes, spec.slot_bytes) == (16, 2 * 72 * 16)
    assert ("lm_head.weight" in spec.weight_names) == (weights == "beside")
    assert len(spec.weight_names) == (0 if weights == "inside" else len(spec.inputs) - 5 - 4)


def test_what_is_no_engine_of_this_runtime(tmp_path: Path) -> None:
    for text in (None, "{", "[]", "{}"):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(EngineMismatch) as caught:
            TensorRTEngineSpec.read(tmp_path)
        assert str(caught.value) == f"{tmp_path} is not an engine of runtime 'tensorrt'"


def test_an_engine_of_another_runtime_or_format(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "engine")
    change(folder, lambda config: config.update(runtime={"name": "torch", "format": 1}))
    with pytest.raises(EngineMismatch) as caught:
        TensorRTEngineSpec.read(folder)
    assert str(caught.value) == (
        f"{folder} was built for {{'name': 'torch', 'format': 1}}, specpipe {__version__} runs "
        "{'name': 'tensorrt', 'format': 1}; build it again"
    )
    change(folder, lambda config: config.update(runtime={"name": "tensorrt", "format": 0}))
    with pytest.raises(EngineMismatch, match="'format': 0}, .*; build it again"):
        TensorRTEngineSpec.read(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("builder"), "has no builder: build the engine again"),
        (lambda c: c["builder"].pop("profiles"), "has no profiles: build the engine again"),
        (lambda c: c["builder"].update(engine=None), "cannot be read .*: build the engine again"),
    ],
)
def test_a_config_that_is_not_whole(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder = write_engine(tmp_path / "engine")
    change(folder, edit)
    with pytest.raises(EngineMismatch, match=f"^{folder}/config.json {message}$"):
        TensorRTEngineSpec.read(folder)


@pytest.mark.parametrize("name", ["rank0.engine", "rank0_managed_weights.safetensors"])
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    folder = write_engine(tmp_path / "engine", weights={"w": [2]}, weights_bytes=8)
    (folder / "rank0_managed_weights.safetensors").touch()
    (folder / name).unlink()
    with pytest.raises(EngineMismatch) as caught:
        TensorRTEngineSpec.read(folder)
    assert str(caught.value) == f"{folder} has no {name}: build the engine again"


def test_a_damaged_engine(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "engine", weights={"w": [2]}, weights_bytes=8)
    (folder / "rank0_managed_weights.safetensors").write_bytes(b"12345678")
    spec = TensorRTEngineSpec.read(folder)
    check_files(spec)
    engine = folder / "rank0.engine"
    data = engine.read_bytes()
    engine.write_bytes(b"?" + data[1:])
    with pytest.raises(EngineMismatch) as caught:
        check_files(spec)
    assert str(caught.value) == (
        f"{folder}: rank0.engine is damaged, it is not what was built (SHA-256): "
        "build the engine again"
    )
    engine.write_bytes(data[:-1])
    (folder / "rank0_managed_weights.safetensors").write_bytes(b"1234567")
    with pytest.raises(EngineMismatch) as caught:
        check_files(spec)
    assert str(caught.value) == (
        f"{folder}: rank0.engine is damaged, it has {len(data) - 1} bytes, not {len(data)}; "
        "rank0_managed_weights.safetensors is damaged, it has 7 bytes, not 8: "
        "build the engine again"
    )
