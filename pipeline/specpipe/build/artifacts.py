"""Where the artifacts of a pair lie."""

from __future__ import annotations

from pathlib import Path

from specpipe.config.sections import PipelineConfig


def repository_dir(config: PipelineConfig) -> Path:
    """Returns where the Triton repository of a pair is, or will be."""
    return config.artifacts_dir / "model_repo"
