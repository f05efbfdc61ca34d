"""What TensorRT-LLM cannot do for a pair, by its YAML alone; each backend has its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specpipe.config.faults import Fault, without_effect
from specpipe.config.tensorrt_llm_versions import (
    ENGINE_VERSIONS,
    FIRST_WITHOUT_ENGINES,
    is_without_engines,
)

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.config.tensorrt_llm import TensorRTLLMConfig


def setting_faults(config: PipelineConfig, settings: TensorRTLLMConfig) -> Iterator[Fault]:
    """Yields the settings of this runtime that contradict each other, or cannot be."""
    # Reading a YAML must not take the time to import a whole backend, which needs NumPy.
    if settings.backend == "pytorch":
        from specpipe.runtimes.tensorrt_llm.llmapi import refusals as llmapi

        yield from llmapi.setting_faults(config, settings)
        return
    from specpipe.runtimes.tensorrt_llm.engines import refusals as engines

    yield from _of_backend_pytorch(settings)
    yield from engines.setting_faults(config, settings)


def _of_backend_pytorch(settings: TensorRTLLMConfig) -> Iterator[Fault]:
    """Yields what only backend pytorch has, where backend tensorrt is chosen."""
    if is_without_engines(settings.version):
        yield Fault(
            "engine.tensorrt_llm.version",
            settings.version,
            f"one of {', '.join(ENGINE_VERSIONS)}, since TensorRT-LLM builds no engines from "
            f"{FIRST_WITHOUT_ENGINES} on; or engine.tensorrt_llm.backend pytorch",
        )
    for name in ("enable_block_reuse", "enable_penalty"):
        if name in settings.model_fields_set:
            yield without_effect(
                f"engine.tensorrt_llm.{name}", getattr(settings, name), "backend tensorrt"
            )
