"""Engines of quantized checkpoints on a CPU, where everything is emulated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specpipe.errors import EngineBuildError
from specpipe.runtimes.torch.engine import TorchEngine
from tests.quantization.checkpoints import FORMATS, quantized_checkpoint
from tests.runtimes.torch.engines import build_engine, load_engine
from tests.runtimes.torch.quantized_reference import (
    CHUNKS,
    TEXTS,
    assert_agree,
    logits,
    reference_model,
)
from tests.runtimes.torch.test_engine import difference, reference, run
from tests.toy import ARCHITECTURES

Change = Callable[[dict[str, Tensor]], None]
"""What is done to the tensors of a checkpoint."""

FAULT = 1e-3  # what a comparison with ModelOpt would let pass

DISTANCES = {
    "fp8": (0.04, 0.15),
    "fp8_pc_pt": (0.04, 0.15),
    "int8_sq": (0.04, 0.15),
    "int4_awq": (0.15, 0.5),
    "w4a8_awq": (0.15, 0.5),
    "int8_wo": (0.005, 0.02),
    "int4_wo": (0.08, 0.3),
    "nvfp4": (0.15, 0.5),
}
"""How far a format takes the toys' logits from the unquantized, root mean square, relative."""


def quantized_engine(
    work: Path, family: str = "llama", format: str = "fp8", **settings: Any
) -> TorchEngine:
    quantized_checkpoint(work, family, format, **settings)
    return load(work)


def load(work: Path, **settings: Any) -> TorchEngine:
    return load_engine(work / "hf", work, max_batch_size=len(TEXTS), **settings)


def expected_logits(work: Path) -> list[Tensor]:
    return logits(reference_model(work / "checkpoint", work / "hf"), TEXTS)


def shapes(work: Path) -> dict[str, tuple[str, list[int]]]:
    with safe_open(work / "engine" / "model.safetensors", framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    ours, theirs = torch.cat(found), torch.cat(expected)
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("format", FORMATS)
def test_an_engine_computes_what_the_format_means(format: str, family: str, tmp_path: Path) -> None:
    engine = quantized_engine(tmp_path, family, format)
    found = run(engine, TEXTS, CHUNKS)
    assert_agree(found, expected_logits(tmp_path))
    least, most = DISTANCES[format]
    assert least <= distance(found, reference(tmp_path / "hf", TEXTS)) <= most


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_an_fp8_cache_holds_rounded_keys_and_values(
    format: str, family: str, tmp_path: Path
) -> None:
    engine = quantized_engine(tmp_path, family, format, settings={"kv_cache": "fp8"})
    assert_agree(run(engine, TEXTS, CHUNKS), expected_logits(tmp_path))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("format", ["fp8", "int4_awq", "int8_wo"])
def test_a_quantized_head(format: str, is_tied: bool, tmp_path: Path) -> None:
    engine = quantized_engine(
        tmp_path, format=format, settings={"quantize_lm_head": True}, tie_word_embeddings=is_tied
    )
    assert "embedding.weight" in shapes(tmp_path)
    assert_agree(run(engine, TEXTS, CHUNKS), expected_logits(tmp_path))


@pytest.mark.parametrize("format", ["fp8", "int8_sq", "int8_wo"])
def test_linears_that_are_excluded_stay_plain(format: str, tmp_path: Path) -> None:
    excluded = ["*.mlp.gate", "transformer.layers.1.attention.*"]
    engine = quantized_engine(tmp_path, "qwen2", format, settings={"exclude": excluded})
    held = shapes(tmp_path)
    # Only the weight of int8_wo is quantized, so what it reads goes to both halves as it is.
    assert ("layers.0.mlp_in.weight" in held) == (format == "int8_wo")
    assert ("layers.0.mlp_fc.input_scale" in held) == (format != "int8_wo")
    assert "layers.0.mlp_gate.input_scale" not in held
    assert "layers.1.qkv.input_scale" not in held
    assert_agree(run(engine, TEXTS, CHUNKS), expected_logits(tmp_path))


def test_halves_with_scales_of_their_own_are_two_linears(tmp_path: Path) -> None:
    quantized_checkpoint(tmp_path, "gemma2", "fp8")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["transformer.layers.0.mlp.gate.activation_scaling_factor"] *= 1.5

    edit(tmp_path, change)
    engine = load(tmp_path)
    held = shapes(tmp_path)
    assert "layers.0.mlp_gate.weight" in held
    assert "layers.1.mlp_in.weight" in held
    assert_agree(run(engine, TEXTS, CHUNKS), expected_logits(tmp_path))


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_int4_with_zero_points(family: str, tmp_path: Path) -> None:
    """As AWQ and GPTQ checkpoints of others have them."""
    write_with_zero_points(tmp_path, family)
    assert_agree(run(load(tmp_path), TEXTS, CHUNKS), expected_logits(tmp_path))


def write_with_zero_points(work: Path, family: str, **settings: Any) -> None:
    quantized_checkpoint(work, family, "int4_awq", settings=settings)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("prequant_scaling_factor")]:
            del tensors[name]
        for name in [name for name in tensors if name.endswith("weights_scaling_factor")]:
            scale = tensors[name].float()
            tensors[name.replace("weights_scaling_factor", "zero")] = scale * torch.randn(
                scale.shape, generator=torch.Generator().manual_seed(len(tensors))
            )

    edit(work, change)
    change_quantization(work, quant_algo="W4A16_GPTQ", has_zero_point=True)


def edit(work: Path, change: Change) -> None:
    path = work / "checkpoint" / "rank0.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


@pytest.mark.parametrize("format", ["fp8", "int4_awq", "nvfp4"])
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_splitting_over_ranks_changes_nothing(family: str, format: str, tmp_path: Path) -> None:
    settings = {"kv_cache": "fp8"} if format == "fp8" else {}
    for name, split in (("whole", {}), ("split", {"tp_size": 2, "pp_size": 2})):
        quantized_checkpoint(tmp_path / name, family, format, settings=settings, **split)
        build_engine(tmp_path / name / "hf", tmp_path / name)
    whole, ranks = (
        (tmp_path / name / "engine" / "model.safetensors").read_bytes()
        for name in ("whole", "split")
    )
    assert whole == ranks


def test_an_engine_holds_dequantized_weights_and_scales_of_inputs(tmp_path: Path) -> None:
    quantized_engine(tmp_path, format="w4a8_awq", settings={"kv_cache": "fp8"})
    layer = {
        name.removeprefix("layers.0."): held
        for name, held in shapes(tmp_path).items()
        if name.startswith("layers.0.")
    }
    linears = {"qkv": [32, 64], "dense": [32, 32], "mlp_in": [32, 128], "mlp_out": [64, 32]}
    assert layer == {
        "attention_norm.weight": ("F32", [32]),
        "kv_cache.scale": ("F32", [1]),
        "mlp_norm.weight": ("F32", [32]),
        **{f"{name}.weight": ("F32", shape) for name, shape in linears.items()},
        **{f"{name}.input_scale": ("F32", [1]) for name in linears},
        **{f"{name}.prequant": ("F32", shape[:1]) for name, shape in linears.items()},
    }


@pytest.mark.parametrize(
    ("format", "stored", "tolerance"),
    [
        ("int4_awq", "BF16", 0.03),  # bfloat16
        ("int8_sq", "F32", 0.1),  # bfloat16, rounded to int8: the error of the format again
    ],
)
def test_half_precision_rounds_what_kernels_round(
    format: str, stored: str, tolerance: float, tmp_path: Path
) -> None:
    """Weights that kernels dequantize to it are in half precision, factors of products are not."""
    exact = quantized_engine(tmp_path, "qwen3", format)
    found = run(exact, TEXTS, CHUNKS)
    shutil.rmtree(tmp_path / "engine")
    rounded = run(load(tmp_path, dtype="bfloat16"), TEXTS, CHUNKS)
    assert shapes(tmp_path)["layers.0.qkv.weight"] == (stored, [32, 64])
    assert shapes(tmp_path)["layers.0.qkv.prequant"] == ("BF16", [32])
    assert 1e-4 <= distance(rounded, found) <= tolerance


def swapped(name: str) -> Change:
    """Exchanges a tensor of layer 0 with that of layer 1."""

    def change(tensors: dict[str, Tensor]) -> None:
        first, second = (f"transformer.layers.{n}.{name}" for n in (0, 1))
        assert not torch.equal(tensors[first], tensors[second])
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


def transposed(name: str) -> Change:
    """Reads the scales of blocks by columns."""

    def change(tensors: dict[str, Tensor]) -> None:
        scales = tensors[f"transformer.layers.0.{name}"]
        tensors[f"transformer.layers.0.{name}"] = scales.t().reshape(scales.shape)

    return change


def one(name: str) -> Change:
    """Drops a scale."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"transformer.layers.0.{name}"].fill_(1)

    return change


def high_first(name: str) -> Change:
    """Takes the high half of a byte for the first number."""

    def change(tensors: dict[str, Tensor]) -> None:
        packed = tensors[f"transformer.layers.0.{name}"].view(torch.uint8)
        tensors[f"transformer.layers.0.{name}"].view(torch.uint8).copy_(packed << 4 | packed >> 4)

    return change


QKV, DENSE, PROJ = "attention.qkv", "attention.dense", "mlp.proj"
FAULTS = [
    ("fp8", swapped(f"{QKV}.weights_scaling_factor")),
    ("fp8", swapped(f"{PROJ}.activation_scaling_factor")),
    ("fp8", one("attention.kv_cache_scaling_factor")),
    ("fp8", swapped("attention.kv_cache_scaling_factor")),
    ("fp8_pc_pt", swapped(f"{QKV}.per_channel_scale")),
    ("int8_sq", swapped(f"{DENSE}.weights_scaling_factor")),
    ("int8_sq", swapped(f"{QKV}.activation_scaling_factor")),
    ("int8_sq", one(f"{DENSE}.prequant_scaling_factor")),
    ("int4_awq", one(f"{DENSE}.prequant_scaling_factor")),
    ("int4_awq", swapped(f"{QKV}.prequant_scaling_factor")),
    ("int4_awq", transposed(f"{PROJ}.weights_scaling_factor")),
    ("int4_awq", high_first(f"{PROJ}.weight")),
    ("w4a8_awq", one(f"{QKV}.prequant_scaling_factor")),
    ("w4a8_awq", transposed(f"{DENSE}.weights_scaling_factor")),
    ("w4a8_awq", swapped(f"{PROJ}.weights_scaling_factor_2")),
    ("w4a8_awq", swapped(f"{PROJ}.activation_scaling_factor")),
    ("nvfp4", transposed(f"{PROJ}.weights_scaling_factor")),
    ("nvfp4", swapped(f"{QKV}.weights_scaling_factor_2")),
    ("nvfp4", swapped(f"{DENSE}.activation_scaling_factor")),
    ("nvfp4", high_first(f"{PROJ}.weight")),
]


@pytest.mark.parametrize(("format", "change"), FAULTS)
def test_a_damaged_checkpoint_shows_in_the_logits(
    format: str, change: Change, tmp_path: Path
) -> None:
    settings = {"kv_cache": "fp8"} if format == "fp8" else {}
    quantized_checkpoint(tmp_path, "llama", format, settings=settings)
    expected = expected_logits(tmp_path)
    edit(tmp_path, change)
    found = run(load(tmp_path), TEXTS, CHUNKS)
    assert min(difference(a, b) for a, b in zip(found, expected, strict=True)) > FAULT


def change_quantization(work: Path, **changes: Any) -> None:
    path = work / "checkpoint" / "config.json"
    config = json.loads(path.read_text())
    config["quantization"] |= changes
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_cache_quant_algo": "INT8"},
            "target: kv_cache_quant_algo INT8 is not supported by runtime 'torch'; "
            "supported: FP8, or none",
        ),
        (
            {"has_zero_point": True},
            "target: has_zero_point true is not supported with quant_algo FP8; "
            "such weights are W4A16_GPTQ in a unified checkpoint",
        ),
    ],
)
def test_what_it_cannot_compute_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    quantized_checkpoint(tmp_path, settings={"kv_cache": "fp8"})
    change_quantization(tmp_path, **changes)
    with pytest.raises(EngineBuildError) as caught:
        load(tmp_path)
    assert str(caught.value) == message


def test_memory_counts_the_weights_that_are_stored(tmp_path: Path) -> None:
    for format in FORMATS:
        work = tmp_path / format
        engine = quantized_engine(work, "gemma2", format)
        size = {"F32": 4, "BF16": 2}
        weights = sum(
            size[dtype] * torch.Size(shape).numel()
            for name, (dtype, shape) in shapes(work).items()
            if name.endswith(".weight")
        )
        assert engine.memory.weights_bytes == weights
        written = (work / "engine" / "model.safetensors").stat().st_size
        assert weights < written < 1.1 * weights
