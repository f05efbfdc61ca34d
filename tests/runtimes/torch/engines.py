"""Engines for tests: from a Hugging Face folder to a loaded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specpipe.build.stages.convert import convert
from specpipe.runtimes.torch.build import BuildTorchEngine
from specpipe.runtimes.torch.engine import TorchEngine


def build_engine(checkpoint: Path, work: Path, **settings: Any) -> Path:
    """Converts and builds; returns the engine's folder."""
    unified, engine = work / "checkpoint", work / "engine"
    if not unified.exists():
        unified.mkdir(parents=True)
        convert(checkpoint, unified)
    engine.mkdir()
    defaults = {
        "max_batch_size": 4,
        "max_seq_len": 320,
        "max_draft_len": 8,
        "max_num_tokens": 64,
        "device": "cpu",
    }
    stage = BuildTorchEngine(role="target", checkpoint=unified, **{**defaults, **settings})
    stage.run(engine)
    return engine


def load_engine(checkpoint: Path, work: Path, **settings: Any) -> TorchEngine:
    return TorchEngine.load(build_engine(checkpoint, work, **settings))
