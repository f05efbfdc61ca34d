"""Settings that contradict each other, or have no effect: each is an error.

What one runtime alone cannot do, it says itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specpipe.checkpoints.formats import FORMATS
from specpipe.config.faults import Fault, without_effect
from specpipe.runtimes.runtime import Runtime, load_runtime

if TYPE_CHECKING:
    from specpipe.config.sections import CheckpointConfig, PipelineConfig


def setting_faults(config: PipelineConfig) -> Iterator[Fault]:
    """Yields the settings that contradict each other, or have no effect with the runtime."""
    runtime = load_runtime(config.engine.runtime)
    yield from _prompt_lookup_faults(config, runtime)
    yield from _quantization_faults(config)
    yield from _quality_faults(config)
    yield from runtime.setting_faults(config, config.engine)


def _sides(config: PipelineConfig) -> tuple[tuple[str, CheckpointConfig], ...]:
    return ("draft", config.draft), ("target", config.target)


def _prompt_lookup_faults(config: PipelineConfig, runtime: Runtime) -> Iterator[Fault]:
    speculation = config.speculation
    if not speculation.prompt_lookup:
        return
    key = "speculation.prompt_lookup"
    if not runtime.runs_own_loop:
        yield without_effect(key, True, f"engine.runtime '{runtime.name}'")
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
