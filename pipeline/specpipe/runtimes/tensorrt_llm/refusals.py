"""What TensorRT-LLM cannot do for a pair, by its YAML alone; each backend has its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specpipe.config.faults import Fault
    from specpipe.config.sections import PipelineConfig
    from specpipe.config.tensorrt_llm import TensorRTLLMConfig


def setting_faults(config: PipelineConfig, settings: TensorRTLLMConfig) -> Iterator[Fault]:
    """Yields the settings of this runtime that contradict each other, or cannot be."""
    # Reading a YAML must not take the time to import a whole backend, which needs NumPy.
    if settings.backend == "pytorch":
        from specpipe.runtimes.tensorrt_llm.llmapi import refusals as llmapi

        return llmapi.setting_faults(config, settings)
    from specpipe.runtimes.tensorrt_llm.engines import refusals as engines

    return engines.setting_faults(config, settings)
