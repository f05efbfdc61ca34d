"""What calibration measured, as `quantize` and `export` read it back.

scales.safetensors, all float32, by module of the unified checkpoint; the parts of a fused linear
have one of each:

input_amax     [1]   greatest activation, after the multiplication by prequant
weight_amax    [1]   greatest weight
weight_amax_2  [1]   greatest weight after its rounding to int4
prequant       [in]  what activations are multiplied by
kv_amax        [1]   of an attention: greatest key, after rope, or value
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specpipe.checkpoints.checkpoint import TensorInfo, brief, read_blocks, read_safetensors_header
from specpipe.checkpoints.formats import Measured
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.checkpoints.unified_layout import part_shape
from specpipe.errors import CheckpointError
from specpipe.quantization.quantized_config import quantized_linears

SCALES_NAME, CALIBRATION_NAME = "scales.safetensors", "calibration.json"


@dataclass(frozen=True)
class Scales:
    """Measured numbers by module and kind, all finite and positive."""

    values: Mapping[tuple[str, Measured], npt.NDArray[np.float32]]

    def __call__(self, module: str, kind: Measured) -> npt.NDArray[np.float32]:
        return self.values[module, kind]


def expected_scales(config: UnifiedConfig) -> Iterator[tuple[str, Measured, int]]:
    """Yields module, kind and size of everything that a quantized config needs measured."""
    row = config.quantization.row
    assert row is not None
    for module, rule, _ in quantized_linears(config):
        for kind in row.measured:
            num_inputs = part_shape(config, rule.parts[0])[1]
            yield module, kind, num_inputs if kind == "prequant" else 1
    if config.quantization.kv_cache_quant_algo is not None:
        for layer in range(config.num_hidden_layers):
            yield f"transformer.layers.{layer}.attention", "kv_amax", 1


def read_scales(folder: Path | None, config: UnifiedConfig) -> Scales:
    """Reads what a quantized config needs; none is needed where `folder` is None.

    Refused are scales of another format or another model, and numbers that are no scale.
    """
    expected = {(module, kind): size for module, kind, size in expected_scales(config)}
    if not expected:
        return Scales({})
    assert folder is not None, "a format with measured scales was not calibrated"
    _check_format(folder, config)
    tensors = read_safetensors_header(folder / SCALES_NAME)
    values: dict[tuple[str, Measured], npt.NDArray[np.float32]] = {}
    missing = []
    for (module, kind), size in expected.items():
        info = tensors.get(f"{module}.{kind}")
        if info is None:
            missing.append(f"{module}.{kind}")
            continue
        if (info.dtype, info.shape) != ("F32", (size,)):
            raise CheckpointError(
                f"{info.file}: {module}.{kind} is {info.dtype} {list(info.shape)}, expected F32 "
                f"[{size}]: the scales are those of another checkpoint; calibrate again"
            )
        values[module, kind] = _read_values(info)
    if missing:
        raise CheckpointError(
            f"{folder / SCALES_NAME} lacks {len(missing)} scales of this checkpoint and format: "
            f"{brief(missing)}; calibrate again"
        )
    modules = {module for module, _ in expected}
    surplus = sorted(name for name in tensors if name.rpartition(".")[0] not in modules)
    if surplus:
        raise CheckpointError(
            f"{folder / SCALES_NAME} has {len(surplus)} scales of no linear of this checkpoint: "
            f"{brief(surplus)}; calibrate again"
        )
    for (module, kind), value in values.items():
        if not (np.isfinite(value) & (value > 0)).all():
            bad = value[~(np.isfinite(value) & (value > 0))][0]
            raise CheckpointError(
                f"{folder / SCALES_NAME}: {module}.{kind} is {bad}, which is no scale; the model "
                "gives nothing usable there, exclude the linear or look at the calibration data"
            )
    return Scales(values)


def _check_format(folder: Path, config: UnifiedConfig) -> None:
    path = folder / CALIBRATION_NAME
    try:
        calibrated = json.loads(path.read_bytes())["format"]
    except (OSError, ValueError, LookupError, TypeError) as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}; calibrate again") from exc
    name = config.format
    if calibrated != name:
        raise CheckpointError(
            f"{folder} was calibrated for {calibrated}, not for {name}; calibrate again"
        )


def _read_values(info: TensorInfo) -> npt.NDArray[np.float32]:
    blocks = [block.copy() for block in read_blocks(info)]
    return np.concatenate(blocks).view(np.float32)
