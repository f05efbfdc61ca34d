"""Which settings a runtime reads: one without effect is an error, and so is one that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specpipe.checkpoints.formats import FORMATS, TENSORRT_FORMATS
from specpipe.config.faults import Fault, without_effect
from specpipe.machine.gpus import sm_of

if TYPE_CHECKING:
    from specpipe.config.sections import CheckpointConfig, PipelineConfig, QuantizationConfig

_READERS = {
    "dtype": ("torch", "tensorrt"),
    "device": ("torch",),
    "kernels": ("torch",),
    "num_threads": ("torch",),
    "library": ("tensorrt",),
    "compute_capabilities": ("tensorrt",),
    "weights": ("tensorrt",),
    "weight_streaming": ("tensorrt",),
    "tensorrt_llm": ("tensorrt_llm",),
}
"""The runtimes that read a setting of `engine`; all read what is not listed."""


def setting_faults(config: PipelineConfig) -> Iterator[Fault]:
    """Yields the settings that contradict each other, or have no effect with the runtime."""
    engine = config.engine
    for name, readers in _READERS.items():
        if name in engine.model_fields_set and engine.runtime not in readers:
            value = getattr(engine, name)
            shown = value.model_dump(exclude_unset=True) if name == "tensorrt_llm" else value
            yield without_effect(f"engine.{name}", shown, f"engine.runtime '{engine.runtime}'")
    yield from _prompt_lookup_faults(config)
    yield from _quantization_faults(config)
    yield from _quality_faults(config)
    if engine.runtime == "tensorrt_llm":
        from specpipe.runtimes.tensorrt_llm import refusals

        yield from refusals.setting_faults(config)
    elif engine.runtime == "tensorrt":
        yield from _tensorrt_faults(config)


def _sides(config: PipelineConfig) -> tuple[tuple[str, CheckpointConfig], ...]:
    return ("draft", config.draft), ("target", config.target)


def _prompt_lookup_faults(config: PipelineConfig) -> Iterator[Fault]:
    speculation = config.speculation
    if not speculation.prompt_lookup:
        return
    key = "speculation.prompt_lookup"
    if config.engine.runtime == "tensorrt_llm":
        yield without_effect(key, True, "engine.runtime 'tensorrt_llm'")
    if speculation.num_draft_tokens == 0:
        yield without_effect(key, True, "speculation.num_draft_tokens 0")
    if not speculation.adaptive:
        yield Fault(
            key,
            True,
            "false, or speculation.adaptive true: what recent copies were worth decides whether a "
            "step copies",
        )


def _quantization_faults(config: PipelineConfig) -> Iterator[Fault]:
    for role, checkpoint in _sides(config):
        scheme = checkpoint.quantization
        if scheme is None:
            continue
        key, given = f"{role}.quantization", scheme.model_fields_set
        if "awq_block_size" in given and FORMATS[scheme.format].block_size != "set":
            yield without_effect(
                f"{key}.awq_block_size", scheme.awq_block_size, f"format '{scheme.format}'"
            )
        if scheme.export and FORMATS[scheme.format].weight_dtype is None:
            yield Fault(
                f"{key}.export",
                True,
                f"false with format '{scheme.format}', which has no Hugging Face layout: "
                "TensorRT-LLM quantizes its weights while it builds an engine",
            )
        if "calibration" in given and not scheme.needs_data and not config.quality.measure:
            yield without_effect(
                f"{key}.calibration",
                scheme.calibration.model_dump(exclude_unset=True),
                f"format '{scheme.format}', which needs no data, and quality.measure false",
            )


def _quality_faults(config: PipelineConfig) -> Iterator[Fault]:
    """A threshold that nothing is held against would seem to be kept."""
    given = config.quality.model_dump(exclude_unset=True)
    if given.get("measure") is False:
        del given["measure"]  # which is true of a pair where nothing is quantized, too
    if given and all(checkpoint.quantization is None for _, checkpoint in _sides(config)):
        yield without_effect("quality", given, "checkpoints that are not quantized here")
    for name, value in given.items():
        if not config.quality.measure:
            yield without_effect(f"quality.{name}", value, "quality.measure false")
    if "min_acceptance_ratio" in given and config.speculation.num_draft_tokens == 0:
        yield without_effect(
            "quality.min_acceptance_ratio",
            given["min_acceptance_ratio"],
            "speculation.num_draft_tokens 0",
        )


def _tensorrt_faults(config: PipelineConfig) -> Iterator[Fault]:
    engine = config.engine
    for role, checkpoint in _sides(config):
        if checkpoint.quantization is not None:
            yield from _tensorrt_quantization_faults(role, config, checkpoint.quantization)
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


def _tensorrt_quantization_faults(
    role: str, config: PipelineConfig, scheme: QuantizationConfig
) -> Iterator[Fault]:
    engine = config.engine
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
