"""torch's kernels for quantized weights compute what the emulation does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.formats import FORMATS, QuantAlgo
from specpipe.checkpoints.unified import load_unified
from specpipe.checkpoints.unified_sections import NEVER_QUANTIZED, Quantization
from specpipe.errors import EngineMismatch
from specpipe.machine.memory import MemoryEstimate
from specpipe.runtimes.torch.engine import TorchEngine, load_weights
from specpipe.runtimes.torch.kernel_choice import Kernel, fits, kernel_for
from specpipe.runtimes.torch.layout import write_weights
from specpipe.runtimes.torch.memory import estimate_memory
from specpipe.runtimes.torch.quantized import quantized_linear
from tests.quantization.checkpoints import quantized_checkpoint
from tests.runtimes.torch.engines import build_engine
from tests.runtimes.torch.quantized_reference import CHUNKS, TEXTS, assert_agree
from tests.runtimes.torch.test_engine import difference, run
from tests.runtimes.torch.test_quantized import write_with_zero_points
from tests.toy import toy_config

KERNELS: dict[str, Kernel] = {
    "fp8": "fp8",
    "fp8_pc_pt": "fp8",
    "w4a8_awq": "fp8",
    "int8_wo": "int8",
    "int4_wo": "int4",
    "int4_awq": "int4",
    "int4_gptq": "int4",
}
BLOCKS_OF_32 = {"awq_block_size": 32, "quantize_lm_head": True}  # 16 is too few for kernel int4

LINEAR_TOLERANCE = 0.01  # bfloat16, two roundings, relative to the largest output
LOGITS_TOLERANCE = 0.03  # bfloat16
ROUNDED_TOLERANCE = 0.15  # bfloat16, whose errors take activations to other FP8 numbers


def test_the_gpu_decides_which_kernel_there_is() -> None:
    def kernel(algo: QuantAlgo | None, sm: int | None) -> Kernel | None:
        return kernel_for(Quantization(quant_algo=algo), sm)

    assert kernel("FP8", 90) == "fp8"
    assert kernel("FP8", 86) is None
    assert kernel("W4A16_AWQ", 86) == "int4"
    assert kernel("W8A16", 75) is None
    assert kernel("W8A8_SQ_PER_CHANNEL", 90) is None
    assert kernel("NVFP4", 100) is None
    assert kernel("FP8", None) is None
    assert kernel(None, 90) is None


def test_sizes_and_dtypes_decide_where_a_kernel_fits() -> None:
    fp8 = Quantization(quant_algo="FP8")
    rowwise = Quantization(quant_algo="FP8_PER_CHANNEL_PER_TOKEN")
    awq = Quantization(quant_algo="W4A16_AWQ", group_size=64)
    int4 = Quantization(quant_algo="W4A16")
    assert fits("fp8", fp8, "float16", 48, 32)
    assert not fits("fp8", fp8, "float16", 48, 40)
    assert not fits("fp8", fp8, "float16", 40, 32)
    assert not fits("fp8", fp8, "float32", 48, 32)
    assert fits("fp8", rowwise, "bfloat16", 48, 32)
    assert not fits("fp8", rowwise, "float16", 48, 32)
    assert fits("int8", Quantization(quant_algo="W8A16"), "float16", 7, 5)
    assert fits("int4", awq, "bfloat16", 8, 128)
    assert not fits("int4", awq, "float16", 8, 128)
    assert not fits("int4", awq, "bfloat16", 12, 128)
    assert fits("int4", int4, "bfloat16", 8, 96)
    assert not fits("int4", int4, "bfloat16", 8, 48)
    awq = Quantization(quant_algo="W4A16_AWQ", group_size=16)
    assert not fits("int4", awq, "bfloat16", 8, 128)


@pytest.fixture
def int4_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel int4 as PyTorch's int4mm.cu defines it, for a CPU."""

    def pack(weight: Tensor, inner_tiles: int) -> Tensor:
        assert weight.dtype == torch.uint8
        assert 2 * weight.shape[1] % (16 * inner_tiles) == 0
        return weight

    def multiply(x: Tensor, weight: Tensor, group_size: int, scale_and_zero: Tensor) -> Tensor:
        assert x.dtype == scale_and_zero.dtype == torch.bfloat16
        numbers = torch.stack([weight >> 4, weight & 15], -1).flatten(1).float() - 8
        scale, zero = scale_and_zero.float().permute(2, 1, 0).unsqueeze(-1)
        groups = numbers.unflatten(1, (-1, group_size))
        return (x.float() @ (groups * scale + zero).flatten(1).t()).bfloat16()

    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", pack)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", multiply)


def engines(work: Path, family: str, format: str, device: str) -> tuple[Path, Path]:
    """Builds an engine for kernels, and an emulated one beside it, both in bfloat16."""
    if format == "int4_gptq":
        write_with_zero_points(work, family, **BLOCKS_OF_32)
    else:
        quantized_checkpoint(work, family, format, settings=BLOCKS_OF_32)
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_batch_size": len(TEXTS)}
    emulated = build_engine(work / "hf", work, device="cpu", **settings)
    emulated.rename(work / "emulated")
    with_kernels = build_engine(work / "hf", work, device=device, **settings)
    if device == "cpu":
        path = with_kernels / "model.safetensors"
        path.unlink()
        write_weights(path, load_unified(work / "checkpoint"), "bfloat16", KERNELS[format])
    return with_kernels, work / "emulated"


SIZES = {
    "layers.0.qkv": (32, 64),
    "layers.0.mlp_in": (32, 128),
    "layers.0.mlp_out": (64, 32),
    "head": (32, 256),
}
"""Linears of the toys whose inputs are in no order of heads: inputs and outputs."""


def outputs(format: str, weights: Mapping[str, Tensor], num_rows: int) -> list[Tensor]:
    """Returns what each linear makes of random inputs."""
    device = weights["head.weight"].device
    generator = torch.Generator().manual_seed(num_rows)
    made = []
    for name, (num_inputs, num_outputs) in SIZES.items():
        x = torch.randn(num_rows, num_inputs, generator=generator).bfloat16().to(device)
        out = x.new_empty(num_rows, num_outputs)
        multiply = quantized_linear(format, weights, name)
        if multiply is None:
            bias = weights.get(f"{name}.bias", x.new_zeros(num_outputs))
            torch.addmm(bias, x, weights[f"{name}.weight"], out=out)
        else:
            multiply(x, out)
        made.append(out.float().cpu())
    return made


def check(work: Path, family: str, format: str, device: str) -> None:
    with_kernels, emulated = engines(work, family, format, device)
    kernel_weights, weights = (
        load_weights(folder / "model.safetensors", torch.device(device))
        for folder in (with_kernels, emulated)
    )
    for num_rows in (1, 5, 40):
        with torch.inference_mode():
            found, expected = (outputs(format, w, num_rows) for w in (kernel_weights, weights))
        for ours, theirs in zip(found, expected, strict=True):
            assert difference(ours, theirs) <= LINEAR_TOLERANCE
    found, expected = (
        run(TorchEngine.load(folder), TEXTS, CHUNKS) for folder in (with_kernels, emulated)
    )
    tolerance = ROUNDED_TOLERANCE if FORMATS[format].activations else LOGITS_TOLERANCE
    for ours, theirs in zip(found, expected, strict=True):
        assert difference(ours.cpu(), theirs) <= tolerance


@pytest.mark.usefixtures("int4_in_plain_torch")
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
@pytest.mark.parametrize("format", KERNELS)
def test_an_engine_for_kernels_computes_what_the_emulation_does(
    format: str, family: str, tmp_path: Path
) -> None:
    """On a CPU, for which torch has those of FP8 and int8 too."""
    check(tmp_path, family, format, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
@pytest.mark.parametrize("format", KERNELS)
def test_a_gpu_computes_what_the_emulation_does(format: str, family: str, tmp_path: Path) -> None:
    check(tmp_path, family, format, "cuda")
    build = json.loads((tmp_path / "engine" / "config.json").read_text())["build_config"]
    assert build["kernel"] == KERNELS[format]


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8_sq", "nvfp4"])
def test_a_gpu_emulates_what_torch_has_no_kernel_for(format: str, tmp_path: Path) -> None:
    quantized_checkpoint(tmp_path, "qwen3", format, settings={"kv_cache": "fp8"})
    settings: dict[str, Any] = {"dtype": "float32", "max_batch_size": len(TEXTS)}
    found = {}
    for device in ("cpu", "cuda"):
        folder = build_engine(tmp_path / "hf", tmp_path, device=device, **settings)
        logits = run(TorchEngine.load(folder), TEXTS, CHUNKS)
        found[device] = [text.cpu() for text in logits]
        folder.rename(tmp_path / device)
    assert_agree(found["cuda"], found["cpu"])


def test_an_engine_for_a_kernel_that_is_not_here_is_refused(tmp_path: Path) -> None:
    quantized_checkpoint(tmp_path, format="fp8")
    folder = build_engine(tmp_path / "hf", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["build_config"]["kernel"] = "int4"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineMismatch) as caught:
        TorchEngine.load(folder)
    assert str(caught.value) == (
        f"{folder} multiplies with torch's int4 kernel, which this GPU or this torch does not "
        "have; build it again here"
    )


def memory(format: str, kernel: Kernel | None) -> MemoryEstimate:
    plain = unified_config(toy_config(hidden_size=64, intermediate_size=96))
    config = plain.quantized(
        Quantization(
            quant_algo=FORMATS[format].quant_algo,
            group_size=32,
            exclude_modules=["lm_head", *NEVER_QUANTIZED],
        )
    )
    limits = {"max_batch_size": 8, "max_seq_len": 100, "max_draft_len": 3, "max_num_tokens": 64}
    return estimate_memory(config, dtype="bfloat16", kernel=kernel, **limits)


def test_memory_counts_what_rounding_activations_takes() -> None:
    plain = memory("int8_wo", None).workspace_bytes
    # float32 copies of the widest input, 96, and both halves of the MLP's, for 64 tokens
    assert memory("fp8", None).workspace_bytes - plain == 4 * 64 * (4 * 96 + 2 * 96)
    assert memory("nvfp4", None).workspace_bytes - plain == 4 * 64 * (12 * 96 + 2 * 96)


@pytest.mark.parametrize("format", KERNELS)
def test_memory_counts_weights_for_kernels(format: str) -> None:
    estimate = memory(format, KERNELS[format])
    # Outputs and inputs of qkv, dense, fc, gate and proj, twice.
    linears = [(64, 64), (64, 32), (96, 64), (96, 64), (64, 96)] * 2
    of_linear = {
        "fp8": lambda rows, columns: rows * columns,
        "fp8_pc_pt": lambda rows, columns: rows * columns + 4 * rows,
        "w4a8_awq": lambda rows, columns: rows * columns,
        "int8_wo": lambda rows, columns: rows * columns + 2 * rows,
        "int4_wo": lambda rows, columns: (
            rows * columns // 2 + 4 * rows * (3 if columns == 96 else 1)
        ),
        "int4_gptq": lambda rows, columns: rows * columns // 2 + 4 * rows * columns // 32,
        "int4_awq": lambda rows, columns: rows * columns // 2 + 4 * rows * columns // 32,
    }[format]
    plain = 2 * (2 * 256 * 64 + 5 * 64)
    assert estimate.weights_bytes == plain + sum(of_linear(*size) for size in linears)
