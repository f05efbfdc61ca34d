"""Engines for tests: from a Hugging Face folder to an engine folder, built for real."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specpipe.build.stages.convert import convert
from specpipe.checkpoints.unified_config import DTYPES
from specpipe.runtimes.tensorrt.build import BuildTensorRTEngine
from tests.toy import Raw, toy_config, toy_tensors, write_tensors, write_toy_checkpoint


def write_unified(
    work: Path, family: str = "llama", *, tensors: Mapping[str, Raw] | None = None, **overrides: Any
) -> Path:
    """Writes a toy as a unified checkpoint and returns its folder.

    tensors  stand in for those of the toy of the same Hugging Face name
    """
    unified, checkpoint = work / "checkpoint", work / "hf"
    write_toy_checkpoint(checkpoint, family, **overrides)
    if tensors is not None:
        config, path = toy_config(family, **overrides), checkpoint / "model.safetensors"
        path.unlink()
        write_tensors(path, toy_tensors(config) | dict(tensors), dtype=DTYPES[config["dtype"]])
    unified.mkdir()
    convert(checkpoint, unified)
    return unified


def engine_stage(unified: Path, **settings: Any) -> BuildTensorRTEngine:
    """Returns the stage that builds a target for GPUs of compute capability 8.9."""
    defaults = {
        "role": "target",
        "max_batch_size": 4,
        "max_seq_len": 64,
        "max_draft_len": 4,
        "max_num_tokens": 32,
        "dtype": "auto",
        "library": "tensorrt_rtx",
        "compute_capabilities": ("8.9",),
        "weights": "inside",
        "weight_streaming": False,
    }
    return BuildTensorRTEngine(checkpoint=unified, **{**defaults, **settings})


def build_engine(unified: Path, out: Path, **settings: Any) -> Path:
    """Builds an engine and returns its folder."""
    out.mkdir()
    engine_stage(unified, **settings).run(out)
    return out
