"""Quantized toys for tests: scales that no calibration measured, but that fit the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specpipe.build.stages.quantize import quantize
from specpipe.checkpoints.formats import OFFERED
from specpipe.checkpoints.plain_weights import open_weights
from specpipe.config.sections import QuantizationConfig
from specpipe.quantization import numbers
from specpipe.quantization.quantized_config import quantized_config, quantized_linears
from specpipe.quantization.scales import expected_scales
from tests.toy import Raw, read_tensor, write_tensors, write_toy_checkpoint

FORMATS = OFFERED


def scheme(name: str, **settings: Any) -> QuantizationConfig:
    """Returns the settings of a format, with blocks of 16 that divide every toy."""
    return QuantizationConfig.model_validate({"format": name, "awq_block_size": 16} | settings)


def as_floats(raw: Raw, dtype: str) -> torch.Tensor:
    """Returns raw bits of a safetensors dtype as numbers in float32; of I8 and U8 as they are."""
    kind = {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F8_E4M3": torch.float8_e4m3fn,
        "I8": torch.int8,
        "U8": torch.uint8,
    }[dtype]
    signed = raw if raw.dtype == np.uint8 else raw.view(raw.dtype.str.replace("u", "i"))
    tensor = torch.from_numpy(signed.copy()).view(kind)
    return tensor if dtype in ("I8", "U8") else tensor.float()


def write_scales(
    folder: Path,
    checkpoint: Path,
    settings: QuantizationConfig,
    *,
    seed: int = 1,
    is_searched: bool = True,
) -> Path | None:
    """Writes what calibration would: weights measured, activations made up near 4.

    is_searched  whether activations are multiplied by numbers that are made up, too, or by ones

    Returns None for a format that needs none.
    """
    plain = open_weights(checkpoint)
    config = quantized_config(plain.config, settings)
    linears = {
        module: torch.cat(
            [
                as_floats(read_tensor(plain.tensors[source]), plain.tensors[source].dtype)
                for source in dict.fromkeys(part.source.format(n=layer) for part in rule.parts)
            ]
        )
        for module, rule, layer in quantized_linears(config)
    }
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    for module, kind, size in expected_scales(config):
        name = f"{module}.{kind}"
        if kind == "prequant" and not is_searched:
            made[name] = torch.ones(size)
        elif kind == "prequant":
            made[name] = (0.5 + torch.rand(size, generator=generator)).bfloat16().float()
        elif kind == "weight_amax":
            made[name] = linears[module].abs().max().reshape(1)
        elif kind == "weight_amax_2":
            rows = linears[module] / made.get(f"{module}.prequant", torch.ones(1))
            made[name] = rows.abs().max().reshape(1)
        else:
            made[name] = 3 + 2 * torch.rand(1, generator=generator)
    _share_gate_up(made)
    if not made:
        return None
    folder.mkdir(parents=True)
    raw = {name: tensor.numpy().view(np.uint32) for name, tensor in made.items()}
    write_tensors(folder / "scales.safetensors", raw, dtype="F32")
    (folder / "calibration.json").write_text(json.dumps({"format": settings.format}))
    return folder


def _share_gate_up(made: dict[str, torch.Tensor]) -> None:
    """Gives gate and up, which have one input, the same scales, as calibration does."""
    for name in list(made):
        if ".mlp.gate." in name:
            other = name.replace(".mlp.gate.", ".mlp.fc.")
            made[name] = made[other] = torch.maximum(made[name], made[other])


def quantized_checkpoint(
    folder: Path,
    family: str = "llama",
    format: str = "fp8",
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    settings: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Writes a quantized unified checkpoint of a toy into `folder`; returns its folder.

    Beside it are `hf`, the toy, and `scales`. `settings` are more of the format, as kv_cache;
    `overrides` keys of the toy's config.json.
    """
    checkpoint = write_toy_checkpoint(folder / "hf", family, **overrides)
    chosen = scheme(format, **(settings or {}))
    scales = write_scales(folder / "scales", checkpoint, chosen)
    out = folder / "checkpoint"
    out.mkdir()
    quantize(checkpoint, scales, out, chosen, tp_size=tp_size, pp_size=pp_size)
    return out


def dequantized(format: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns a linear's weight in float32, prequant multiplied back in."""
    values = numbers.dequantize(format, tensors)  # type: ignore[arg-type]
    prequant = tensors.get("prequant_scaling_factor")
    return values if prequant is None else values * prequant.float()
