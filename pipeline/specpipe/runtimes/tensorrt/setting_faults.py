"""What one TensorRT engine for each model cannot be, as the YAML alone shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specpipe.checkpoints.formats import FORMATS, TENSORRT_FORMATS
from specpipe.config.faults import Fault, without_effect
from specpipe.machine.gpus import sm_of

if TYPE_CHECKING:
    from specpipe.config.engine import TensorRTEngineConfig
    from specpipe.config.sections import PipelineConfig, QuantizationConfig


def setting_faults(config: PipelineConfig, engine: TensorRTEngineConfig) -> Iterator[Fault]:
    """Yields the settings of this runtime that contradict each other, or cannot be."""
    for role, checkpoint in (("draft", config.draft), ("target", config.target)):
        if checkpoint.quantization is not None:
            yield from _quantization_faults(role, engine, checkpoint.quantization)
        for name in ("tp_size", "pp_size"):
            if getattr(checkpoint, name) != 1:
                yield Fault(
                    f"{role}.{name}",
                    getattr(checkpoint, name),
                    "1: an engine of runtime 'tensorrt' runs on one GPU; engine.runtime "
                    "tensorrt_llm splits it",
                )
    if engine.library == "tensorrt" and "compute_capabilities" in engine.model_fields_set:
        yield without_effect(
            "engine.compute_capabilities",
            list(engine.compute_capabilities),
            "engine.library tensorrt, which builds for the GPU that it finds",
        )
    if len(set(engine.compute_capabilities)) < len(engine.compute_capabilities):
        yield Fault(
            "engine.compute_capabilities", list(engine.compute_capabilities), "each of them once"
        )
    if engine.weights == "beside" and engine.weight_streaming:
        yield without_effect(
            "engine.weight_streaming", True, "engine.weights beside: there is none in the engine"
        )


def _quantization_faults(
    role: str, engine: TensorRTEngineConfig, scheme: QuantizationConfig
) -> Iterator[Fault]:
    if scheme.format not in TENSORRT_FORMATS:
        yield Fault(
            f"{role}.quantization.format",
            scheme.format,
            f"{' or '.join(TENSORRT_FORMATS)} with runtime 'tensorrt'; engine.runtime torch and "
            "tensorrt_llm run the others",
        )
        return
    if scheme.kv_cache is not None:
        yield Fault(
            f"{role}.quantization.kv_cache",
            scheme.kv_cache,
            "null with runtime 'tensorrt': the library's KV cache takes floating-point types only",
        )
    if engine.weights == "beside":
        yield Fault(
            "engine.weights",
            "beside",
            f"inside, since {role} is quantized: inputs of an engine are not",
        )
    too_old = [
        capability
        for capability in engine.compute_capabilities
        if not FORMATS[scheme.format].runs_on(sm_of(capability))
    ]
    if too_old and "compute_capabilities" in engine.model_fields_set:
        yield Fault(
            "engine.compute_capabilities",
            list(engine.compute_capabilities),
            f"none of {', '.join(too_old)}, which {role}.quantization.format {scheme.format} does "
            "not run on",
        )
