"""An engine of a quantized checkpoint computes what ModelOpt's own quantized model does."""

from __future__ import annotations

import copy
import importlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from specpipe.build.stages.quantize import quantize
from specpipe.config.sections import QuantizationConfig
from specpipe.runtimes.torch.engine import TorchEngine
from tests.runtimes.torch.engines import load_engine
from tests.runtimes.torch.quantized_reference import CHUNKS, TEXTS, assert_agree, logits
from tests.runtimes.torch.test_engine import run, tokens
from tests.toy import write_tensors, write_toy_checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about libraries that it does without
    mtq = pytest.importorskip("modelopt.torch.quantization")
    quant_utils = pytest.importorskip("modelopt.torch.export.quant_utils")

SETTINGS = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "int8_sq": "INT8_SMOOTHQUANT_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "w4a8_awq": "W4A8_AWQ_BETA_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
}
CALIBRATION = [tokens(100 + seed, 32) for seed in range(8)]
PARTS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.gate": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.proj": ("mlp.down_proj",),
}
PHI3_PARTS = {
    "attention.qkv": ("self_attn.qkv_proj",),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}


def modelopt_config(format: str, kv_cache: str | None) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(getattr(mtq, SETTINGS[format]))
    for entry in config["quant_cfg"]:
        quantizers = entry.get("cfg") or {}
        for quantizer in quantizers if isinstance(quantizers, list) else [quantizers]:
            sizes = quantizer.get("block_sizes") or {}
            if sizes.get(-1) == 128:
                sizes[-1] = 16
    if kv_cache == "fp8":
        config["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
    return config


def fake_quantized(hf: Path, format: str, kv_cache: str | None) -> nn.Module:
    """Returns ModelOpt's model, its linears with one input fused as for an engine."""
    model = AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.float32, attn_implementation="eager"
    )

    def forward(model: nn.Module) -> None:
        for text in CALIBRATION:
            model(torch.tensor([text]))

    with torch.no_grad():
        mtq.quantize(model, modelopt_config(format, kv_cache), forward)
        for layer in model.model.layers:
            for parts in dict.fromkeys(parts_of(model).values()):
                if len(parts) > 1:
                    quant_utils.preprocess_linear_fusion([layer.get_submodule(p) for p in parts])
            if kv_cache == "fp8":
                keys, values = layer.self_attn.k_bmm_quantizer, layer.self_attn.v_bmm_quantizer
                keys.amax = values.amax = torch.maximum(keys.amax, values.amax)
    return model


def parts_of(model: Any) -> dict[str, tuple[str, ...]]:
    return PHI3_PARTS if hasattr(model.model.layers[0].self_attn, "qkv_proj") else PARTS


def measured(model: Any, format: str, kv_cache: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yields the scales of ModelOpt's model under the names of the unified checkpoint."""
    for n, layer in enumerate(model.model.layers):
        for module, parts in parts_of(model).items():
            to = f"transformer.layers.{n}.{module}"
            linear = layer.get_submodule(parts[0])
            inputs, weight = linear.input_quantizer, linear.weight_quantizer
            if format in ("int8_sq", "int4_awq", "w4a8_awq"):
                yield f"{to}.prequant", inputs.pre_quant_scale
            if format in ("fp8", "int8_sq", "w4a8_awq", "nvfp4"):
                yield f"{to}.input_amax", inputs.amax
            if format in ("fp8", "nvfp4"):
                yield f"{to}.weight_amax", weight.amax
            if format == "w4a8_awq":
                yield f"{to}.weight_amax_2", weight[-1].amax
        if kv_cache == "fp8":
            yield f"transformer.layers.{n}.attention.kv_amax", layer.self_attn.k_bmm_quantizer.amax


def engine_of(
    hf: Path, work: Path, model: nn.Module, format: str, kv_cache: str | None
) -> TorchEngine:
    scales = {
        name: value.detach().float().reshape(-1).numpy().view(np.uint32)
        for name, value in measured(model, format, kv_cache)
    }
    folder = work / "scales"
    folder.mkdir()
    write_tensors(folder / "scales.safetensors", scales, dtype="F32")
    (folder / "calibration.json").write_text(json.dumps({"format": format}))
    scheme = QuantizationConfig.model_validate(
        {"format": format, "kv_cache": kv_cache, "awq_block_size": 16}
    )
    (work / "checkpoint").mkdir()
    quantize(hf, folder if scales else None, work / "checkpoint", scheme)
    return load_engine(hf, work, max_batch_size=len(TEXTS))


@pytest.fixture(autouse=True)
def _nvfp4_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives ModelOpt's quantizers, which know NVFP4 on a GPU alone, its own class for tensors."""
    qtensor = importlib.import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor

    def round_trip(x: Tensor, block_size: int, amax: Tensor, *_: Any) -> Tensor:
        packed, scale, double_scale = qtensor.quantize(x, block_size, None, amax.float() / 6 / 448)
        sizes = {-1: block_size}
        made: Tensor = packed.dequantize(scale=scale, double_scale=double_scale, block_sizes=sizes)
        return made

    monkeypatch.setattr(
        "modelopt.torch.quantization.nn.modules.tensor_quantizer.dynamic_block_quant", round_trip
    )


@pytest.mark.filterwarnings("ignore:lm_head is not calibrated")  # as it is to be
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma2"])
@pytest.mark.parametrize(
    ("format", "kv_cache"), [*((format, None) for format in SETTINGS), ("fp8", "fp8")]
)
def test_an_engine_computes_what_modelopt_does(
    family: str, format: str, kv_cache: str | None, tmp_path: Path
) -> None:
    hf = write_toy_checkpoint(tmp_path / "hf", family, dtype="float32")
    model = fake_quantized(hf, format, kv_cache)
    engine = engine_of(hf, tmp_path, model, format, kv_cache)
    assert_agree(run(engine, TEXTS, CHUNKS), logits(model, TEXTS))
