"""A quantized unified checkpoint as a transformers model: what an engine of it is to compute.

Everything here is written out plainly, in float32, from the definition of each format, and shares
no code with what it checks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.runtimes.torch.test_engine import difference, tokens

TEXTS = [tokens(seed, 24) for seed in range(6)]
CHUNKS = [[9, 1, 4, 1, 5], [9, 1, 4, 1, 5], [24], [1], [17, 5, 1], [3, 1, 1]]
"""Prefill, decode and verification, alone and together."""

TOLERANCE = 1e-5  # float32, relative to the largest logit
EDGE = 0.1

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FORMAT_OF_ALGO = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_pc_pt",
    "W8A8_SQ_PER_CHANNEL": "int8_sq",
    "W4A16_AWQ": "int4_awq",
    "W4A8_AWQ": "w4a8_awq",
    "W8A16": "int8_wo",
    "W4A16": "int4_wo",
    "NVFP4": "nvfp4",
    "W4A16_GPTQ": "int4_gptq",
}


def fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def int8(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).round().clamp(-128, 127) * scale


def e2m1(x: Tensor) -> Tensor:
    nearest = (x.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    return torch.sign(x) * E2M1[nearest]


def nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, 16))
    greatest = blocks.abs().amax(-1, keepdim=True)
    block_scale = (greatest / 6 / scale).clamp(2**-9, 448).to(torch.float8_e4m3fn).float()
    return (e2m1(blocks / (block_scale * scale)) * block_scale * scale).flatten(-2)


def weight_only(weight: Tensor, bits: int) -> Tensor:
    half = 2 ** (bits - 1)
    scale = weight.float().abs().amax(1, keepdim=True) / half
    quotients = weight.float() / scale
    integers = (quotients.sign() * (quotients.abs() + 0.5).floor()).clamp(-half, half - 1)
    return integers * scale.to(weight.dtype).float()


def int4(packed: Tensor, block_scales: Tensor) -> Tensor:
    nibbles = torch.stack([packed & 15, (packed >> 4) & 15], 1).flatten(0, 1).float()
    integers = torch.where(nibbles > 7, nibbles - 16, nibbles)
    blocks = integers.unflatten(1, (block_scales.shape[1], -1))
    return (blocks * block_scales.float().unsqueeze(-1)).flatten(1)


def with_zeros(packed: Tensor, block_scales: Tensor, zeros: Tensor) -> Tensor:
    blocks = int4(packed, block_scales).unflatten(1, (zeros.shape[1], -1))
    return (blocks + zeros.unsqueeze(-1)).flatten(1)


class Linear(nn.Module):
    """x → round(x · prequant) · W + b, all float32."""

    def __init__(self, name: str, tensors: dict[str, Tensor], module: str, rows: slice) -> None:
        super().__init__()
        of = {
            key.rpartition(".")[2]: tensors[key]
            for key in tensors
            if key[: len(module) + 1] == f"{module}."
        }
        self.name = name
        self.weight = nn.Parameter(dequantized(name, of)[rows], requires_grad=False)
        self.prequant = (
            of["prequant_scaling_factor"].float() if "prequant_scaling_factor" in of else None
        )
        self.scale = of.get("activation_scaling_factor")
        bias = of.get("bias")
        self.bias = None if bias is None else bias[rows].float()

    def forward(self, x: Tensor) -> Tensor:
        if self.prequant is not None:
            x = x * self.prequant
        if self.name in ("fp8", "w4a8_awq"):
            assert self.scale is not None
            x = fp8(x, self.scale)
        elif self.name == "fp8_pc_pt":
            x = fp8(x, x.abs().amax(-1, keepdim=True) / 448)
        elif self.name == "int8_sq":
            assert self.scale is not None
            x = int8(x, self.scale)
        elif self.name == "nvfp4":
            assert self.scale is not None
            x = nvfp4(x, self.scale)
        return nn.functional.linear(x, self.weight, self.bias)


def dequantized(name: str, of: dict[str, Tensor]) -> Tensor:
    """Returns the weight [out, in] of a linear from its tensors in the unified checkpoint."""
    weight, scale = of["weight"], of.get("weights_scaling_factor")
    if name == "plain":
        return weight.float()
    if name == "fp8":
        return weight.float() * scale
    if name == "fp8_pc_pt":
        return weight.float() * of["per_channel_scale"].unsqueeze(1)
    if name == "int8_sq":
        assert scale is not None
        return weight.float() * scale.unsqueeze(1)
    if name in ("int8_wo", "int4_wo"):
        return weight_only(weight, 8 if name == "int8_wo" else 4)
    assert scale is not None
    if name == "int4_awq":
        return int4(weight, scale)
    if name == "int4_gptq":
        return with_zeros(weight, scale, of["zero"])
    if name == "w4a8_awq":
        return fp8(int4(weight, scale), of["weights_scaling_factor_2"])
    codes = torch.stack([weight & 15, weight >> 4], -1).flatten(1).long()
    values = torch.where(codes > 7, -E2M1[codes & 7], E2M1[codes & 7]).unflatten(1, (-1, 16))
    return (values * scale.float().unsqueeze(-1) * of["weights_scaling_factor_2"]).flatten(1)


def reference_model(checkpoint: Path, hf: Path) -> nn.Module:
    """Returns the model of a Hugging Face folder with the linears of a checkpoint of one rank."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "rank0.safetensors")
    quantization = config["quantization"]
    name = FORMAT_OF_ALGO[quantization["quant_algo"]]
    model = AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.float32, attn_implementation="eager"
    )
    query = config["num_attention_heads"] * config["head_size"]
    key = config["num_key_value_heads"] * config["head_size"]
    everything = slice(None)

    def linear(module: str, rows: slice = everything) -> Linear:
        excluded = any(fnmatchcase(module, pattern) for pattern in quantization["exclude_modules"])
        return Linear("plain" if excluded else name, tensors, module, rows)

    for n, layer in enumerate(model.model.layers):
        of = f"transformer.layers.{n}"
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(attention, "qkv_proj"):
            attention.qkv_proj = linear(f"{of}.attention.qkv")
            mlp.gate_up_proj = linear(f"{of}.mlp.fc")
            halves = mlp.gate_up_proj.weight.chunk(2)  # up, gate: transformers has gate first
            mlp.gate_up_proj.weight = nn.Parameter(torch.cat(halves[::-1]), requires_grad=False)
        else:
            qkv = f"{of}.attention.qkv"
            attention.q_proj = linear(qkv, slice(0, query))
            attention.k_proj = linear(qkv, slice(query, query + key))
            attention.v_proj = linear(qkv, slice(query + key, query + 2 * key))
            mlp.gate_proj = linear(f"{of}.mlp.fc")
            mlp.up_proj = linear(f"{of}.mlp.gate")
        attention.o_proj = linear(f"{of}.attention.dense")
        mlp.down_proj = linear(f"{of}.mlp.proj")
    model.lm_head = linear("lm_head")
    if quantization["kv_cache_quant_algo"] == "FP8":
        scales = [
            tensors[f"transformer.layers.{n}.attention.kv_cache_scaling_factor"]
            for n in range(config["num_hidden_layers"])
        ]
        _round_keys_and_values(model, scales)
    return model


def _round_keys_and_values(model: nn.Module, scales: Sequence[Tensor]) -> None:
    for layer, scale in zip(model.model.layers, scales, strict=True):
        layer.self_attn.kv_scale = scale
    module: Any = sys.modules[type(model).__module__]
    attend: Callable[..., Any] = module.eager_attention_forward
    if not hasattr(attend, "rounds"):

        def rounded(
            attention: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
        ) -> Any:
            scale = getattr(attention, "kv_scale", None)
            if scale is not None:
                key, value = fp8(key, scale), fp8(value, scale)
            return attend(attention, query, key, value, *args, **kw)

        rounded.rounds = True  # type: ignore[attr-defined]
        module.eager_attention_forward = rounded


def assert_agree(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compares the logits of texts.

    Rounding is a step: an activation on the edge between two numbers falls to either side with the
    last bit of float32, which depends on the order of a sum, and the rest of its text goes
    another way, by as much as the format errs. Few texts have one.
    """
    differences = sorted(difference(a, b) for a, b in zip(found, expected, strict=True))
    assert differences[len(differences) * 2 // 3 - 1] <= TOLERANCE, differences
    assert differences[-1] <= EDGE, differences


def logits(model: nn.Module, texts: Sequence[list[int]]) -> list[Tensor]:
    """Returns the logits of each text, float32 [len(text), V]."""
    with torch.inference_mode():
        return [model(torch.tensor([text])).logits[0] for text in texts]
