"""Hugging Face folder, plain or quantized by others → unified checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specpipe.checkpoints.checkpoint import checkpoint_files
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.plain_weights import open_weights
from specpipe.checkpoints.unified import write_unified
from specpipe.quantization.prequantized import read_prequantized
from specpipe.roles import Role
from specpipe.stage import StageInputs, naming


@dataclass(frozen=True)
class Convert:
    """Converts one Hugging Face folder to TensorRT-LLM's checkpoint format, split for TP and PP.

    for_trtllm_build  whether its builder needs something in the checkpoint to be otherwise
    """

    role: Role  # for messages only
    checkpoint: Path
    tp_size: int = 1
    pp_size: int = 1
    limits: FileLimits = FILE_LIMITS
    for_trtllm_build: bool = False

    @property
    def name(self) -> str:
        return f"{self.role}/convert"

    def inputs(self) -> StageInputs:
        return StageInputs(
            files=checkpoint_files(self.checkpoint),
            settings={
                "tp_size": self.tp_size,
                "pp_size": self.pp_size,
                **({"for_trtllm_build": True} if self.for_trtllm_build else {}),
            },
        )

    def run(self, out: Path) -> None:
        with naming(self.role):
            convert(
                self.checkpoint,
                out,
                tp_size=self.tp_size,
                pp_size=self.pp_size,
                limits=self.limits,
                for_trtllm_build=self.for_trtllm_build,
            )


def convert(
    checkpoint: Path,
    out: Path,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    limits: FileLimits = FILE_LIMITS,
    for_trtllm_build: bool = False,
) -> None:
    """Writes the unified checkpoint of a Hugging Face folder into the empty folder `out`.

    A quantized one stays what it is. Everything that can be refused is refused before a weight is
    read.
    """
    found = read_prequantized(checkpoint, limits)
    if found is None:
        plain = open_weights(
            checkpoint,
            tp_size=tp_size,
            pp_size=pp_size,
            limits=limits,
            for_trtllm_build=for_trtllm_build,
        )
        write_unified(out, plain.config, plain.rows)
        return
    from specpipe.quantization.prequantized_weights import open_prequantized  # imports torch

    weights = open_prequantized(
        checkpoint,
        found,
        tp_size=tp_size,
        pp_size=pp_size,
        limits=limits,
        for_trtllm_build=for_trtllm_build,
    )
    write_unified(out, weights.config, weights.rows)
