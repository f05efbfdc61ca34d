"""Which settings a runtime reads: one without effect is an error, and so is one that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specpipe.config import PipelineConfig

_READERS = {
    "dtype": ("torch", "tensorrt"),
    "device": ("torch",),
    "num_threads": ("torch",),
    "library": ("tensorrt",),
    "compute_capabilities": ("tensorrt",),
    "weights": ("tensorrt",),
    "weight_streaming": ("tensorrt",),
    "tensorrt_llm": ("tensorrt_llm",),
}
"""The runtimes that read a setting of `engine`; all read what is not listed."""


@dataclass(frozen=True)
class Fault:
    """A setting that cannot stay: its key, its value and what is expected of it."""

    key: str
    value: Any
    expected: str


def setting_faults(config: PipelineConfig) -> Iterator[Fault]:
    """Yields the settings that contradict each other, or have no effect with the runtime."""
    engine = config.engine
    for name, readers in _READERS.items():
        if name in engine.model_fields_set and engine.runtime not in readers:
            value = getattr(engine, name)
            shown = value.model_dump(exclude_unset=True) if name == "tensorrt_llm" else value
            yield without_effect(f"engine.{name}", shown, f"engine.runtime '{engine.runtime}'")
    if engine.runtime == "tensorrt_llm":
        from specpipe.runtimes.tensorrt_llm import refusals

        yield from refusals.setting_faults(config)
        return
    for role, checkpoint in (("draft", config.draft), ("target", config.target)):
        if checkpoint.quantization is not None:
            yield Fault(
                f"{role}.quantization.format",
                checkpoint.quantization.format,
                f"no quantization, since runtime '{engine.runtime}' does not run quantized "
                "checkpoints yet; engine.runtime tensorrt_llm does",
            )
    if engine.runtime == "tensorrt":
        yield from _tensorrt_faults(config)


def _tensorrt_faults(config: PipelineConfig) -> Iterator[Fault]:
    engine = config.engine
    for role, checkpoint in (("draft", config.draft), ("target", config.target)):
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


def without_effect(key: str, value: Any, where: str) -> Fault:
    """The fault of a setting that nobody reads."""
    return Fault(key, value, f"nothing here, since it has no effect with {where}")
