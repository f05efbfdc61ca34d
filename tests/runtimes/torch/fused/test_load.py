"""Tensors of an engine's file: all of one, or what a matrix is without its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from specpipe.errors import EngineMismatch
from specpipe.runtimes.torch.fused import load
from specpipe.runtimes.torch.fused.load import reading
from specpipe.runtimes.torch.fused.weights import unsupported
from tests.runtimes.torch.fused.toy import toy_config

N, C = 64, 32

FP8 = {
    "weight": torch.zeros(N, C).to(torch.float8_e4m3fn),
    "weight_scale": torch.ones(1),
    "input_scale": torch.tensor([0.25]),
}
INT4 = {
    "weight": torch.zeros(N, C // 2, dtype=torch.uint8),
    "weight_scale": torch.ones(N, 2, dtype=torch.bfloat16),
    "prequant": torch.ones(C, dtype=torch.bfloat16),
}


def write(folder: Path, fc: dict[str, Tensor], gate: dict[str, Tensor]) -> None:
    tensors = {
        "head.weight": torch.zeros(C, N),
        "norm.weight": torch.arange(C, dtype=torch.float32),
    }
    for name, half in (("mlp_fc", fc), ("mlp_gate", gate)):
        tensors |= {f"layers.0.{name}.{key}": tensor.clone() for key, tensor in half.items()}
    save_file(tensors, folder / "model.safetensors")


class Recording:
    """A file of safetensors that notes which tensors were read, and which rows of others."""

    read: list[Any] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        self._file = safetensors.safe_open(*args, **options)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *error: object) -> None: ...

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        self.read.append(tensor.dim())
        return tensor

    def get_slice(self, name: str) -> RecordingSlice:
        return RecordingSlice(self._file.get_slice(name))


class RecordingSlice:
    def __init__(self, part: Any) -> None:
        self._part = part
        self.get_shape = part.get_shape

    def __getitem__(self, rows: slice) -> Tensor:
        Recording.read.append(rows)
        tensor: Tensor = self._part[rows]
        return tensor


@pytest.mark.parametrize(
    ("format", "fc", "gate", "is_supported"),
    [
        ("fp8", FP8, FP8, True),
        ("fp8", FP8, {**FP8, "input_scale": torch.tensor([0.125])}, False),
        ("int4_awq", INT4, INT4, True),
        ("int4_awq", INT4, {**INT4, "prequant": 2 * INT4["prequant"]}, False),
        ("int4_awq", INT4, {**INT4, "weight_scale": torch.ones(N, 4)}, False),
    ],
)
def test_no_matrix_is_read_to_know_whether_a_model_is_supported(
    format: str,
    fc: dict[str, Tensor],
    gate: dict[str, Tensor],
    is_supported: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path, fc, gate)
    config = toy_config(
        num_layers=1, formats={f"layers.0.mlp_{half}": format for half in ("fc", "gate")}
    )
    monkeypatch.setattr(load, "safe_open", Recording)
    monkeypatch.setattr(Recording, "read", [])
    with reading(tmp_path) as read:
        reason = unsupported(config, read)
    unlike = "layers.0.mlp_fc and mlp_gate, which do not round their input alike"
    assert reason == (None if is_supported else unlike)
    assert slice(None, 0) in Recording.read
    assert 1 in Recording.read
    assert all(what in (1, slice(None, 0)) for what in Recording.read)


def test_a_matrix_without_numbers_has_its_shape_and_dtype(tmp_path: Path) -> None:
    write(tmp_path, FP8, INT4)
    with reading(tmp_path) as read:
        found = {name: read(f"layers.0.{name}.weight") for name in ("mlp_fc", "mlp_gate", "none")}
        norm = read("norm.weight")
    facts = {
        name: None if tensor is None else (tensor.is_meta, tuple(tensor.shape), tensor.dtype)
        for name, tensor in found.items()
    }
    assert facts == {
        "mlp_fc": (True, (64, 32), torch.float8_e4m3fn),
        "mlp_gate": (True, (64, 16), torch.uint8),
        "none": None,
    }
    assert norm is not None and norm.tolist() == list(range(32))


def test_on_a_device_all_numbers_are_there(tmp_path: Path) -> None:
    gate = {**INT4, "weight": torch.arange(N * C // 2).to(torch.uint8).view(N, C // 2)}
    write(tmp_path, FP8, gate)
    with reading(tmp_path, torch.device("cpu")) as read:
        weight = read("layers.0.mlp_gate.weight")
    assert weight is not None and weight.flatten().tolist() == [*range(256)] * 4


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with (
        pytest.raises(EngineMismatch, match="model.safetensors cannot be read .*build it again"),
        reading(tmp_path),
    ):
        pass
