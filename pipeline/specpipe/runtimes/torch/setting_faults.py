"""Settings that only engines with pages read, and where there are none."""

from __future__ import annotations

from collections.abc import Iterator

from specpipe.config.engine import TorchEngineConfig
from specpipe.config.faults import Fault, without_effect


def setting_faults(engine: TorchEngineConfig) -> Iterator[Fault]:
    """Yields the settings of pages that were given where the fused kernels never run."""
    where = None
    if engine.device == "cpu":
        where = "engine.device 'cpu'"
    elif engine.kernels == "plain":
        where = "engine.kernels 'plain'"
    for name in ("kv_cache_memory", "prefix_reuse"):
        if where is not None and name in engine.model_fields_set:
            yield without_effect(f"engine.{name}", getattr(engine, name), where)
