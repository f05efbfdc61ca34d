from __future__ import annotations

import copy
import gc
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from specpipe.build.stages.calibrate import Calibrate
from specpipe.checkpoints.checkpoint import read_safetensors_header
from specpipe.checkpoints.plain_weights import open_weights
from specpipe.config.sections import CalibrationConfig, QuantizationConfig
from specpipe.errors import CheckpointError, ConfigError, RuntimeUnavailable
from specpipe.machine.libraries import with_extras
from specpipe.quantization import decoder
from specpipe.quantization.calibrate import calibrate, modelopt_config
from specpipe.quantization.decoder import LayerwiseDecoder, _rope_of_4
from specpipe.quantization.quantized_config import quantized_config
from specpipe.quantization.scales import expected_scales, read_scales
from tests.quantization.checkpoints import scheme
from tests.toy import (
    read_tensor,
    spelled_as_4_57,
    toy_config,
    toy_tensors,
    write_tensors,
    write_toy_checkpoint,
)
from tests.toy_tokenizers import byte_level, write_tokenizer

pytest.importorskip("modelopt")

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2")
PRESETS = {
    "fp8": "FP8_DEFAULT_CFG",
    "int8_sq": "INT8_SMOOTHQUANT_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "w4a8_awq": "W4A8_AWQ_BETA_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
}
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 4.0],
        },
        "original_max_position_embeddings": 256,
    },
    "gemma2": {"sliding_window": 16},
}
"""What makes the layers of a family read more than the hidden states."""


@pytest.fixture(scope="module")
def texts() -> list[tuple[int, ...]]:
    generator = np.random.default_rng(0)
    return [tuple(map(int, generator.integers(3, 256, size))) for size in (40, 30, 90, 7, 20, 60)]


@pytest.fixture(autouse=True)
def few_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the texts go in the batches of `BATCHES`."""
    monkeypatch.setattr(decoder, "TOKENS_AT_ONCE", 100)


BATCHES = ((0, 1), (2, 3), (4, 5))


def transformers_model(checkpoint: Path) -> Any:
    """Loads the checkpoint with the installed transformers, in float32."""
    import transformers

    config = json.loads((checkpoint / "config.json").read_text())
    if transformers.__version__.startswith("4.") and "rope_parameters" in config:
        (checkpoint / "config.json").write_text(json.dumps(spelled_as_4_57(config)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        )


def whole_model(
    checkpoint: Path, settings: QuantizationConfig, texts: Sequence[Sequence[int]]
) -> Any:
    """Has ModelOpt calibrate the whole model with its own preset, and shares what is fused.

    transformers keeps texts of a row apart by their positions, with masks of its own.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export.quant_utils import preprocess_linear_fusion

        model = transformers_model(checkpoint)
        config = copy.deepcopy(getattr(mtq, PRESETS[settings.format]))
        for cfg in blocks(config):
            cfg["block_sizes"][-1] = settings.awq_block_size
        if settings.quantize_lm_head:
            config["quant_cfg"] = [
                entry for entry in config["quant_cfg"] if entry["quantizer_name"] != "*lm_head*"
            ]
        if settings.kv_cache:
            config["quant_cfg"] += mtq.FP8_KV_CFG["quant_cfg"]

        def run_all(model: Any) -> None:
            for batch in BATCHES:
                ids = [token_id for n in batch for token_id in texts[n]]
                positions = [position for n in batch for position in range(len(texts[n]))]
                model(
                    input_ids=torch.tensor([ids]),
                    position_ids=torch.tensor([positions]),
                    use_cache=False,
                )

        with torch.no_grad():
            mtq.quantize(model, config, forward_loop=run_all)
            for layer in model.model.layers:
                for parent, names in (
                    (layer.self_attn, ("q_proj", "k_proj", "v_proj")),
                    (layer.mlp, ("gate_proj", "up_proj")),
                ):
                    if hasattr(parent, names[0]):
                        preprocess_linear_fusion([getattr(parent, name) for name in names])
    return model


def blocks(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the quantizers of a preset that have blocks of the size that AWQ has."""
    for entry in config["quant_cfg"]:
        cfgs = entry.get("cfg") or []
        for cfg in cfgs if isinstance(cfgs, list) else [cfgs]:
            if cfg.get("block_sizes", {}).get("type") == "static":
                yield cfg


def measured_by_modelopt(model: Any, module: str, kind: str) -> Any:
    """Looks up in a whole model what stands under a unified name."""
    if module == "lm_head":
        linear = model.lm_head
    else:
        _, _, n, part = module.split(".", 3)
        layer = model.model.layers[int(n)]
        if kind == "kv_amax":
            attention = layer.self_attn
            return torch.maximum(attention.k_bmm_quantizer.amax, attention.v_bmm_quantizer.amax)
        names = {
            "attention.qkv": "self_attn.q_proj",
            "attention.dense": "self_attn.o_proj",
            "mlp.fc": "mlp.gate_proj",
            "mlp.gate": "mlp.up_proj",
            "mlp.proj": "mlp.down_proj",
        }
        if hasattr(layer.self_attn, "qkv_proj"):
            names |= {"attention.qkv": "self_attn.qkv_proj", "mlp.fc": "mlp.gate_up_proj"}
        linear = layer.get_submodule(names[part])
    if kind == "prequant":
        return linear.input_quantizer.pre_quant_scale
    quantizer = linear.input_quantizer if kind == "input_amax" else linear.weight_quantizer
    return (quantizer[-1] if kind == "weight_amax_2" else quantizer).amax


def assert_equals_modelopt(
    checkpoint: Path, settings: QuantizationConfig, texts: Sequence[Sequence[int]]
) -> None:
    weights = open_weights(checkpoint)
    made = calibrate(weights, settings, texts)
    expected = expected_scales(quantized_config(weights.config, settings))
    assert {(*key, len(value)) for key, value in made.scales.items()} == set(expected)
    model = whole_model(checkpoint, settings, texts)
    for (module, kind), value in made.scales.items():
        theirs = measured_by_modelopt(model, module, kind).reshape(-1).numpy()
        np.testing.assert_allclose(value, theirs, rtol=2e-5, err_msg=f"{module}.{kind}")


@pytest.mark.parametrize("name", PRESETS)
def test_scales_are_those_of_modelopt_on_the_whole_model(
    tmp_path: Path, texts: list[tuple[int, ...]], name: str
) -> None:
    checkpoint = write_toy_checkpoint(tmp_path, num_shards=3)
    assert_equals_modelopt(checkpoint, scheme(name, quantize_lm_head=True), texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_with_its_fused_linears(
    tmp_path: Path, texts: list[tuple[int, ...]], family: str
) -> None:
    checkpoint = write_toy_checkpoint(tmp_path, family, **WINDOWS.get(family, {}))
    assert_equals_modelopt(checkpoint, scheme("w4a8_awq"), texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_cache_and_tied_head_of_each_family(
    tmp_path: Path, texts: list[tuple[int, ...]], family: str
) -> None:
    overrides = {"tie_word_embeddings": True} | WINDOWS.get(family, {})
    checkpoint = write_toy_checkpoint(tmp_path, family, dtype="float16", **overrides)
    settings = scheme("fp8", kv_cache="fp8", quantize_lm_head=True)
    assert_equals_modelopt(checkpoint, settings, texts)


def test_presets_are_those_of_modelopt() -> None:
    mtq = pytest.importorskip("modelopt.torch.quantization")
    for name, preset in PRESETS.items():
        theirs = getattr(mtq, preset)
        ours = modelopt_config(scheme(name, awq_block_size=128), {"m": ("linear",)})
        cfg_of = {
            entry["quantizer_name"].removeprefix("*"): entry["cfg"]
            for entry in theirs["quant_cfg"]
            if entry.get("cfg")
        }
        assert {
            entry["quantizer_name"].removeprefix("linear."): entry["cfg"]
            for entry in ours["quant_cfg"]
            if "cfg" in entry
        } == cfg_of
        algorithm = theirs["algorithm"]
        assert ours["algorithm"] in (algorithm, isinstance(algorithm, dict) and algorithm["method"])


def test_only_the_kv_cache_where_weights_need_no_data(
    tmp_path: Path, texts: list[tuple[int, ...]]
) -> None:
    weights = open_weights(write_toy_checkpoint(tmp_path))
    made = calibrate(weights, scheme("int8_wo", kv_cache="fp8"), texts)
    assert set(made.scales) == {(f"transformer.layers.{n}.attention", "kv_amax") for n in (0, 1)}
    with_weights = calibrate(weights, scheme("w4a8_awq", kv_cache="fp8"), texts)
    without = calibrate(weights, scheme("w4a8_awq"), texts)
    for key, value in {**without.scales, **made.scales}.items():
        np.testing.assert_array_equal(with_weights.scales[key], value)


def test_excluded_linears_are_not_measured_and_change_nothing(
    tmp_path: Path, texts: list[tuple[int, ...]]
) -> None:
    weights = open_weights(write_toy_checkpoint(tmp_path))
    everything = calibrate(weights, scheme("fp8"), texts)
    exclude = ("transformer.layers.0.*", "*.mlp.gate")
    made = calibrate(weights, scheme("fp8", exclude=exclude), texts)
    layer = "transformer.layers.1"
    left = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.proj")
    assert {module for module, _ in made.scales} == {f"{layer}.{name}" for name in left}
    for key, value in made.scales.items():
        if key != (f"{layer}.mlp.fc", "weight_amax"):  # no longer shared with mlp.gate
            np.testing.assert_array_equal(value, everything.scales[key])


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRESETS)
def test_gpu_measures_what_the_cpu_does(
    tmp_path: Path, texts: list[tuple[int, ...]], name: str
) -> None:
    weights = open_weights(write_toy_checkpoint(tmp_path, "gemma2", **WINDOWS["gemma2"]))
    settings = scheme(name, kv_cache="fp8", quantize_lm_head=True)
    on_cpu = calibrate(weights, settings, texts)
    on_gpu = calibrate(weights, settings, texts, device="cuda")
    for key, value in on_cpu.scales.items():
        np.testing.assert_allclose(on_gpu.scales[key], value, rtol=1e-4, err_msg=str(key))


def live_bytes() -> int:
    return sum(
        held.numel() * held.element_size()
        for held in gc.get_objects()
        if type(held) is nn.Parameter and not held.is_meta
    )


def test_weights_of_one_layer_are_in_memory(
    tmp_path: Path, texts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = open_weights(write_toy_checkpoint(tmp_path, num_hidden_layers=4))
    held: list[tuple[int, int]] = []
    take_layer = LayerwiseDecoder.take_layer

    def watched(self: LayerwiseDecoder, n: int) -> nn.Module:
        before = live_bytes()
        layer = take_layer(self, n)
        held.append((before, live_bytes() - before))
        return layer

    monkeypatch.setattr(LayerwiseDecoder, "take_layer", watched)
    gc.collect()
    outside = live_bytes()
    gc.disable()  # what is freed must not wait for a cycle to be found
    try:
        calibrate(weights, scheme("w4a8_awq"), texts)
    finally:
        gc.enable()
    final_norm_bytes = 4 * 32
    layer_bytes = 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32)
    assert held == [(outside + final_norm_bytes, layer_bytes)] * 4


def test_plain_outputs_are_those_of_transformers(
    tmp_path: Path, texts: list[tuple[int, ...]]
) -> None:
    """Text by text, so that batches and their attention are checked, too."""
    for family in FAMILIES:
        folder = write_toy_checkpoint(tmp_path / family, family, **WINDOWS.get(family, {}))
        made = LayerwiseDecoder(open_weights(folder), texts, torch.device("cpu"))
        model = transformers_model(folder)
        with torch.no_grad():
            theirs = [model.model(torch.tensor([text])).last_hidden_state[0] for text in texts]
            ours = []
            for n in range(made.num_layers):
                layer = made.take_layer(n)
                for batch in made.batches:
                    output = layer(batch.hidden, **batch.arguments[n])
                    batch.hidden = output[0] if isinstance(output, tuple) else output
            ours = [made.normed(batch)[0] for batch in made.batches]
        torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), rtol=1e-4, atol=1e-4)


def test_rope_of_transformers_5_as_4_spells_it() -> None:
    assert _rope_of_4({"rope_type": "default", "rope_theta": 5e5}) == {
        "rope_theta": 5e5,
        "rope_scaling": None,
    }
    assert _rope_of_4({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}) == {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    longrope = {"rope_theta": 1e4, "short_factor": [1.0], "long_factor": [2.0]}
    more = {"original_max_position_embeddings": 64, "factor": 4.0}
    assert _rope_of_4({"rope_type": "longrope", **longrope, **more}) == {
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
    }


def changed_toy(folder: Path, name: str, value: float) -> Path:
    """Writes a toy one tensor of which is filled with one number."""
    write_toy_checkpoint(folder, dtype="float32")
    tensors = toy_tensors(toy_config(dtype="float32"))
    tensors[name] = np.full_like(tensors[name].view(np.float32), value).view(np.uint32)
    (folder / "model.safetensors").unlink()
    write_tensors(folder / "model.safetensors", tensors, dtype="F32")
    return folder


@pytest.mark.parametrize(
    ("tensor", "value", "name", "message"),
    [
        (
            "model.layers.1.mlp.down_proj.weight",
            0.0,
            "fp8",
            "transformer.layers.1.mlp.proj.weight_amax is 0 on the calibration texts, which is no "
            "scale; put transformer.layers.1.mlp.proj into quantization.exclude, or use an "
            "undamaged checkpoint",
        ),
        (
            "model.layers.0.post_attention_layernorm.weight",
            0.0,
            "nvfp4",
            "transformer.layers.0.mlp.fc.input_amax is 0 on the calibration texts, which is no "
            "scale; put transformer.layers.0.mlp.fc into quantization.exclude, or use an "
            "undamaged checkpoint",
        ),
        (
            "model.layers.0.self_attn.o_proj.weight",
            1e38,
            "w4a8_awq",
            "transformer.layers.0.mlp.fc reads NaN or infinity on the calibration texts; the "
            "layers before it are damaged, or too great for float32: use an undamaged checkpoint",
        ),
        (
            "model.layers.0.self_attn.o_proj.weight",
            np.nan,
            "fp8",
            "model.safetensors: model.layers.0.self_attn.o_proj.weight[0, 0] is nan, which no "
            "weight can be: the checkpoint is damaged; download it again, or use another one",
        ),
    ],
)
def test_what_is_no_scale_stops_with_the_module(
    tmp_path: Path,
    texts: list[tuple[int, ...]],
    tensor: str,
    value: float,
    name: str,
    message: str,
) -> None:
    weights = open_weights(changed_toy(tmp_path, tensor, value))
    with pytest.raises(CheckpointError) as caught:
        calibrate(weights, scheme(name), texts)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == message


def test_dead_kv_heads_stop_and_scales_of_1_are_doubted(
    tmp_path: Path, texts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = open_weights(write_toy_checkpoint(tmp_path))
    settings = scheme("fp8_pc_pt", kv_cache="fp8")
    assert calibrate(weights, settings, texts).warnings == ()
    amax = "specpipe.quantization.calibrate.kv_amax"
    monkeypatch.setattr(amax, lambda layer: torch.tensor(448.0))
    assert calibrate(weights, settings, texts).warnings == (
        "all scales of the KV cache are exactly 1: the keys and values of this model were clamped "
        "or scaled before, or its weights are not what they should be",
    )
    monkeypatch.setattr(amax, lambda layer: torch.tensor(torch.inf))
    with pytest.raises(CheckpointError) as caught:
        calibrate(weights, settings, texts)
    assert str(caught.value) == (
        "transformer.layers.0.attention.kv_amax is inf on the calibration texts, which is no "
        "scale; leave out quantization.kv_cache, or use an undamaged checkpoint"
    )


def test_an_id_without_an_embedding_row(tmp_path: Path) -> None:
    weights = open_weights(write_toy_checkpoint(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        calibrate(weights, scheme("fp8"), [(5, 256)])
    assert str(caught.value) == (
        f"{tmp_path}: the tokenizer makes the id 256 of a calibration text, but the embedding has "
        "256 rows; take both from one checkpoint"
    )


def stage(folder: Path, settings: QuantizationConfig) -> Calibrate:
    return Calibrate("draft", folder, settings, folder.parent, device="cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = write_toy_checkpoint(tmp_path / "checkpoint")
    return write_tokenizer(folder, byte_level())


def test_stage_writes_the_same_bytes_twice_and_prints_nothing(
    tmp_path: Path, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calibration = CalibrationConfig(num_samples=16)
    settings = scheme("w4a8_awq", kv_cache="fp8", calibration=calibration)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        stage(checkpoint, settings).run(tmp_path / name)
    assert capfd.readouterr() == ("", "")
    for file in ("scales.safetensors", "calibration.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    record = json.loads((tmp_path / "first" / "calibration.json").read_text())
    assert {key: record[key] for key in ("format", "kv_cache", "device", "warnings")} == {
        "format": "w4a8_awq",
        "kv_cache": "fp8",
        "device": "cpu",
        "warnings": [],
    }
    assert record["texts"]["num_texts"] == 14
    assert record["texts"]["num_held_out"] == 2
    assert len(record["texts"]["digest"]) == 64
    assert list(record["versions"]) == ["specpipe", "nvidia-modelopt", "torch", "transformers"]


def test_stage_writes_what_quantize_reads(tmp_path: Path, checkpoint: Path) -> None:
    settings = scheme("nvfp4", kv_cache="fp8", calibration=CalibrationConfig(num_samples=2))
    (tmp_path / "out").mkdir()
    stage(checkpoint, settings).run(tmp_path / "out")
    config = quantized_config(open_weights(checkpoint).config, settings)
    scales = read_scales(tmp_path / "out", config)
    header = read_safetensors_header(tmp_path / "out" / "scales.safetensors")
    assert len(header) == 2 * (2 * 5 + 1) == len(scales.values)
    name = "transformer.layers.1.mlp.proj"
    weight = read_tensor(open_weights(checkpoint).tensors["model.layers.1.mlp.down_proj.weight"])
    floats = (weight.astype(np.uint32) << 16).view(np.float32)
    assert scales(name, "weight_amax") == np.abs(floats).max()


def test_stage_refuses_early_and_says_which_model(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        stage(checkpoint, scheme("int4_awq", awq_block_size=48)).run(tmp_path)
    assert str(caught.value).startswith(
        "draft: int4_awq does not fit transformer.layers.0.attention.qkv: it has 32 inputs, "
        "which blocks of 48 do not divide"
    )
    missing = scheme("fp8", calibration=CalibrationConfig(data="my.jsonl"))
    with pytest.raises(ConfigError) as caught:
        stage(checkpoint, missing).require()
    assert str(caught.value) == (
        f"draft: calibration.data: {checkpoint.parent}/my.jsonl does not exist"
    )


def test_stage_names_the_extra_of_a_missing_library(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find_spec(name) if name != "modelopt" else None
    )
    with pytest.raises(RuntimeUnavailable) as caught:
        stage(checkpoint, scheme("fp8")).require()
    assert str(caught.value) == f"quantization needs 'modelopt': {with_extras('quantize')}"


def test_stage_depends_on_what_decides_the_scales(checkpoint: Path) -> None:
    data = checkpoint.parent / "my.txt"
    data.write_text("ab\ncd\n")
    calibration = CalibrationConfig(data="my.txt")
    inputs = stage(checkpoint, scheme("fp8", calibration=calibration)).inputs()
    assert {path.name for path in inputs.files} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "my.txt",
    }
    exported = stage(checkpoint, scheme("fp8", calibration=calibration, export=True)).inputs()
    other_blocks = scheme("fp8", calibration=calibration, awq_block_size=32)
    assert inputs == exported == stage(checkpoint, other_blocks).inputs()
    builtin = stage(checkpoint, scheme("fp8")).inputs()
    assert "builtin.jsonl" in {path.name for path in builtin.files}
