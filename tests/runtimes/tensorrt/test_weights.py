from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specpipe.checkpoints.checkpoint import read_safetensors_header
from specpipe.checkpoints.unified import load_unified
from specpipe.errors import EngineBuildError
from specpipe.runtimes.tensorrt.weights import CheckpointWeights, ShapesOnly
from tests.runtimes.tensorrt.engines import write_unified
from tests.toy import read_tensor, toy_config, toy_tensors

NAME = "transformer.layers.0.mlp.proj.weight"
SOURCE = "model.layers.0.mlp.down_proj.weight"


def weights(work: Path, values: torch.Tensor, dtype: str) -> CheckpointWeights:
    """Returns the weights of a toy of the values' dtype, which stand first in one tensor."""
    stored = str(values.dtype).removeprefix("torch.")
    tensor = toy_tensors(toy_config(dtype=stored))[SOURCE]
    tensor.reshape(-1)[: values.numel()] = bits(values)
    unified = load_unified(write_unified(work, dtype=stored, tensors={SOURCE: tensor}))
    return CheckpointWeights("target", unified, dtype)


def converted(work: Path, values: torch.Tensor, dtype: str) -> torch.Tensor:
    array = weights(work, values, dtype).array(NAME).reshape(-1)[: values.numel()]
    return torch.from_numpy(array.copy()).view(getattr(torch, dtype))


def bits(values: torch.Tensor) -> Any:
    is_wide = values.dtype == torch.float32
    signed = values.contiguous().view(torch.int32 if is_wide else torch.int16).numpy()
    return signed.view(np.uint32 if is_wide else np.uint16)


def some_halves(dtype: torch.dtype) -> torch.Tensor:
    """Samples the finite numbers of a half type: every 33rd of either sign, subnormal ones too."""
    codes = torch.arange(-(2**15), 2**15, 33, dtype=torch.int32).to(torch.int16)
    values = codes.view(dtype)
    return values[values.isfinite()]


def between(dtype: torch.dtype) -> torch.Tensor:
    """float32 numbers at, just before, halfway and just past halfway between two of a half type."""
    low = some_halves(dtype)[:500].float()
    step = torch.nextafter(low.to(dtype), torch.zeros((), dtype=dtype)).float() - low
    half = low + step / 2
    return torch.cat([low, half, torch.nextafter(half, low), torch.nextafter(half, low + step)])


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_halves_become_float32_exactly(source: torch.dtype, tmp_path: Path) -> None:
    values = some_halves(source)
    assert np.array_equal(bits(converted(tmp_path, values, "float32")), bits(values.float()))


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_float32_is_rounded_to_the_nearest_even(target: str, tmp_path: Path) -> None:
    values = between(getattr(torch, target))
    values = values[values.abs() < 60000][: 32 * 64]
    expected = values.to(getattr(torch, target))
    assert len(values) > 1000 and (expected.float() != values).any()
    assert np.array_equal(bits(converted(tmp_path, values, target)), bits(expected))


def test_float16_becomes_bfloat16_and_back(tmp_path: Path) -> None:
    values = some_halves(torch.float16)
    rounded = converted(tmp_path / "a", values, "bfloat16")
    assert np.array_equal(bits(rounded), bits(values.bfloat16()))
    small = rounded[rounded.float().abs() <= 65504]
    assert np.array_equal(bits(converted(tmp_path / "b", small, "float16")), bits(small.half()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_dtype_changes_no_bit(dtype: str, tmp_path: Path) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, 1e-40]).to(getattr(torch, dtype))
    assert np.array_equal(bits(converted(tmp_path, values, dtype)), bits(values))


@pytest.mark.parametrize(
    ("number", "dtype", "what"),
    [
        (65520.0, "float16", "is 65520, but float16 holds 65504 at most; set engine.dtype to b"),
        (-65520.0, "float16", "is -65520, but float16 holds 65504 at most; set engine.dtype to b"),
        (1e30, "float16", "is 1e+30, but float16 holds 65504 at most; set engine.dtype to b"),
        (3.4e38, "bfloat16", "is 3.4e+38, but bfloat16 holds 3.3895314e+38 at most; set engine."),
    ],
)
def test_what_the_dtype_cannot_hold_is_refused(
    number: float, dtype: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineBuildError) as caught:
        converted(tmp_path, torch.tensor([1.0, number]), dtype)
    assert str(caught.value).startswith(f"target: {SOURCE}[0, 1] {what}")


def test_the_largest_float16_is_held(tmp_path: Path) -> None:
    """65519.996 is the last float32 that is rounded down to it."""
    values = torch.tensor([65504.0, -65504.0, 65519.996])
    assert converted(tmp_path, values, "float16").tolist() == [65504.0, -65504.0, 65504.0]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_shapes_are_those_of_the_checkpoint(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    unified = load_unified(write_unified(tmp_path, family, **overrides))
    read, told = (
        CheckpointWeights("draft", unified, "float16"),
        ShapesOnly(unified.config, "float16"),
    )
    for name in unified.names():
        assert name in read and name in told
        assert read.shape(name) == told.shape(name) == unified.tensor(name).data.shape
    for name in ("transformer.layers.0.attention.qkv.bias", "transformer.layers.2.mlp.fc.weight"):
        assert (name in read) == (name in told) == (name in unified.names())


def test_a_tied_head_is_not_used(tmp_path: Path) -> None:
    unified = load_unified(write_unified(tmp_path, tie_word_embeddings=True))
    used = list(CheckpointWeights("draft", unified, "bfloat16").used())
    assert sorted([*used, "lm_head.weight"]) == sorted(unified.names())


def test_weights_that_are_told_later_are_never_read(tmp_path: Path) -> None:
    told = ShapesOnly(load_unified(write_unified(tmp_path)).config, "float16")
    with pytest.raises(AssertionError, match=f"{NAME} is bound when the engine runs"):
        told.array(NAME)


def test_written_weights_are_those_that_are_used(tmp_path: Path) -> None:
    unified = load_unified(write_unified(tmp_path, dtype="float32"))
    held = CheckpointWeights("target", unified, "bfloat16")
    held.place(tmp_path / "weights.safetensors")
    stored = read_safetensors_header(tmp_path / "weights.safetensors")
    assert list(stored) == list(held.used())
    assert {info.dtype for info in stored.values()} == {"BF16"}
    for name, info in stored.items():
        assert np.array_equal(read_tensor(info), held.array(name))
