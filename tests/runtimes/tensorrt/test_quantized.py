"""Quantized checkpoints as TensorRT networks: the numbers of the torch runtime, and engines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specpipe.checkpoints.unified import load_unified
from specpipe.errors import EngineBuildError
from specpipe.runtimes.tensorrt.graph import Graph, ITensor
from specpipe.runtimes.tensorrt.weights import CheckpointWeights
from specpipe.runtimes.torch.build import BuildTorchEngine
from specpipe.runtimes.torch.engine import TorchEngine
from tests.quantization.checkpoints import quantized_checkpoint
from tests.runtimes.tensorrt.engines import build_engine
from tests.runtimes.tensorrt.networks import (
    MAX_DRAFT_LEN,
    MAX_SEQ_LEN,
    InterpretedDecoder,
    SideBySide,
    build_network,
    prefill_decode_verify,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TOLERANCE = {"fp8": 2e-5, "int4_awq": 1e-5}
"""Relative to the largest logit, in float32."""


def torch_engine(unified: Path, folder: Path) -> TorchEngine:
    folder.mkdir()
    BuildTorchEngine(
        role="target",
        checkpoint=unified,
        max_batch_size=4,
        max_seq_len=MAX_SEQ_LEN,
        max_draft_len=MAX_DRAFT_LEN,
        max_num_tokens=64,
        dtype="float32",
        device="cpu",
    ).run(folder)
    return TorchEngine.load(folder)


def compare(
    unified: Path, folder: Path, tolerance: float, graph_class: type[Graph] = Graph
) -> None:
    network = build_network(unified, dtype="float32", graph_class=graph_class)
    decoder = InterpretedDecoder(network)
    prefill_decode_verify(SideBySide(decoder, torch_engine(unified, folder), tolerance=tolerance))


@pytest.mark.parametrize("format", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_torch_runtime(family: str, format: str, tmp_path: Path) -> None:
    unified = quantized_checkpoint(tmp_path, family, format, dtype="float32")
    compare(unified, tmp_path / "engine", TOLERANCE[format])


@pytest.mark.parametrize("format", TOLERANCE)
def test_the_head_too_and_a_part_that_stays_plain(format: str, tmp_path: Path) -> None:
    settings = {"quantize_lm_head": True, "exclude": ["*.layers.1.mlp.*"]}
    unified = quantized_checkpoint(
        tmp_path, "llama", format, settings=settings, dtype="float32", tie_word_embeddings=True
    )
    compare(unified, tmp_path / "engine", TOLERANCE[format])


class WithoutPrequant(Graph):
    def multiply(self, a: ITensor, b: ITensor) -> ITensor:
        return a if "prequant" in b.name else super().multiply(a, b)

    def weight(self, name: str, *, rank: int) -> ITensor:
        made = super().weight(name, rank=rank)
        made.name = name
        return made


class WithoutRounding(Graph):
    def round_fp8(self, x: ITensor, scale: ITensor) -> ITensor:
        return x


class WithScaleSquared(Graph):
    def dequantize(self, x: ITensor, scale: ITensor) -> ITensor:
        return super().dequantize(x, self.multiply(scale, scale))


@pytest.mark.parametrize(
    ("format", "fault"),
    [
        ("int4_awq", WithoutPrequant),
        ("fp8", WithoutRounding),
        ("fp8", WithScaleSquared),
        ("int4_awq", WithScaleSquared),
    ],
)
def test_a_fault_is_seen(format: str, fault: type[Graph], tmp_path: Path) -> None:
    unified = quantized_checkpoint(tmp_path, "llama", format, dtype="float32")
    with pytest.raises(AssertionError, match="logits differ by"):
        compare(unified, tmp_path / "engine", 1e-3, fault)


def test_int4_is_packed_along_the_rows_of_the_engine(tmp_path: Path) -> None:
    unified = load_unified(quantized_checkpoint(tmp_path, "llama", "int4_awq"))
    name = "transformer.layers.0.mlp.proj.weight"
    stored = unified.tensor(name).data
    weights = CheckpointWeights("target", unified, "bfloat16")
    rows, columns = 2 * stored.shape[0], stored.shape[1]
    assert weights.dtype_of(name) == "int4"
    assert weights.shape(name) == (rows, columns)
    packed = weights.array(name)
    assert packed.shape == (rows, columns // 2)
    # Row 5 is the high half of the stored row 2; column 6 the low half of byte 3.
    assert packed[5, 3] & 0xF == stored[2, 6] >> 4
    assert packed[4, 3] >> 4 == stored[2, 7] & 0xF


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("format", TOLERANCE)
def test_engines_are_built(format: str, dtype: str, tmp_path: Path) -> None:
    unified = quantized_checkpoint(tmp_path, "qwen3", format, dtype="bfloat16")
    engine = build_engine(unified, tmp_path / "engine", dtype=dtype)
    builder = json.loads((engine / "config.json").read_bytes())["builder"]
    num_linears = 2 * 5
    num_rounded = num_linears if format == "fp8" else 0
    assert builder["layers"].get("quantize", 0) == num_rounded
    assert builder["layers"]["dequantize"] == num_linears + num_rounded
    assert builder["precisions"]["fp8" if format == "fp8" else "int4"] >= num_linears


@pytest.mark.parametrize("format", ["w4a8_awq", "int8_sq", "nvfp4", "fp8_pc_pt"])
def test_other_formats_are_refused(format: str, tmp_path: Path) -> None:
    unified = quantized_checkpoint(tmp_path, "llama", format)
    with pytest.raises(EngineBuildError, match="which builds fp8 and int4_awq; engine.runtime"):
        build_engine(unified, tmp_path / "engine")


def test_the_numbers_of_an_engine_are_those_of_its_checkpoint(tmp_path: Path) -> None:
    unified = load_unified(quantized_checkpoint(tmp_path, "llama", "fp8"))
    weights = CheckpointWeights("target", unified, "float16")
    name = "transformer.layers.1.attention.qkv"
    assert weights.dtype_of(f"{name}.weight") == "float8_e4m3"
    assert np.array_equal(weights.array(f"{name}.weight"), unified.tensor(f"{name}.weight").data)
    scale = f"{name}.weights_scaling_factor"
    assert weights.dtype_of(scale) == "float32"
    assert np.array_equal(weights.array(scale), unified.tensor(scale).data)
