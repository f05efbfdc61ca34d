from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specpipe.build.stages.convert import convert
from specpipe.build.stages.quantize import Quantize, quantize
from specpipe.checkpoints.checkpoint import read_safetensors_header
from specpipe.checkpoints.unified import UnifiedCheckpoint, load_unified
from specpipe.checkpoints.unified_sections import UNQUANTIZED
from specpipe.errors import CheckpointError, ConfigError
from specpipe.quantization import numbers
from specpipe.quantization.quantized_config import quantized_linears
from tests.quantization.checkpoints import (
    FORMATS,
    as_floats,
    dequantized,
    quantized_checkpoint,
    scheme,
    write_scales,
)
from tests.toy import (
    ARCHITECTURES,
    read_tensor,
    toy_config,
    toy_tensors,
    write_tensors,
    write_toy_checkpoint,
)

F8 = torch.float8_e4m3fn


def stored(unified: UnifiedCheckpoint, name: str) -> Tensor:
    """Returns a tensor in the dtype that it is stored in."""
    raw = unified.tensor(name)
    kind = {"F8_E4M3": F8, "BF16": torch.bfloat16, "F32": torch.float32}.get(raw.dtype)
    values = as_floats(raw.data, raw.dtype)
    return values if kind is None else values.to(kind)


def measured(folder: Path) -> dict[str, Tensor]:
    header = read_safetensors_header(folder / "scales" / "scales.safetensors")
    return {name: as_floats(read_tensor(info), "F32") for name, info in header.items()}


def expected(
    format: str, weight: Tensor, scales: Mapping[str, Tensor], block: int = 16
) -> dict[str, Tensor]:
    """Quantizes a whole linear, as the format's definition says."""
    rows, columns = weight.shape
    made: dict[str, Tensor] = {}
    divisor = {"fp8": 448, "w4a8_awq": 448, "int8_sq": 127, "nvfp4": 6 * 448}.get(format)
    if divisor is not None:
        made["activation_scaling_factor"] = scales["input_amax"] / divisor
    if "prequant" in scales:
        made["prequant_scaling_factor"] = scales["prequant"].bfloat16()
        weight = weight / scales["prequant"]
    if format == "fp8":
        scale = scales["weight_amax"] / 448
        made |= {"weights_scaling_factor": scale, "weight": (weight / scale).to(F8)}
    elif format == "fp8_pc_pt":
        scale = weight.abs().amax(1) / 448
        made |= {"per_channel_scale": scale, "weight": (weight / scale[:, None]).to(F8)}
    elif format == "int8_sq":
        scale = weight.abs().amax(1) / 127
        numbers_ = (weight / scale[:, None]).round().to(torch.int8)
        made |= {"weights_scaling_factor": scale, "weight": numbers_}
    elif format in ("int4_awq", "w4a8_awq"):
        blocks = weight.reshape(rows, columns // block, block)
        scale = (blocks.abs().amax(2) / 7).bfloat16()
        ints = (blocks / scale.float()[:, :, None]).round().clamp(-8, 7).to(torch.int8)
        ints = ints.reshape(rows // 2, 2, columns)
        made["weights_scaling_factor"] = scale
        made["weight"] = (ints[:, 0] & 15) | (ints[:, 1] << 4)
        if format == "w4a8_awq":
            made["weights_scaling_factor_2"] = scales["weight_amax_2"] / 448
    elif format == "nvfp4":
        scale_2 = scales["weight_amax"] / (6 * 448)
        blocks = weight.reshape(rows, columns // 16, 16)
        scale = (blocks.abs().amax(2) / (6 * scale_2)).clamp(2**-9, 448).to(F8)
        quotients = blocks / (scale.float() * scale_2)[:, :, None]
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        even = torch.tensor([1e-9, 0] * 4, dtype=torch.float64)  # what a tie goes to
        codes = ((quotients.double().abs()[..., None] - grid).abs() - even).argmin(-1)
        codes = (codes + 8 * (quotients < 0)).reshape(rows, columns // 2, 2).to(torch.uint8)
        made |= {"weights_scaling_factor": scale, "weights_scaling_factor_2": scale_2}
        made["weight"] = codes[:, :, 0] | (codes[:, :, 1] << 4)
    else:
        made["weight"] = weight.bfloat16()
    return made


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("format", FORMATS)
def test_every_number_of_every_format(
    tmp_path: Path, family: str, tp_size: int, format: str
) -> None:
    """Four ranks share two KV heads; pipeline stages have a layer each."""
    overrides: dict[str, Any] = {"head_dim": 16, "vocab_size": 250}
    pp_size = 2 if tp_size == 2 else 1
    out = quantized_checkpoint(
        tmp_path,
        family,
        format,
        tp_size=tp_size,
        pp_size=pp_size,
        settings={"kv_cache": "fp8"},
        **overrides,
    )
    (tmp_path / "plain").mkdir()
    convert(tmp_path / "hf", tmp_path / "plain")
    unified, plain = load_unified(out), load_unified(tmp_path / "plain")
    scales = measured(tmp_path)
    linears = {module for module, _, _ in quantized_linears(unified.config)}
    seen = set()
    for module in linears:
        prefix = f"{module}."
        of_module = {
            name.removeprefix(prefix): value
            for name, value in scales.items()
            if name.startswith(prefix)
        }
        weight = as_floats(plain.tensor(f"{module}.weight").data, "BF16")
        for kind, value in expected(format, weight, of_module).items():
            found = stored(unified, prefix + kind)
            assert (found.dtype, found.shape) == (value.dtype, value.shape), prefix + kind
            assert torch.equal(found.float(), value.float()), prefix + kind
            seen.add(prefix + kind)
    for layer in (0, 1):
        name = f"transformer.layers.{layer}.attention.kv_cache_scaling_factor"
        amax = scales[f"transformer.layers.{layer}.attention.kv_amax"]
        assert torch.equal(stored(unified, name), amax / 448)
        seen.add(name)
    rest = [name for name in unified.names() if name not in seen]
    assert len(linears) == (8 if family == "phi3" else 10)
    assert set(rest) == set(plain.names()) - {f"{module}.weight" for module in linears}
    for name in rest:
        assert np.array_equal(unified.tensor(name).data, plain.tensor(name).data), name


@pytest.mark.parametrize(
    ("format", "error"),
    [
        ("fp8", 0.04),
        ("fp8_pc_pt", 0.04),
        ("int8_sq", 0.02),
        ("int4_awq", 0.15),
        ("w4a8_awq", 0.15),
        ("nvfp4", 0.15),
    ],
)
def test_dequantized_weights_are_near_the_plain_ones(
    tmp_path: Path, format: str, error: float
) -> None:
    """Root mean square error relative to the weights; the numbers are those of the format."""
    out = quantized_checkpoint(tmp_path, "llama", format)
    (tmp_path / "plain").mkdir()
    convert(tmp_path / "hf", tmp_path / "plain")
    unified, plain = load_unified(out), load_unified(tmp_path / "plain")
    for module, _, _ in quantized_linears(unified.config):
        prefix = f"{module}."
        tensors = {
            "quantized" if name == f"{prefix}weight" else name.removeprefix(prefix): stored(
                unified, name
            )
            for name in unified.names()
            if name.startswith(prefix)
        }
        weight = as_floats(plain.tensor(f"{prefix}weight").data, "BF16")
        difference = dequantized(format, tensors) - weight
        assert difference.square().mean().sqrt() / weight.square().mean().sqrt() < error, module


@pytest.mark.parametrize(
    ("format", "quantization"),
    [
        ("fp8", {"quant_algo": "FP8"}),
        ("fp8_pc_pt", {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
        ("int8_sq", {"quant_algo": "W8A8_SQ_PER_CHANNEL", "pre_quant_scale": True}),
        (
            "int4_awq",
            {
                "quant_algo": "W4A16_AWQ",
                "group_size": 16,
                "has_zero_point": False,
                "pre_quant_scale": True,
            },
        ),
        (
            "w4a8_awq",
            {
                "quant_algo": "W4A8_AWQ",
                "group_size": 16,
                "has_zero_point": False,
                "pre_quant_scale": True,
            },
        ),
        ("int8_wo", {"quant_algo": "W8A16"}),
        ("int4_wo", {"quant_algo": "W4A16"}),
        ("nvfp4", {"quant_algo": "NVFP4", "group_size": 16, "has_zero_point": False}),
    ],
)
def test_config_differs_in_nothing_but_quantization(
    tmp_path: Path, format: str, quantization: dict[str, Any]
) -> None:
    """Rope base, float32 logits and the vocabulary are those of the plain checkpoint."""
    out = quantized_checkpoint(tmp_path, "qwen2", format, vocab_size=250)
    (tmp_path / "plain").mkdir()
    convert(tmp_path / "hf", tmp_path / "plain")
    config, plain = load_unified(out).config, load_unified(tmp_path / "plain").config
    assert config.quantization.plain() == quantization | {
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "*vocab_embedding", "*ln_f"],
    }
    assert config.quantized(UNQUANTIZED) == plain
    assert (config.logits_dtype, config.rotary_base, config.vocab_size) == (
        "float32",
        10000.0,
        250,
    )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_head_and_embedding_of_a_quantized_head(tmp_path: Path, family: str) -> None:
    """Gemma's head is its embedding, which stays plain."""
    out = quantized_checkpoint(
        tmp_path, family, "int4_awq", tp_size=2, settings={"quantize_lm_head": True}
    )
    unified = load_unified(out)
    assert unified.config.quantization.exclude_modules == ["*vocab_embedding", "*ln_f"]
    hf = toy_tensors(toy_config(family))
    head = hf["model.embed_tokens.weight" if family == "gemma2" else "lm_head.weight"]
    scales = {"prequant": measured(tmp_path)["lm_head.prequant"]}
    for kind, value in expected("int4_awq", as_floats(head, "BF16"), scales).items():
        assert torch.equal(stored(unified, f"lm_head.{kind}").float(), value.float()), kind
    embedding = unified.tensor("transformer.vocab_embedding.weight")
    assert np.array_equal(embedding.data, hf["model.embed_tokens.weight"])


def test_rows_that_tensor_parallelism_adds_to_the_head_are_zero(tmp_path: Path) -> None:
    quantized_checkpoint(
        tmp_path,
        "llama",
        "int4_awq",
        tp_size=4,
        head_dim=16,
        vocab_size=254,
        settings={"quantize_lm_head": True},
    )
    last = read_safetensors_header(tmp_path / "checkpoint" / "rank3.safetensors")
    assert last["lm_head.weight"].shape == (32, 32)
    assert not read_tensor(last["lm_head.weight"])[31:].any()
    assert last["lm_head.weights_scaling_factor"].shape == (64, 2)
    assert not read_tensor(last["lm_head.weights_scaling_factor"])[62:].any()


def test_weights_are_made_in_chunks_of_whole_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows are read at a time, by jobs of some 500 bytes."""
    whole = quantized_checkpoint(tmp_path / "whole", "phi3", "int4_awq", tp_size=2)
    monkeypatch.setattr("specpipe.quantization.weights._CHUNK_BYTES", 1)
    monkeypatch.setattr("specpipe.checkpoints.unified.JOB_BYTES", 500)
    pieces = quantized_checkpoint(tmp_path / "pieces", "phi3", "int4_awq", tp_size=2)
    for rank in ("rank0.safetensors", "rank1.safetensors"):
        assert (pieces / rank).read_bytes() == (whole / rank).read_bytes()


def refusal(folder: Path, format: str, *, tp_size: int = 1, **settings: Any) -> str:
    """Returns why a toy in `folder`/hf is refused, with the scales in `folder`/scales."""
    out = folder / "out"
    out.mkdir()
    chosen = scheme(format, **settings)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        quantize(folder / "hf", folder / "scales", out, chosen, tp_size=tp_size)
    assert not any(out.glob("config.json"))
    return str(caught.value).replace(str(folder), "FOLDER")


def edit_scales(folder: Path, changed: Mapping[str, Any]) -> None:
    """Replaces scales by name; None removes one."""
    path = folder / "scales" / "scales.safetensors"
    tensors = {name: read_tensor(info) for name, info in read_safetensors_header(path).items()}
    for name, value in changed.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = np.array(value, np.float32).view(np.uint32)
    path.unlink()
    write_tensors(path, tensors, dtype="F32")


_FC = "transformer.layers.0.mlp.fc"


@pytest.mark.parametrize(
    ("format", "changed", "message"),
    [
        (
            "fp8",
            {f"{_FC}.input_amax": [0.0]},
            "FOLDER/scales/scales.safetensors: transformer.layers.0.mlp.fc.input_amax is 0.0, "
            "which is no scale; the model gives nothing usable there, exclude the linear or look "
            "at the calibration data",
        ),
        (
            "int4_awq",
            {f"{_FC}.prequant": [float("nan")] * 32},
            "FOLDER/scales/scales.safetensors: transformer.layers.0.mlp.fc.prequant is nan, which "
            "is no scale; the model gives nothing usable there, exclude the linear or look at the "
            "calibration data",
        ),
        (
            "fp8",
            {f"{_FC}.input_amax": [float("inf")]},
            "FOLDER/scales/scales.safetensors: transformer.layers.0.mlp.fc.input_amax is inf, "
            "which is no scale; the model gives nothing usable there, exclude the linear or look "
            "at the calibration data",
        ),
        (
            "int4_awq",
            {f"{_FC}.prequant": [1.0] * 16},
            "FOLDER/scales/scales.safetensors: transformer.layers.0.mlp.fc.prequant is F32 [16], "
            "expected F32 [32]: the scales are those of another checkpoint; calibrate again",
        ),
        (
            "w4a8_awq",
            {f"{_FC}.weight_amax_2": None, f"{_FC}.input_amax": None},
            "FOLDER/scales/scales.safetensors lacks 2 scales of this checkpoint and format: "
            "transformer.layers.0.mlp.fc.input_amax, transformer.layers.0.mlp.fc.weight_amax_2; "
            "calibrate again",
        ),
        (
            "fp8",
            {"transformer.layers.2.mlp.fc.input_amax": [1.0]},
            "FOLDER/scales/scales.safetensors has 1 scales of no linear of this checkpoint: "
            "transformer.layers.2.mlp.fc.input_amax; calibrate again",
        ),
    ],
)
def test_unfit_scales_are_refused(
    tmp_path: Path, format: str, changed: dict[str, Any], message: str
) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    write_scales(tmp_path / "scales", checkpoint, scheme(format))
    edit_scales(tmp_path, changed)
    assert refusal(tmp_path, format) == message


def test_scales_of_another_format_are_refused(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    write_scales(tmp_path / "scales", checkpoint, scheme("nvfp4"))
    assert refusal(tmp_path, "fp8") == (
        "FOLDER/scales was calibrated for nvfp4, not for fp8; calibrate again"
    )


def test_scales_of_smaller_weights_are_found_while_writing(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    write_scales(tmp_path / "scales", checkpoint, scheme("fp8"))
    edit_scales(tmp_path, {f"{_FC}.weight_amax": [0.25]})
    message = refusal(tmp_path, "fp8")
    assert message.startswith("FOLDER/hf: model.layers.0.mlp.gate_proj.weight holds 0.3")
    assert message.endswith(
        ", but the greatest weight of transformer.layers.0.mlp.fc was 0.25 when its scales were "
        "measured: they are those of another checkpoint; calibrate again"
    )


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    write_scales(tmp_path / "scales", checkpoint, scheme("int4_awq"))
    tensors = toy_tensors(toy_config())
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 0x7FC0
    (checkpoint / "model.safetensors").unlink()
    write_tensors(checkpoint / "model.safetensors", tensors)
    assert refusal(tmp_path, "int4_awq") == (
        "FOLDER/hf/model.safetensors: model.layers.1.mlp.down_proj.weight[3, 5] is nan, which no "
        "weight can be: the checkpoint is damaged; download it again, or use another one"
    )


@pytest.mark.parametrize(
    ("format", "overrides", "settings", "message"),
    [
        (
            "int4_awq",
            {"intermediate_size": 96},
            {"awq_block_size": 64, "exclude": ["*attention*", "*fc", "*gate"]},
            "int4_awq does not fit transformer.layers.0.mlp.proj: it has 96 inputs, which blocks "
            "of 64 do not divide; an awq_block_size of 32 divides them",
        ),
        (
            "nvfp4",
            {"intermediate_size": 72},
            {},
            "nvfp4 does not fit transformer.layers.0.mlp.proj: it has 72 inputs, which blocks of "
            "16 do not divide; exclude it, or use fp8",
        ),
        (
            "int4_awq",
            {"vocab_size": 251},
            {"quantize_lm_head": True},
            "int4_awq does not fit lm_head: it has 251 outputs, and int4_awq packs them in pairs; "
            "exclude it, or use fp8",
        ),
        (
            "fp8",
            {},
            {"exclude": ["*.mlp.proj", "*.down_proj"]},
            "quantization.exclude: '*.down_proj' names no linear; they are named as "
            "transformer.layers.0.attention.qkv",
        ),
        (
            "fp8",
            {},
            {"exclude": ["*"]},
            "quantization.exclude leaves no linear to quantize; exclude fewer",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path,
    format: str,
    overrides: dict[str, Any],
    settings: dict[str, Any],
    message: str,
) -> None:
    write_toy_checkpoint(tmp_path / "hf", **overrides)
    assert refusal(tmp_path, format, **settings) == message


def test_blocks_divide_the_inputs_of_each_rank(tmp_path: Path) -> None:
    write_toy_checkpoint(tmp_path / "hf")
    assert refusal(tmp_path, "int4_awq", tp_size=2, awq_block_size=32) == (
        "int4_awq does not fit transformer.layers.0.attention.dense: it has 16 inputs on each of 2 "
        "ranks, which blocks of 32 do not divide; an awq_block_size of 16 divides them"
    )


def test_formats_without_data_need_no_scales(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    assert write_scales(tmp_path / "scales", checkpoint, scheme("fp8_pc_pt")) is None
    stage = Quantize("draft", checkpoint, None, scheme("fp8_pc_pt"))
    (tmp_path / "out").mkdir()
    stage.run(tmp_path / "out")
    assert load_unified(tmp_path / "out").config.quantization.quant_algo == (
        "FP8_PER_CHANNEL_PER_TOKEN"
    )


def test_stage_names_its_inputs_and_its_role(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf", intermediate_size=72)
    settings = scheme("int4_awq", exclude=["*.mlp.fc"])
    stage = Quantize("target", checkpoint, tmp_path / "scales", settings, tp_size=2)
    assert stage.name == "target/quantize"
    inputs = stage.inputs()
    assert [path.name for path in inputs.files] == ["config.json", "model.safetensors", "scales"]
    assert inputs.libraries == ("torch",)
    assert json.loads(json.dumps(inputs.settings)) == {
        "tp_size": 2,
        "pp_size": 1,
        "format": "int4_awq",
        "kv_cache": None,
        "awq_block_size": 16,
        "quantize_lm_head": False,
        "exclude": ["*.mlp.fc"],
    }
    with pytest.raises(ConfigError, match="^target: int4_awq does not fit transformer.layers.0"):
        stage.run(tmp_path)


def test_same_inputs_same_bytes(tmp_path: Path) -> None:
    outs = [quantized_checkpoint(tmp_path / name, "qwen3", "w4a8_awq") for name in "ab"]
    for name in ("config.json", "rank0.safetensors"):
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes()


def test_a_swapped_scale_is_noticed(tmp_path: Path) -> None:
    """What `test_dequantized_weights_are_near_the_plain_ones` would find: the test of the test."""
    unified = load_unified(quantized_checkpoint(tmp_path, "llama", "int4_awq"))
    prefix = "transformer.layers.0.mlp.fc."
    weight = stored(unified, f"{prefix}weight")
    scales = stored(unified, f"{prefix}weights_scaling_factor")
    plain = as_floats(toy_tensors(toy_config())["model.layers.0.mlp.gate_proj.weight"], "BF16")
    prequant = stored(unified, f"{prefix}prequant_scaling_factor").float()

    def error(scales: Tensor, prequant: Tensor) -> float:
        difference = numbers.dequantize_int4(weight, scales) * prequant - plain
        return float(difference.square().mean().sqrt() / plain.square().mean().sqrt())

    assert error(scales, prequant) < 0.15
    assert error(scales.flip(1), prequant) > 0.2
    assert error(scales.flip(0), prequant) > 0.2
    assert error(scales, torch.ones(32)) > 0.2
