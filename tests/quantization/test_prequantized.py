from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from specpipe.build.stages.convert import Convert, convert
from specpipe.build.stages.export import export
from specpipe.build.stages.quantize import quantize
from specpipe.checkpoints.checkpoint import create_safetensors, open_checkpoint
from specpipe.checkpoints.unified import UnifiedCheckpoint, load_unified
from specpipe.checkpoints.unified_layout import tensor_rules
from specpipe.checkpoints.unified_sections import NEVER_QUANTIZED
from specpipe.errors import CheckpointError, ConfigError
from specpipe.quantization import numbers
from specpipe.quantization.prequantized import read_prequantized
from tests.quantization.checkpoints import as_floats, scheme, write_scales
from tests.toy import read_tensor, toy_config, toy_tensors, write_toy_checkpoint

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float32]
Stored = dict[str, tuple[str, npt.NDArray[Any]]]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def carried(folder: Path, out: Path, **mapping: int) -> UnifiedCheckpoint:
    out.mkdir()
    convert(folder, out, **mapping)
    return load_unified(out)


def is_toy_linear(name: str) -> bool:
    return name.endswith("proj.weight")


def write_quantized(
    folder: Path,
    section: Mapping[str, Any],
    make: Callable[[str, Floats], Stored],
    family: str = "llama",
    **overrides: Any,
) -> dict[str, Floats]:
    """Writes a toy whose linears are what `make` returns of them; returns the plain weights.

    make  takes a linear's name, which ends in a dot, and its weight; returns raw tensors by the
          rest of their name
    """
    config = toy_config(family, **{"dtype": "float16"} | overrides)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    tensors: Stored = {}
    plain: dict[str, Floats] = {}
    for name, raw in toy_tensors(config).items():
        if is_toy_linear(name):
            prefix = name.removesuffix("weight")
            plain[prefix] = raw.view(np.float16).astype(np.float32)
            tensors |= {prefix + end: value for end, value in make(prefix, plain[prefix]).items()}
        else:
            tensors[name] = "F16", raw
    write_stored(folder / "model.safetensors", tensors)
    return plain


def write_stored(path: Path, tensors: Stored) -> None:
    path.unlink(missing_ok=True)
    with create_safetensors(
        path, {name: (dtype, array.shape) for name, (dtype, array) in tensors.items()}
    ) as writer:
        for name, (_, array) in tensors.items():
            writer.write(name, array)


def edit(folder: Path, change: Callable[[Stored], None]) -> None:
    """Changes the tensors of a folder in place."""
    tensors: Stored = {}
    for name, info in open_checkpoint(folder, allow_quantized=True).tensors.items():
        tensors[name] = info.dtype, read_tensor(info)
    change(tensors)
    write_stored(folder / "model.safetensors", tensors)


def bits(values: Tensor) -> npt.NDArray[Any]:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.dtype.itemsize]
    array = values.contiguous().view(width).numpy()
    return array.view(array.dtype.str.replace("i", "u"))


def weights(
    unified: UnifiedCheckpoint, prefixes: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yields each Hugging Face linear of the unified checkpoint, dequantized in float32."""
    parts: dict[str, list[str]] = {}
    for rule, layer in tensor_rules(unified.config):
        module, _, kind = rule.name.format(n=layer).rpartition(".")
        if kind == "weight" and len(rule.parts[0].shape) == 2 and "layers" in module:
            parts[module] = [part.source.format(n=layer) for part in rule.parts]
    algo = unified.config.quantization.quant_algo
    format = {
        "FP8": "fp8",
        "FP8_PER_CHANNEL_PER_TOKEN": "fp8_pc_pt",
        "W4A16_AWQ": "int4_awq",
        "W4A16_GPTQ": "int4_gptq",
    }[algo]
    for module, sources in parts.items():
        tensors: dict[Any, Tensor] = {}
        for name in unified.names():
            if name.startswith(f"{module}.") and not name.endswith("bias"):
                kind = name.removeprefix(f"{module}.")
                raw = unified.tensor(name)
                values = as_floats(raw.data, raw.dtype)
                tensors["quantized" if kind == "weight" else kind] = values
        if "prequant_scaling_factor" in tensors:
            assert set(tensors["prequant_scaling_factor"].tolist()) == {1.0}
        whole = numbers.dequantize(format, tensors)
        row = 0
        for source in sources:
            prefix = source.removesuffix("weight")
            rows = len(prefixes[prefix])
            yield prefix, whole[row : row + rows]
            row += rows


def fp8(weight: Floats, scale: Tensor) -> Tensor:
    return numbers.quantize_fp8(torch.from_numpy(weight), scale)


# What was exported is read back.


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma2"])
@pytest.mark.parametrize("format", ["fp8", "fp8_pc_pt", "int8_sq", "nvfp4"])
def test_an_export_becomes_the_same_unified_checkpoint(
    tmp_path: Path, family: str, format: str
) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf", family)
    settings = scheme(format, kv_cache="fp8", exclude=["*.1.mlp.*"])
    scales = write_scales(tmp_path / "scales", checkpoint, settings)
    for name in ("exported", "direct"):
        (tmp_path / name).mkdir()
    export(checkpoint, scales, tmp_path / "exported", settings)
    quantize(checkpoint, scales, tmp_path / "direct", settings, tp_size=2)
    unified = carried(tmp_path / "exported", tmp_path / "carried", tp_size=2)
    direct = load_unified(tmp_path / "direct")
    assert unified.names() == direct.names()
    for name in direct.names():
        ours, theirs = unified.tensor(name), direct.tensor(name)
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours.data, theirs.data), name
    configs = [u.config.plain() for u in (unified, direct)]
    excluded = [config.pop("quantization").pop("exclude_modules") for config in configs]
    assert configs[0] == configs[1]
    assert excluded[0] == [
        f"transformer.layers.1.mlp.{linear}"
        for linear in ("fc", "gate", "proj")
        if family != "phi3" or linear != "gate"
    ] + ["lm_head", *NEVER_QUANTIZED]


@pytest.mark.parametrize("format", ["int4_awq", "w4a8_awq"])
def test_prequant_in_a_norm_stays_there(tmp_path: Path, format: str) -> None:
    """q, k and v have a prequant of 1 then; the numbers are the same."""
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    scales = write_scales(tmp_path / "scales", checkpoint, scheme(format))
    for name in ("exported", "direct"):
        (tmp_path / name).mkdir()
    export(checkpoint, scales, tmp_path / "exported", scheme(format))
    quantize(checkpoint, scales, tmp_path / "direct", scheme(format))
    unified, direct = (
        carried(tmp_path / "exported", tmp_path / "carried"),
        load_unified(tmp_path / "direct"),
    )
    assert unified.names() == direct.names()
    assert unified.config == direct.config
    differing = {
        name.removeprefix("transformer.layers.")
        for name in direct.names()
        if not np.array_equal(unified.tensor(name).data, direct.tensor(name).data)
    }
    suffixes = ["attention.qkv.prequant_scaling_factor", "input_layernorm.weight"]
    suffixes += [f"mlp.{linear}.prequant_scaling_factor" for linear in ("fc", "gate")]
    suffixes.append("post_layernorm.weight")
    assert differing == {f"{n}.{suffix}" for n in (0, 1) for suffix in suffixes}
    raw = unified.tensor("transformer.layers.0.attention.qkv.prequant_scaling_factor")
    assert as_floats(raw.data, raw.dtype).tolist() == [1.0] * 32


# compressed-tensors


def compressed(
    strategy: str = "tensor", *, dynamic: bool = False, kv_cache: bool = False
) -> dict[str, Any]:
    """Returns a section as llm-compressor 0.8 writes it."""
    numbers_ = {"num_bits": 8, "type": "float", "symmetric": True, "observer": "minmax"}
    inputs = {"strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    cache = numbers_ | {"strategy": "tensor", "dynamic": False}
    return {
        "config_groups": {
            "group_0": {
                "input_activations": numbers_ | inputs,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": numbers_ | {"strategy": strategy, "dynamic": False},
            }
        },
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": cache if kv_cache else None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
    }


def of_tensor(prefix: str, weight: Floats) -> Stored:
    """fp8 with one scale for each linear, of its own weights; the input's grows with its name."""
    scale = torch.tensor([float(np.abs(weight).max()) / 448])
    input_scale = torch.tensor([0.01 * len(prefix)])
    return {
        "weight": ("F8_E4M3", bits(fp8(weight, scale))),
        "weight_scale": ("F32", bits(scale)),
        "input_scale": ("F32", bits(input_scale)),
    }


def test_static_fp8_shares_the_greatest_scale(tmp_path: Path) -> None:
    """The part with that scale keeps its bytes; the others are rounded once more."""
    plain = write_quantized(tmp_path / "hf", compressed(), of_tensor)
    unified = carried(tmp_path / "hf", tmp_path / "out")
    assert unified.config.quantization.plain() == {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", *NEVER_QUANTIZED],
    }
    module = "transformer.layers.0.attention.qkv"
    parts = [f"model.layers.0.self_attn.{letter}_proj." for letter in "qkv"]
    scales = [of_tensor(part, plain[part])["weight_scale"][1].view(np.float32)[0] for part in parts]
    greatest = max(scales)
    raw = unified.tensor(f"{module}.weights_scaling_factor").data
    assert raw.view(np.float32).tolist() == [greatest]
    row = 0
    found = unified.tensor(f"{module}.weight").data
    for part, scale in zip(parts, scales, strict=True):
        once = fp8(plain[part], torch.tensor([scale]))
        twice = fp8((once.float() * torch.tensor(scale)).numpy(), torch.tensor([greatest]))
        expected = once if scale == greatest else twice
        assert np.array_equal(found[row : row + len(plain[part])], bits(expected)), part
        row += len(plain[part])
    inputs = unified.tensor("transformer.layers.0.mlp.proj.activation_scaling_factor").data
    assert inputs.view(np.float32).tolist() == [np.float32(0.01 * 29)]
    fc = unified.tensor("transformer.layers.0.mlp.fc.weight").data
    assert np.array_equal(fc, of_tensor("", plain["model.layers.0.mlp.gate_proj."])["weight"][1])


def test_equal_scales_keep_every_byte(tmp_path: Path) -> None:
    def make(prefix: str, weight: Floats) -> Stored:
        scale = torch.tensor([0.5 / 448])
        return {
            "weight": ("F8_E4M3", bits(fp8(weight, scale))),
            "weight_scale": ("F32", bits(scale)),
            "input_scale": ("F32", bits(torch.tensor([0.02]))),
        }

    plain = write_quantized(tmp_path / "hf", compressed(), make)
    unified = carried(tmp_path / "hf", tmp_path / "out", tp_size=2)
    for prefix, weight in weights(unified, plain):
        assert np.array_equal(
            weight, fp8(plain[prefix], torch.tensor([0.5 / 448])).float() * (0.5 / 448)
        ), prefix


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_fp8_with_a_scale_for_each_token_is_exact(tmp_path: Path, strategy: str) -> None:
    """One scale for each output, in bfloat16 as [out, 1]; or one that each output gets."""

    def make(prefix: str, weight: Floats) -> Stored:
        axis = 1 if strategy == "channel" else None
        greatest = np.abs(weight).max(axis=axis, keepdims=strategy == "channel")
        scale = (torch.as_tensor(greatest) / 448).bfloat16().reshape(-1)
        quantized = fp8(weight, scale.float())
        shape = (len(scale), 1) if strategy == "channel" else (1,)
        return {
            "weight": ("F8_E4M3", bits(quantized)),
            "weight_scale": ("BF16", bits(scale.reshape(shape))),
        }

    plain = write_quantized(tmp_path / "hf", compressed(strategy, dynamic=True), make, "phi3")
    unified = carried(tmp_path / "hf", tmp_path / "out", tp_size=2)
    assert unified.config.quantization.quant_algo == "FP8_PER_CHANNEL_PER_TOKEN"
    name = "transformer.layers.1.attention.dense"
    scales = unified.tensor(f"{name}.per_channel_scale").data.view(np.float32)
    made = make("", plain["model.layers.1.self_attn.o_proj."])
    stored = as_floats(made["weight_scale"][1], "BF16").flatten().expand(32)
    assert np.array_equal(scales, stored)
    assert np.array_equal(unified.tensor(f"{name}.weight").data, made["weight"][1])
    gate_up = make("", plain["model.layers.1.mlp.gate_up_proj."])["weight"][1]
    fc = unified.tensor("transformer.layers.1.mlp.fc.weight").data
    assert np.array_equal(fc, np.concatenate([gate_up[64:], gate_up[:64]]))


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_kv_cache_scale_is_the_greater(tmp_path: Path, names: tuple[str, str]) -> None:
    write_quantized(tmp_path / "hf", compressed(kv_cache=True), of_tensor)

    def add(tensors: Stored) -> None:
        for layer in (0, 1):
            for n, name in enumerate(names):
                scale = bits(torch.tensor([0.25 + layer - n / 8]))
                tensors[f"model.layers.{layer}.self_attn.{name}"] = "F32", scale

    edit(tmp_path / "hf", add)
    unified = carried(tmp_path / "hf", tmp_path / "out")
    assert unified.config.quantization.kv_cache_quant_algo == "FP8"
    for layer, scale in ((0, 0.25), (1, 1.25)):
        name = f"transformer.layers.{layer}.attention.kv_cache_scaling_factor"
        assert unified.tensor(name).data.view(np.float32).tolist() == [scale]


# AWQ and GPTQ, packed by hand


def pack(values: Ints, order: tuple[int, ...] = tuple(range(8))) -> npt.NDArray[np.uint32]:
    """Packs eight neighbouring columns of 4-bit numbers into an int32, the first lowest."""
    groups = values.reshape(len(values), -1, 8).astype(np.uint32)
    packed = np.zeros(groups.shape[:2], np.uint32)
    for half_byte, column in enumerate(order):
        packed |= groups[:, :, column] << np.uint32(4 * half_byte)
    return packed


def asymmetric(weight: Floats, group_size: int = 16) -> tuple[Ints, Ints, Floats]:
    """Returns 4-bit numbers [out, in], zero points and scales [out, groups]."""
    groups = weight.reshape(len(weight), -1, group_size)
    least, most = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    scales = ((most - least) / 15).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.rint(-least / scales), 0, 15).astype(np.int64)
    values = np.rint(groups / scales[:, :, None]) + zeros[:, :, None]
    return np.clip(values, 0, 15).astype(np.int64).reshape(weight.shape), zeros, scales


def symmetric(weight: Floats, group_size: int = 16) -> tuple[Ints, Ints, Floats]:
    groups = weight.reshape(len(weight), -1, group_size)
    scales = (np.abs(groups).max(2) / 7).astype(np.float16).astype(np.float32)
    values = np.clip(np.rint(groups / scales[:, :, None]), -8, 7) + 8
    zeros = np.full(scales.shape, 8)
    return values.astype(np.int64).reshape(weight.shape), zeros, scales


def exact(values: Ints, zeros: Ints, scales: Floats) -> Floats:
    groups = values.reshape(*scales.shape, -1) - zeros[:, :, None]
    return (groups * scales[:, :, None]).astype(np.float32).reshape(values.shape)


def as_awq(values: Ints, zeros: Ints, scales: Floats) -> Stored:
    return {
        "qweight": ("I32", pack(values.T, _AWQ_ORDER)),
        "qzeros": ("I32", pack(zeros.T, _AWQ_ORDER)),
        "scales": ("F16", np.ascontiguousarray(scales.T.astype(np.float16)).view(np.uint16)),
    }


def as_gptq(values: Ints, zeros: Ints, scales: Floats, *, offset: int = 1) -> Stored:
    order = np.arange(values.shape[1], dtype=np.uint32) // (values.shape[1] // scales.shape[1])
    return {
        "qweight": ("I32", np.ascontiguousarray(pack(values).T)),
        "qzeros": ("I32", pack((zeros.T - offset) & 15)),
        "scales": ("F16", np.ascontiguousarray(scales.T.astype(np.float16)).view(np.uint16)),
        "g_idx": ("I32", order),
    }


AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 16,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 16,
    "desc_act": False,
    "sym": True,
    "true_sequential": True,
    "damp_percent": 0.01,
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma2"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_awq_with_zero_points_is_exact(tmp_path: Path, family: str, tp_size: int) -> None:
    """In float32: (number - 8) · scale + (8 - zero point) · scale."""
    plain = write_quantized(
        tmp_path / "hf",
        AWQ,
        lambda prefix, weight: as_awq(*asymmetric(weight)),
        family,
        head_dim=16,
    )
    unified = carried(tmp_path / "hf", tmp_path / "out", tp_size=tp_size)
    assert unified.config.quantization.plain() == {
        "quant_algo": "W4A16_GPTQ",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "has_zero_point": True,
        "exclude_modules": ["lm_head", *NEVER_QUANTIZED],
    }
    seen = {}
    for prefix, weight in weights(unified, plain):
        if family == "phi3":
            continue  # halves that change places, below
        assert np.array_equal(weight, exact(*asymmetric(plain[prefix]))), prefix
        seen[prefix] = len(weight)
    if family != "phi3":
        assert len(seen) == 14
        assert sum(zeros.std() for zeros in zero_points(plain)) > 1  # they do differ


def zero_points(plain: Mapping[str, Floats]) -> Iterator[Ints]:
    return (asymmetric(weight)[1] for weight in plain.values())


def test_fused_parts_of_phi3_change_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value rows begin inside an int32; jobs and chunks have few rows."""
    monkeypatch.setattr("specpipe.checkpoints.unified.JOB_BYTES", 200)
    monkeypatch.setattr("specpipe.quantization.prequantized_linears._CHUNK_BYTES", 1)
    plain = write_quantized(
        tmp_path / "hf",
        AWQ | {"group_size": 8},
        lambda prefix, weight: as_awq(*asymmetric(weight, 8)),
        "phi3",
        head_dim=6,
    )
    unified = carried(tmp_path / "hf", tmp_path / "out", pp_size=2)

    def dequantized(module: str) -> Tensor:
        tensors: dict[Any, Tensor] = {}
        for kind in ("weight", "weights_scaling_factor", "zero"):
            raw = unified.tensor(f"transformer.layers.1.{module}.{kind}")
            values = as_floats(raw.data, raw.dtype)
            tensors["quantized" if kind == "weight" else kind] = values
        return numbers.dequantize("int4_gptq", tensors)

    qkv = exact(*asymmetric(plain["model.layers.1.self_attn.qkv_proj."], 8))
    assert np.array_equal(dequantized("attention.qkv"), qkv)
    gate_up = exact(*asymmetric(plain["model.layers.1.mlp.gate_up_proj."], 8))
    assert np.array_equal(dequantized("mlp.fc"), np.concatenate([gate_up[64:], gate_up[:64]]))


def test_ranks_that_share_a_block_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path / "hf", AWQ, lambda prefix, weight: as_awq(*asymmetric(weight)))
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "hf", tmp_path / "out", tp_size=4)
    assert str(caught.value) == (
        "int4_gptq does not fit transformer.layers.0.attention.dense: it has 8 inputs on each of 4 "
        "ranks, which blocks of 16 do not divide; lower tp_size, or use the checkpoint that it was "
        "quantized from"
    )


@pytest.mark.parametrize("kind", ["gptq", "gptq_v2"])
def test_symmetric_gptq_becomes_int4_awq(tmp_path: Path, kind: str) -> None:
    offset = 1 if kind == "gptq" else 0
    plain = write_quantized(
        tmp_path / "hf",
        GPTQ | {"checkpoint_format": kind},
        lambda prefix, weight: as_gptq(*symmetric(weight), offset=offset),
    )
    unified = carried(tmp_path / "hf", tmp_path / "out", tp_size=2, pp_size=2)
    assert unified.config.quantization.plain() == {
        "quant_algo": "W4A16_AWQ",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "has_zero_point": False,
        "pre_quant_scale": True,
        "exclude_modules": ["lm_head", *NEVER_QUANTIZED],
    }
    seen = set()
    for prefix, weight in weights(unified, plain):
        assert np.array_equal(weight, exact(*symmetric(plain[prefix]))), prefix
        seen.add(prefix)
    assert seen == plain.keys()


def test_gptq_with_zero_points_is_exact(tmp_path: Path) -> None:
    """A zero point of 0 is stored as 15."""
    plain = write_quantized(
        tmp_path / "hf",
        GPTQ | {"sym": False},
        lambda prefix, weight: as_gptq(*asymmetric(weight)),
        "qwen2",
    )

    def all_positive(tensors: Stored) -> None:
        prefix = "model.layers.0.mlp.down_proj."
        plain[prefix] = np.abs(plain[prefix])
        for end, value in as_gptq(*asymmetric(plain[prefix])).items():
            tensors[prefix + end] = value

    edit(tmp_path / "hf", all_positive)
    assert not asymmetric(plain["model.layers.0.mlp.down_proj."])[1].any()
    unified = carried(tmp_path / "hf", tmp_path / "out")
    for prefix, weight in weights(unified, plain):
        assert np.array_equal(weight, exact(*asymmetric(plain[prefix]))), prefix


def test_biases_of_nothing_are_dropped(tmp_path: Path) -> None:
    write_quantized(tmp_path / "hf", GPTQ, lambda prefix, weight: as_gptq(*symmetric(weight)))
    name = "model.layers.1.mlp.up_proj.bias"

    def add(value: int) -> Callable[[Stored], None]:
        return lambda tensors: tensors.update({name: ("F16", np.full(64, value, np.uint16))})

    edit(tmp_path / "hf", add(0))
    unified = carried(tmp_path / "hf", tmp_path / "out")
    assert "transformer.layers.1.mlp.gate.bias" not in unified.names()
    edit(tmp_path / "hf", add(1))
    assert refusal(tmp_path) == (
        f"FOLDER: {name} is not 0, but LlamaForCausalLM has no such bias; use the checkpoint that "
        "it was quantized from"
    )


# What is refused


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        carried(folder / "hf", folder / "refused")
    assert not list((folder / "refused").iterdir())
    return str(caught.value).replace(str(folder / "hf"), "FOLDER")


_READ = (
    "what is read: ModelOpt, compressed-tensors fp8, AWQ (gemm) and GPTQ; use the checkpoint that "
    "it was quantized from"
)


@pytest.mark.parametrize(
    ("section", "fault"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not read"),
        ({}, "quant_method None is not read"),
        (AWQ | {"bits": 3}, "bits 3 is not read, only 4"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not read, only 'gemm'"),
        (AWQ | {"group_size": -1}, "group_size -1 is not read, only a positive number"),
        (GPTQ | {"bits": 8}, "bits 8 is not read, only 4"),
        (GPTQ | {"desc_act": True}, "desc_act True is not read, only False"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' is not read, only 'gptq' or 'gptq_v2'",
        ),
        (
            GPTQ | {"dynamic": {"-:.*down": {}}},
            "settings of single modules (dynamic) are not read",
        ),
        (
            compressed("block", dynamic=True),
            "strategy 'block' is not read, only 'tensor' or 'channel'",
        ),
        (compressed("channel"), "strategy 'channel' is not read, only 'tensor'"),
        (
            compressed() | {"config_groups": {}},
            "it has several config_groups, or none, where one is read",
        ),
        (
            compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity 'sparse-24-bitmask' is not read",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "quant_algo 'MXFP8' is not read"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A16_GPTQ"},
            "quant_algo 'W4A16_GPTQ' is not read",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
            "group_size None is not read, only a positive number",
        ),
    ],
)
def test_other_schemes_are_refused_by_name(
    tmp_path: Path, section: dict[str, Any], fault: str
) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    config = json.loads((checkpoint / "config.json").read_text())
    section = section or {"bits": 4}
    (checkpoint / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    with pytest.raises(CheckpointError) as caught:
        read_prequantized(checkpoint)
    assert str(caught.value) == (
        f"{checkpoint} is already quantized, and {fault} (config.json); {_READ}"
    )


def test_stage_names_its_role(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    (checkpoint / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NF4"}}')
    stage = Convert("draft", checkpoint)
    assert [path.name for path in stage.inputs().files] == [
        "config.json",
        "hf_quant_config.json",
        "model.safetensors",
    ]
    with pytest.raises(CheckpointError) as caught:
        stage.run(tmp_path)
    assert str(caught.value) == (
        f"draft: {checkpoint} is already quantized, and quant_algo 'NF4' is not read "
        f"(hf_quant_config.json); {_READ}"
    )


_Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("section", "make", "change", "message"),
    [
        (
            compressed(),
            of_tensor,
            {f"{_Q}input_scale": None},
            f"FOLDER lacks {_Q}input_scale, which a linear has that is quantized as its config "
            "says",
        ),
        (
            compressed(),
            of_tensor,
            {f"{_Q}weight_scale": None},
            "FOLDER: model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj has a "
            "weight_scale, but not model.layers.0.self_attn.q_proj, which is one linear with it "
            "in the engine",
        ),
        (
            compressed(),
            of_tensor,
            {f"{_Q}weight_scale": ("F32", bits(torch.tensor([0.0])))},
            f"FOLDER: {_Q}weight_scale[0] is the scale 0 in float32; every scale is above 0 and "
            "finite",
        ),
        (
            compressed(),
            of_tensor,
            {f"{_Q}weight_scale": ("F32", bits(torch.ones(32, 1)))},
            f"FOLDER: {_Q}weight_scale is F32 [32, 1], expected BF16 or F16 or F32 [] or [1]",
        ),
        (
            compressed(kv_cache=True),
            of_tensor,
            {},
            "FOLDER says that its KV cache is quantized, but has no "
            "model.layers.0.self_attn.k_proj.k_scale or model.layers.0.self_attn.v_proj.v_scale",
        ),
        (
            GPTQ,
            lambda prefix, weight: as_gptq(*asymmetric(weight)),
            {},
            f"FOLDER: {_Q}qzeros has zero points other than 8, but its config says that there are "
            "none",
        ),
        (
            GPTQ,
            lambda prefix, weight: as_gptq(*symmetric(weight)),
            {f"{_Q}g_idx": ("I32", np.arange(32, dtype=np.uint32)[::-1].copy() // 16)},
            f"FOLDER: {_Q}g_idx says that inputs are not in the order of their groups "
            "(act-order), which no kernel of the engine reads",
        ),
        (
            GPTQ,
            lambda prefix, weight: as_gptq(*symmetric(weight)),
            {f"{_Q}scales": ("F16", np.full((2, 32), 0x7C00, np.uint16))},
            f"FOLDER: {_Q}scales[0, 0] is the scale inf in float16; every scale is above 0 and "
            "finite",
        ),
        (
            AWQ,
            lambda prefix, weight: as_awq(*asymmetric(weight)),
            {f"{_Q}extra": ("F16", np.zeros(1, np.uint16))},
            "FOLDER holds 1 tensors for which LlamaForCausalLM with this config.json has no use: "
            f"{_Q}extra",
        ),
    ],
)
def test_folders_that_contradict_themselves_are_refused(
    tmp_path: Path,
    section: dict[str, Any],
    make: Callable[[str, Floats], Stored],
    change: Mapping[str, Any],
    message: str,
) -> None:
    write_quantized(tmp_path / "hf", section, make)

    def apply(tensors: Stored) -> None:
        for name, value in change.items():
            if value is None:
                del tensors[name]
            else:
                tensors[name] = value

    edit(tmp_path / "hf", apply)
    with pytest.raises(CheckpointError) as caught:
        carried(tmp_path / "hf", tmp_path / "out")
    found = str(caught.value).replace(str(tmp_path / "hf"), "FOLDER")
    assert found.removesuffix("; use the checkpoint that it was quantized from") == message


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_of_fp8_that_is_no_number_is_refused(code: int, tmp_path: Path) -> None:
    write_quantized(tmp_path / "hf", compressed(), of_tensor)

    def damage(tensors: Stored) -> None:
        dtype, codes = tensors[f"{_Q}weight"]
        codes = codes.copy()
        codes[31, 7] = code
        tensors[f"{_Q}weight"] = dtype, codes

    edit(tmp_path / "hf", damage)
    with pytest.raises(CheckpointError) as caught:
        carried(tmp_path / "hf", tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path}/hf/model.safetensors: {_Q}weight[31, 7] is nan, which no weight can be: the "
        "checkpoint is damaged; download it again, or use another one"
    )


def test_plain_folders_are_plain(tmp_path: Path) -> None:
    assert read_prequantized(write_toy_checkpoint(tmp_path / "hf")) is None


def test_weights_that_are_not_quantized_after_all(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"quantization_config": AWQ}))
    assert refusal(tmp_path) == (
        "FOLDER says that it is quantized, but no linear has a qweight; download it again"
    )
