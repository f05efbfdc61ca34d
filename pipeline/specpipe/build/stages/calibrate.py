"""Hugging Face folder and texts → scales of activations, weights and KV cache."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from specpipe.checkpoints.checkpoint import checkpoint_files, create_safetensors
from specpipe.checkpoints.formats import FORMATS
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.plain_weights import open_weights
from specpipe.config.sections import QuantizationConfig
from specpipe.errors import RuntimeUnavailable
from specpipe.machine import provenance
from specpipe.machine.libraries import with_extras
from specpipe.machine.own_json import write_object
from specpipe.quantization.quantized_config import quantized_config
from specpipe.quantization.scales import CALIBRATION_NAME, SCALES_NAME
from specpipe.quantization.texts import check_data, data_file, read_texts
from specpipe.roles import Role
from specpipe.stage import StageInputs, naming
from specpipe.text.files import TOKENIZER_FILES

_LIBRARIES = ("nvidia-modelopt", "torch", "transformers")
_IMPORTED = ("torch", "transformers", "modelopt", "requests")  # the last one by modelopt


@dataclass(frozen=True)
class Calibrate:
    """Measures the scales that a scheme needs data for; its weights are not quantized here.

    base_dir  the folder at which the path of the calibration data starts
    device    where the layers run; auto: the GPU where there is one
    """

    role: Role  # for messages only
    checkpoint: Path
    scheme: QuantizationConfig
    base_dir: Path
    device: Literal["auto", "cpu", "cuda"] = "auto"
    limits: FileLimits = FILE_LIMITS

    @property
    def name(self) -> str:
        return f"{self.role}/calibrate"

    def inputs(self) -> StageInputs:
        files = (
            *checkpoint_files(self.checkpoint),
            *(self.checkpoint / name for name in TOKENIZER_FILES if name != "config.json"),
            data_file(self.scheme.calibration, self.base_dir),
        )
        has_blocks = FORMATS[self.scheme.format].block_size == "set"
        return StageInputs(
            files=tuple(path for path in files if path.is_file()),
            settings={
                "format": self.scheme.format,
                "kv_cache": self.scheme.kv_cache,
                "awq_block_size": self.scheme.awq_block_size if has_blocks else None,
                "quantize_lm_head": self.scheme.quantize_lm_head,
                "exclude": list(self.scheme.exclude),
                "column": self.scheme.calibration.column,
                "num_samples": self.scheme.calibration.num_samples,
                "max_seq_len": self.scheme.calibration.max_seq_len,
                "device": self.device,
            },
            libraries=_LIBRARIES,
        )

    def require(self) -> None:
        """Raises where a library or the data is missing; reads nothing."""
        require_libraries()
        with naming(self.role):
            check_data(self.scheme.calibration, self.base_dir)

    def run(self, out: Path) -> None:
        self.require()
        with naming(self.role):
            self._calibrate(out)

    def _calibrate(self, out: Path) -> None:
        weights = open_weights(self.checkpoint, limits=self.limits)
        quantized_config(weights.config, self.scheme)  # refuses sizes that do not fit the format
        texts = read_texts(self.scheme.calibration, self.base_dir, self.checkpoint, self.limits)
        # Deciding whether to calibrate must not take the time that importing torch does.
        from specpipe.quantization.calibrate import calibrate
        from specpipe.quantization.device import choose_device

        device = choose_device(self.device)
        calibrated = calibrate(weights, self.scheme, texts.calibration, device=device)
        arrays = {f"{module}.{kind}": value for (module, kind), value in calibrated.scales.items()}
        with create_safetensors(
            out / SCALES_NAME, {name: ("F32", array.shape) for name, array in arrays.items()}
        ) as writer:
            for name, array in arrays.items():
                writer.write(name, array.view(np.uint32))
        record = {
            "format": self.scheme.format,
            "kv_cache": self.scheme.kv_cache,
            "settings": self.inputs().settings,
            "texts": {
                "description": texts.description,
                "digest": texts.digest,
                "num_texts": len(texts.calibration),
                "num_tokens": sum(map(len, texts.calibration)),
                "num_held_out": len(texts.held_out),
            },
            "device": device,
            "versions": provenance.versions(_LIBRARIES),
            "warnings": list(calibrated.warnings),
        }
        write_object(out / CALIBRATION_NAME, record)


def require_libraries() -> None:
    """Raises RuntimeUnavailable where a library that calibrating imports is not installed."""
    for library in _IMPORTED:
        if importlib.util.find_spec(library) is None:
            raise RuntimeUnavailable(f"quantization needs '{library}': {with_extras('quantize')}")
