"""What TensorRT-LLM's LLM API cannot do for a pair, found before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from specpipe.checkpoints.checkpoint import QUANT_CONFIG_NAME, QUANTIZATION_KEYS, read_config
from specpipe.checkpoints.formats import FORMATS
from specpipe.config.faults import Fault, without_effect
from specpipe.config.tensorrt_llm import BuildFlags, TensorRTLLMConfig
from specpipe.config.tensorrt_llm_versions import FIRST_WITHOUT_ENGINES, version_order
from specpipe.errors import EngineBuildError
from specpipe.machine.gpus import sm_of
from specpipe.runtimes.tensorrt_llm.capabilities import FP8_SM, capabilities
from specpipe.runtimes.tensorrt_llm.formats import FORMATS_READ
from specpipe.runtimes.tensorrt_llm.llmapi.model_yaml import (
    FIRST_WITH_PENALTIES,
    ONE_ENGINE_TARGETS,
    spelling,
)

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.runtimes.plan import Side
    from specpipe.runtimes.tensorrt_llm.plan import PairPlan

_FP8_BLOCK_SIZE = [128, 128]
_NVFP4_GROUP_SIZE = 16


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
    yield from _schedule_faults(config, settings)
    yield from _penalty_faults(config, settings)
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


def _schedule_faults(config: PipelineConfig, settings: TensorRTLLMConfig) -> Iterator[Fault]:
    speculation = config.speculation
    if not speculation.schedule:
        return
    first = speculation.schedule[0]
    if not spelling(settings.version).is_one_engine:
        yield Fault(
            "speculation.schedule",
            [level.model_dump() for level in speculation.schedule],
            f"nothing: backend pytorch of TensorRT-LLM {settings.version} does not tell how much "
            "it drafted, so with its draft_len_schedule the counts would be wrong; "
            f"{FIRST_WITHOUT_ENGINES} and later do",
        )
    elif first.from_batch_size == 1 and first.num_draft_tokens != speculation.num_draft_tokens:
        yield Fault(
            "speculation.schedule.0.num_draft_tokens",
            first.num_draft_tokens,
            f"{speculation.num_draft_tokens}, which is speculation.num_draft_tokens: "
            "TensorRT-LLM wants it of the smallest batches",
        )


def _penalty_faults(config: PipelineConfig, settings: TensorRTLLMConfig) -> Iterator[Fault]:
    if not settings.enable_penalty:
        return
    key = "engine.tensorrt_llm.enable_penalty"
    if version_order(settings.version) < version_order(FIRST_WITH_PENALTIES):
        yield Fault(
            key, True, f"false: TensorRT-LLM has it from {FIRST_WITH_PENALTIES} on, not earlier"
        )
    elif config.speculation.num_draft_tokens == 0:
        yield without_effect(key, True, "speculation.num_draft_tokens 0")


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
    version = pair.engine.tensorrt_llm.version
    known = capabilities(pair)
    for side in (pair.draft, pair.target):
        _check_family(side, version)
        _check_gpu(side, known[side.role])
        _check_quantization(side, version)
    if pair.num_draft_tokens > 0 and spelling(version).is_one_engine:
        _check_one_engine(pair, version)


def parallel_draft_fault(pair: PairPlan) -> str | None:
    """As `Backend` has it.

    Of all rows of the draft the likeliest is proposed, and the target looks it up:
    PARDWorker.forward in _torch/speculative/pard.py (id 66807157793).
    """
    if pair.num_draft_tokens == 0:
        return None
    version = pair.engine.tensorrt_llm.version
    if not spelling(version).is_one_engine:
        return (
            f"TensorRT-LLM {version} does not run it so: set engine.tensorrt_llm.version to "
            f"{FIRST_WITHOUT_ENGINES} or later, engine.runtime to torch or tensorrt"
        )
    of_draft, of_target = (side.unified.vocab_size for side in (pair.draft, pair.target))
    if of_draft > of_target:
        return (
            f"TensorRT-LLM could propose any of its {of_draft} rows, of which the target has "
            f"{of_target}: train it with a mask token that the target has a row for "
            "(--mask-token), set engine.runtime to torch or tensorrt"
        )
    return None


def _check_family(side: Side, version: str) -> None:
    """Refuses a family that no release of the PyTorch backend has.

    Source: TensorRT-LLM, tensorrt_llm/_torch/models/_arch_index.py@065ff9e9 (id 57385838927), which
    has Gemma 3 and 4 but not 2. A modeling_gemma2.py (04d175ac) is that of pull request 13612,
    which was open in 2026.
    """
    if side.unified.architecture == "Gemma2ForCausalLM":
        raise EngineBuildError(
            f"{side.role}: Gemma2ForCausalLM is not among the models of backend pytorch in "
            f"TensorRT-LLM {version}, nor in any later release that specpipe knows of; runtime "
            "torch runs it, and backend tensorrt up to 1.2.1"
        )


def _check_one_engine(pair: PairPlan, version: str) -> None:
    """Refuses pairs that one engine cannot hold.

    Source: TensorRT-LLM, tensorrt_llm/_torch/models/modeling_speculative.py (id 51970737270) and
    the loader (id 54640543954).
    """
    family = pair.target.unified.architecture
    if family not in ONE_ENGINE_TARGETS:
        raise EngineBuildError(
            f"target: TensorRT-LLM {version} drafts for {' and '.join(ONE_ENGINE_TARGETS)} only, "
            f"and this is {family}; set speculation.num_draft_tokens to 0, or "
            "engine.tensorrt_llm.version to 1.2.1"
        )
    of_draft, of_target = (
        side.unified.quantization.kv_cache_quant_algo for side in (pair.draft, pair.target)
    )
    if of_draft != of_target:
        raise EngineBuildError(
            f"the draft's KV cache is {of_draft or 'not quantized'} and the target's "
            f"{of_target or 'not quantized'}: TensorRT-LLM {version} gives the draft's the dtype "
            "of the target's; set draft.quantization.kv_cache and target.quantization.kv_cache "
            "alike"
        )


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
    if method in known and _has_read_blocks(method, quantization):
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


def _has_read_blocks(method: str, quantization: dict[str, Any]) -> bool:
    """Whether as many weights share a scale as the method is read with."""
    if method == "fp8":
        return bool(quantization.get("weight_block_size") == _FP8_BLOCK_SIZE)
    return method != "nvfp4" or quantization.get("group_size") in (None, _NVFP4_GROUP_SIZE)
