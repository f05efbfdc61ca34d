"""What TensorRT-LLM's LLM API cannot do for a pair, found before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from specpipe.checkpoints.checkpoint import QUANT_CONFIG_NAME, QUANTIZATION_KEYS, read_config
from specpipe.checkpoints.formats import FORMATS
from specpipe.config.faults import Fault, without_effect
from specpipe.config.tensorrt_llm import BuildFlags, TensorRTLLMConfig
from specpipe.errors import EngineBuildError
from specpipe.machine.gpus import sm_of
from specpipe.runtimes.tensorrt_llm.capabilities import FP8_SM, capabilities
from specpipe.runtimes.tensorrt_llm.formats import FORMATS_READ
from specpipe.runtimes.tensorrt_llm.llmapi.model_yaml import spelling

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.runtimes.plan import Side
    from specpipe.runtimes.tensorrt_llm.plan import PairPlan

_FP8_BLOCK_SIZE = [128, 128]


def setting_faults(config: PipelineConfig, settings: TensorRTLLMConfig) -> Iterator[Fault]:
    """Yields the settings of a config for backend pytorch that would have no effect there."""
    for role, checkpoint in (("draft", config.draft), ("target", config.target)):
        scheme = checkpoint.quantization
        if scheme is not None and scheme.format not in FORMATS_READ:
            yield Fault(
                f"{role}.quantization.format",
                scheme.format,
                f"{', '.join(FORMATS_READ)}: backend pytorch reads no other; backend tensorrt "
                "builds engines of it",
            )
        if scheme is not None and "export" in scheme.model_fields_set:
            yield without_effect(
                f"{role}.quantization.export",
                scheme.export,
                "backend pytorch, which serves the exported folder",
            )
    for name in ("tp_size", "pp_size"):
        of_draft, of_target = getattr(config.draft, name), getattr(config.target, name)
        if of_draft != of_target:
            yield Fault(
                f"draft.{name}",
                of_draft,
                f"{of_target}, as target.{name}: backend pytorch splits both models alike",
            )
    if config.speculation.adaptive and "adaptive" in config.speculation.model_fields_set:
        yield Fault(
            "speculation.adaptive",
            True,
            "false: backend pytorch drafts num_draft_tokens in every step of every request",
        )
    if config.speculation.schedule:
        yield Fault(
            "speculation.schedule",
            [level.model_dump() for level in config.speculation.schedule],
            "nothing: backend pytorch does not tell how much it drafted in a step, so with its "
            "draft_len_schedule the counts would be wrong",
        )
    if settings.draft_gpu_ids not in (None, settings.target_gpu_ids):
        yield Fault(
            "engine.tensorrt_llm.draft_gpu_ids",
            list(settings.draft_gpu_ids or ()),
            "nothing: with backend pytorch both models run on target_gpu_ids",
        )
    if settings.target_gpu_ids is not None and len(settings.target_gpu_ids) != (
        config.target.world_size
    ):
        yield Fault(
            "engine.tensorrt_llm.target_gpu_ids",
            list(settings.target_gpu_ids),
            f"{config.target.world_size}, one for each rank of the target",
        )
    builds = "nothing, since backend pytorch builds no engine"
    if settings.image is not None:
        yield Fault("engine.tensorrt_llm.image", settings.image, builds)
    if settings.extra_build_args:
        yield Fault("engine.tensorrt_llm.extra_build_args", list(settings.extra_build_args), builds)
    for name in _changed(settings.build, BuildFlags()):
        key = f"engine.tensorrt_llm.build.{name}"
        yield Fault(key, getattr(settings.build, name), builds)
    for name in _changed(settings.parameters, type(settings.parameters)()):
        yield Fault(
            f"engine.tensorrt_llm.parameters.{name}",
            getattr(settings.parameters, name),
            "nothing: it is a parameter of the Triton backend for engines",
        )


def _changed(section: Any, default: Any) -> list[str]:
    names = type(section).model_fields
    return [name for name in names if getattr(section, name) != getattr(default, name)]


def check_plan(pair: PairPlan) -> None:
    """Refuses what the checkpoints' small files show not to work; raises EngineBuildError."""
    if pair.num_draft_tokens > 0 and pair.draft.context_length < pair.max_seq_len:
        raise EngineBuildError(
            f"the draft reaches {pair.draft.context_length} tokens and requests may have "
            f"{pair.max_seq_len}: TensorRT-LLM's pytorch backend drafts up to the last one; set "
            f"engine.max_seq_len to {pair.draft.context_length} at most"
        )
    known = capabilities(pair)
    for side in (pair.draft, pair.target):
        _check_gpu(side, known[side.role])
        _check_quantization(side, pair.engine.tensorrt_llm.version)


def _check_gpu(side: Side, compute_capability: str | None) -> None:
    """Refuses a format that the GPU's tensor cores do not have."""
    name = side.unified.format
    if name is None or compute_capability is None:
        return
    sm = sm_of(compute_capability)
    if FORMATS[name].min_sm > sm:
        possible = [other for other in FORMATS_READ if FORMATS[other].min_sm <= sm]
        raise EngineBuildError(
            f"{side.role}.quantization.format '{name}' does not run on a GPU of compute capability "
            f"{compute_capability}; formats that do: {', '.join(possible)}; or leave quantization "
            "out"
        )
    if side.unified.quantization.kv_cache_quant_algo == "FP8" and sm < FP8_SM:
        raise EngineBuildError(
            f"{side.role}.quantization.kv_cache 'fp8' does not run on a GPU of compute capability "
            f"{compute_capability}; set it to null"
        )


def _check_quantization(side: Side, version: str) -> None:
    """Refuses formats that the PyTorch backend of this release is not known to read.

    Source: TensorRT-LLM, tensorrt_llm/_torch/model_config.py.
    """
    if (side.folder / QUANT_CONFIG_NAME).is_file():
        return
    config = read_config(side.folder, limits=side.limits)
    quantization = next((config[key] for key in QUANTIZATION_KEYS if config.get(key)), None)
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    known = spelling(version).quant_methods
    if method in known and (
        method != "fp8" or quantization.get("weight_block_size") == _FP8_BLOCK_SIZE
    ):
        return
    readable = " and ".join(
        f"fp8 in blocks of {_FP8_BLOCK_SIZE}" if name == "fp8" else name for name in sorted(known)
    )
    raise EngineBuildError(
        f"{side.role} {side.folder} is quantized by {method or 'an unnamed method'}, which "
        f"TensorRT-LLM {version} is not known to read: it reads what ModelOpt wrote "
        f"({QUANT_CONFIG_NAME}), {readable}; set {side.role}.quantization on the checkpoint that "
        "it was quantized from"
    )
