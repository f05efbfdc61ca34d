"""Hugging Face folder and calibrated scales → quantized Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specpipe.checkpoints.checkpoint import checkpoint_files, read_config
from specpipe.checkpoints.files import TEMPLATES_NAME, copy_file, is_there
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.plain_weights import open_weights
from specpipe.config.sections import QuantizationConfig
from specpipe.quantization.quantized_config import quantized_config
from specpipe.quantization.scales import read_scales
from specpipe.roles import Role
from specpipe.stage import StageInputs, naming

_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    f"{TEMPLATES_NAME}/tool_use.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""What goes with the weights wherever they are served."""


@dataclass(frozen=True)
class Export:
    """Quantizes the linears of one checkpoint, for runtimes that read Hugging Face's layout.

    scales  the folder that calibration made; None for a format that needs no data
    """

    role: Role  # for messages only
    checkpoint: Path
    scales: Path | None
    scheme: QuantizationConfig
    limits: FileLimits = FILE_LIMITS

    @property
    def name(self) -> str:
        return f"{self.role}/export"

    def inputs(self) -> StageInputs:
        files = [*checkpoint_files(self.checkpoint), *_copied(self.checkpoint)]
        if self.scales is not None:
            files.append(self.scales)
        settings = self.scheme.model_dump(mode="json", exclude={"calibration", "export"})
        return StageInputs(files=tuple(files), settings=settings, libraries=("torch",))

    def run(self, out: Path) -> None:
        with naming(self.role):
            export(self.checkpoint, self.scales, out, self.scheme, self.limits)


def export(
    checkpoint: Path,
    scales: Path | None,
    out: Path,
    scheme: QuantizationConfig,
    limits: FileLimits = FILE_LIMITS,
) -> None:
    """Writes a quantized Hugging Face folder, tokenizer included, into the empty folder `out`."""
    from specpipe.quantization.huggingface import write_huggingface  # imports torch
    from specpipe.quantization.weights import QuantizedWeights

    plain = open_weights(checkpoint, limits=limits)
    config = quantized_config(plain.config, scheme)
    weights = QuantizedWeights(plain, config, read_scales(scales, config))
    write_huggingface(out, weights, read_config(checkpoint, limits=limits))
    for path in _copied(checkpoint):
        copy_file(path, out / path.relative_to(checkpoint))


def _copied(checkpoint: Path) -> list[Path]:
    return [path for name in _COPIED if is_there(path := checkpoint / name)]
