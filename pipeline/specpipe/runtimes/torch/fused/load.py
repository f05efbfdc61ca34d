"""Loads a built engine for the fused kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specpipe.errors import EngineMismatch
from specpipe.runtimes.torch.build import WEIGHTS_NAME
from specpipe.runtimes.torch.engine import TorchEngineSpec
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.linear import Read
from specpipe.runtimes.torch.fused.weights import load_weights


@torch.inference_mode()
def load_engine(folder: Path) -> FusedEngine:
    """Loads an engine, one tensor at a time: the GPU holds no second copy of its weights."""
    spec = TorchEngineSpec.read(folder)
    with reading(folder, spec.device) as read:
        return FusedEngine(spec, load_weights(spec.model, read))


@contextmanager
def reading(folder: Path, device: torch.device | None = None) -> Iterator[Read]:
    """Opens an engine's weights, for as long as what reads a tensor by its name is used.

    device  where tensors are put. None: the numbers of matrices stay in the file, for who wants
            to know their shapes and dtypes; such a matrix is on torch's device "meta"
    """
    path = folder / WEIGHTS_NAME
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            names = set(file.keys())

            def read(name: str) -> Tensor | None:
                if name not in names:
                    return None
                if device is None:
                    part = file.get_slice(name)
                    shape = part.get_shape()
                    if len(shape) > 1:
                        no_rows: Tensor = part[:0]
                        return no_rows.new_empty(shape, device="meta")
                tensor: Tensor = file.get_tensor(name)
                return tensor

            yield read
    except (OSError, SafetensorError) as exc:
        raise EngineMismatch(f"{path} cannot be read ({exc}); build it again") from exc
