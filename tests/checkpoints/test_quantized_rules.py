from __future__ import annotations

from typing import Any

import pytest

from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.quantized_rules import is_quantized
from specpipe.checkpoints.unified_layout import part_shape, stored_dtype, tensor_rules
from specpipe.quantization.quantized_config import quantized_config
from tests.quantization.checkpoints import FORMATS, scheme
from tests.toy import ARCHITECTURES, toy_config


def quantized(name: str, family: str = "llama", *, tp_size: int = 1, **settings: Any) -> Any:
    config = unified_config(toy_config(family), tp_size=tp_size)
    return quantized_config(config, scheme(name, **settings))


def layer_tensors(config: Any, module: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns dtype and whole shape of a linear's tensors in layer 0, by the end of the name."""
    found = {}
    for rule, layer in tensor_rules(config):
        name = rule.name.format(n=layer)
        if layer == 0 and f".{module}." in name:
            shapes = [part_shape(config, part) for part in rule.parts]
            shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
            found[name.rpartition(".")[2]] = stored_dtype(config, rule), shape
    return found


def test_tensors_of_each_format() -> None:
    """TensorRT-LLM's checkpoint format: hidden 32, 64 rows of q, k and v, blocks of 16."""
    one, by_row, by_column = ("F32", (1,)), ("F32", (64,)), ("BF16", (32,))
    expected = {
        "fp8": {
            "weight": ("F8_E4M3", (64, 32)),
            "activation_scaling_factor": one,
            "weights_scaling_factor": one,
        },
        "fp8_pc_pt": {"weight": ("F8_E4M3", (64, 32)), "per_channel_scale": by_row},
        "int8_sq": {
            "weight": ("I8", (64, 32)),
            "activation_scaling_factor": one,
            "weights_scaling_factor": by_row,
            "prequant_scaling_factor": by_column,
        },
        "int4_awq": {
            "weight": ("I8", (32, 32)),
            "weights_scaling_factor": ("BF16", (64, 2)),
            "prequant_scaling_factor": by_column,
        },
        "w4a8_awq": {
            "weight": ("I8", (32, 32)),
            "activation_scaling_factor": one,
            "weights_scaling_factor": ("BF16", (64, 2)),
            "weights_scaling_factor_2": one,
            "prequant_scaling_factor": by_column,
        },
        "int8_wo": {"weight": ("BF16", (64, 32))},
        "int4_wo": {"weight": ("BF16", (64, 32))},
        "nvfp4": {
            "weight": ("U8", (64, 16)),
            "activation_scaling_factor": one,
            "weights_scaling_factor": ("F8_E4M3", (64, 2)),
            "weights_scaling_factor_2": one,
        },
    }
    assert tuple(expected) == FORMATS
    for name, tensors in expected.items():
        assert layer_tensors(quantized(name), "attention.qkv") == tensors, name


def test_scales_are_split_as_their_weight() -> None:
    config = quantized("w4a8_awq", tp_size=2)
    splits = {}
    for rule, layer in tensor_rules(config):
        if layer == 0 and ("attention.dense." in rule.name or "attention.qkv." in rule.name):
            module, _, kind = rule.name.rpartition(".")
            splits[f"{module.rpartition('.')[2]}.{kind}"] = [part.split for part in rule.parts]
    assert splits == {
        "qkv.weight": ["rows", "kv_heads", "kv_heads"],
        "qkv.activation_scaling_factor": ["none"],
        "qkv.weights_scaling_factor": ["rows", "kv_heads", "kv_heads"],
        "qkv.weights_scaling_factor_2": ["none"],
        "qkv.prequant_scaling_factor": ["none"],
        "dense.weight": ["columns"],
        "dense.activation_scaling_factor": ["none"],
        "dense.weights_scaling_factor": ["columns"],
        "dense.weights_scaling_factor_2": ["none"],
        "dense.prequant_scaling_factor": ["rows"],
    }


def test_scale_of_each_output_is_whole_where_inputs_are_split() -> None:
    config = quantized("int8_sq", tp_size=2)
    splits = {
        rule.name: rule.parts[0].split
        for rule, layer in tensor_rules(config)
        if layer == 0 and rule.name.endswith("weights_scaling_factor")
    }
    prefix = "transformer.layers.{n}"
    assert splits == {
        f"{prefix}.attention.qkv.weights_scaling_factor": "rows",
        f"{prefix}.attention.dense.weights_scaling_factor": "none",
        f"{prefix}.mlp.fc.weights_scaling_factor": "rows",
        f"{prefix}.mlp.gate.weights_scaling_factor": "rows",
        f"{prefix}.mlp.proj.weights_scaling_factor": "none",
    }


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_nothing_but_linears_is_quantized(family: str) -> None:
    config = quantized("fp8", family, quantize_lm_head=True)
    modules = {
        rule.name.format(n=layer).rpartition(".")[0].removeprefix("transformer.layers.")
        for rule, layer in tensor_rules(config)
        if stored_dtype(config, rule) == "F8_E4M3"
    }
    linears = ["attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj"]
    if family == "phi3":
        linears.remove("mlp.gate")  # `fc` holds both
    assert modules == {f"{n}.{linear}" for n in (0, 1) for linear in linears} | {"lm_head"}


def test_excluded_linears_stay_plain() -> None:
    config = quantized("int4_awq", exclude=["*.1.*", "*.mlp.proj"])
    assert config.quantization.exclude_modules == [
        "lm_head",
        "*.1.*",
        "*.mlp.proj",
        "*vocab_embedding",
        "*ln_f",
    ]
    prefix = "transformer.layers.0"
    assert is_quantized(config, f"{prefix}.attention.qkv")
    assert not is_quantized(config, f"{prefix}.mlp.proj")
    assert not is_quantized(config, "transformer.layers.1.attention.qkv")
    assert not is_quantized(config, "lm_head")
    assert not is_quantized(config, f"{prefix}.input_layernorm")
    assert layer_tensors(config, "mlp.proj") == {"weight": ("BF16", (32, 64))}


def test_kv_cache_scale_of_each_layer() -> None:
    config = quantized("nvfp4", kv_cache="fp8")
    names = [rule.name.format(n=n) for rule, n in tensor_rules(config) if "kv_cache" in rule.name]
    suffix = "attention.kv_cache_scaling_factor"
    assert names == [f"transformer.layers.{n}.{suffix}" for n in (0, 1)]
