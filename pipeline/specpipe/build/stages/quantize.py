"""Hugging Face folder and calibrated scales → quantized unified checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specpipe.checkpoints.checkpoint import checkpoint_files
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.plain_weights import open_weights
from specpipe.checkpoints.trtllm_build import fit_trtllm_build
from specpipe.checkpoints.unified import write_unified
from specpipe.config.sections import QuantizationConfig
from specpipe.quantization.quantized_config import quantized_config
from specpipe.quantization.scales import read_scales
from specpipe.roles import Role
from specpipe.stage import StageInputs, naming


@dataclass(frozen=True)
class Quantize:
    """Quantizes the linears of one checkpoint; embeddings, norms and biases keep their dtype.

    scales            the folder that calibration made; None for a format that needs no data
    for_trtllm_build  whether its builder needs something in the checkpoint to be otherwise
    """

    role: Role  # for messages only
    checkpoint: Path
    scales: Path | None
    scheme: QuantizationConfig
    tp_size: int = 1
    pp_size: int = 1
    limits: FileLimits = FILE_LIMITS
    for_trtllm_build: bool = False

    @property
    def name(self) -> str:
        return f"{self.role}/quantize"

    def inputs(self) -> StageInputs:
        files = checkpoint_files(self.checkpoint)
        return StageInputs(
            files=files if self.scales is None else (*files, self.scales),
            settings={
                "tp_size": self.tp_size,
                "pp_size": self.pp_size,
                **self.scheme.model_dump(mode="json", exclude={"calibration", "export"}),
                **({"for_trtllm_build": True} if self.for_trtllm_build else {}),
            },
            libraries=("torch",),
        )

    def run(self, out: Path) -> None:
        with naming(self.role):
            quantize(
                self.checkpoint,
                self.scales,
                out,
                self.scheme,
                tp_size=self.tp_size,
                pp_size=self.pp_size,
                limits=self.limits,
                for_trtllm_build=self.for_trtllm_build,
            )


def quantize(
    checkpoint: Path,
    scales: Path | None,
    out: Path,
    scheme: QuantizationConfig,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    limits: FileLimits = FILE_LIMITS,
    for_trtllm_build: bool = False,
) -> None:
    """Writes the quantized unified checkpoint of a Hugging Face folder into the empty `out`.

    The vocabulary keeps its size (see `quantized_config`), so that draft and target stay a pair
    whatever the format of each.
    """
    from specpipe.quantization.weights import QuantizedWeights  # imports torch

    plain = open_weights(
        checkpoint,
        tp_size=tp_size,
        pp_size=pp_size,
        limits=limits,
        for_trtllm_build=for_trtllm_build,
    )
    config = quantized_config(plain.config, scheme)
    if for_trtllm_build:
        config = fit_trtllm_build(config)
    weights = QuantizedWeights(plain, config, read_scales(scales, config))
    write_unified(out, config, weights.rows)
