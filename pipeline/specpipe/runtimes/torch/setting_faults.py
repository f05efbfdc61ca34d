"""Settings that only the fused kernels read, where the YAML alone shows that they will not run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specpipe.config.faults import Fault, without_effect

if TYPE_CHECKING:
    from specpipe.config.engine import TorchEngineConfig
    from specpipe.config.sections import PipelineConfig

_OF_PAGES = ("kv_cache_memory", "prefix_reuse")


def setting_faults(config: PipelineConfig, engine: TorchEngineConfig) -> Iterator[Fault]:
    """Yields the settings of pages that were given where there are none."""
    for where in _unfused(config, engine):
        for name in _OF_PAGES:
            if name in engine.model_fields_set:
                yield without_effect(f"engine.{name}", getattr(engine, name), where)


def _unfused(config: PipelineConfig, engine: TorchEngineConfig) -> Iterator[str]:
    """Yields the settings with which torch's own operations compute."""
    for name, value in (("device", "cpu"), ("kernels", "plain"), ("dtype", "float16")):
        if getattr(engine, name) == value:
            yield f"engine.{name} '{value}'"
    for role, checkpoint in (("draft", config.draft), ("target", config.target)):
        if checkpoint.quantization is not None and checkpoint.quantization.kv_cache is not None:
            yield f"{role}.quantization.kv_cache '{checkpoint.quantization.kv_cache}'"
