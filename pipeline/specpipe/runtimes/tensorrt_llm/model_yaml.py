"""`model.yaml`: the keyword arguments of `tensorrt_llm.LLM`, spelled as each release has them.

What is not known for certain: the sources of the table are snapshots of TensorRT-LLM's main branch
that were dated by their content, not the tagged releases. The field names of a release are checked
by TensorRT-LLM itself when the pair is loaded, since its models refuse unknown ones;
`decoding_type` is not even read then, for `llmapi.py` makes the object of the class that it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specpipe.checkpoints.checkpoint import QUANT_CONFIG_NAME, QUANTIZATION_KEYS, read_config
from specpipe.checkpoints.formats import FORMATS
from specpipe.config.faults import Fault, without_effect
from specpipe.config.tensorrt_llm import BuildFlags
from specpipe.config.tensorrt_llm_versions import version_number
from specpipe.errors import EngineBuildError
from specpipe.runtimes.tensorrt_llm.capabilities import FP8_SM, capabilities, sm_of
from specpipe.runtimes.tensorrt_llm.formats import FORMATS_READ

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.runtimes.plan import PairPlan, Side

MODEL_YAML = "model.yaml"
SPECULATIVE_CONFIG = "speculative_config"
DECODING_TYPE = "decoding_type"

TARGET_FOLDER, DRAFT_FOLDER = "target", "draft"
"""Where the checkpoints lie, relative to the YAML."""

_HEADER = "# Keyword arguments of tensorrt_llm.LLM {version}; paths are relative to this file.\n"
_FP8_BLOCK_SIZE = [128, 128]


@dataclass(frozen=True)
class Spelling:
    """What a release line calls things, and which sampling inputs its PyTorch backend applies.

    decoding_type   what `speculative_config` says where it is read from YAML
    draft_model     its key for the draft's checkpoint
    sampling        inputs of a request that change what is sampled; others would be ignored
    quant_methods   the `quant_method`s of `quantization_config` that it reads, besides ModelOpt's
                    hf_quant_config.json, which all do
    """

    decoding_type: str
    draft_model: str
    sampling: frozenset[str]
    quant_methods: frozenset[str]


_TEMPERATURE_TOP_K_TOP_P = frozenset({"temperature", "top_k", "top_p"})

SPELLINGS = {
    # tensorrt_llm/llmapi/llm_args.py: DecodingBaseConfig.from_dict looks `DraftTarget` up, fields
    # max_draft_len and speculative_model_dir. _torch/pyexecutor/sampler.py: request_strategy takes
    # top_p or top_k and never a temperature. _torch/model_config.py: fp8 with weight blocks.
    (1, 0): Spelling("DraftTarget", "speculative_model_dir", frozenset(), frozenset({"fp8"})),
    # The same from_dict, more fields. _torch/pyexecutor/sampling_utils.py:
    # resolve_sampling_strategy knows temperature, top_k and top_p.
    (1, 1): Spelling(
        "DraftTarget", "speculative_model_dir", _TEMPERATURE_TOP_K_TOP_P, frozenset({"fp8"})
    ),
    # DraftTargetDecodingConfig.decoding_type is Literal["Draft_Target"], its draft
    # speculative_model (speculative_model_dir still works); so write NVIDIA's Triton tutorials,
    # Feature_Guide/Speculative_Decoding/TRT-LLM. Whether `DraftTarget` is still taken was not found
    # out, nor in which 1.2.x compressed-tensors came in.
    (1, 2): Spelling(
        "Draft_Target",
        "speculative_model",
        _TEMPERATURE_TOP_K_TOP_P,
        frozenset({"fp8", "compressed-tensors"}),
    ),
}
"""By release line, major and minor; 1.2.0 and 1.2.1 are spelled alike."""


def release_line(version: str) -> tuple[int, int]:
    """Returns major and minor of a version: (1, 2) of "1.2.0rc8"."""
    major, minor, *_ = (*version_number(version), 0, 0)
    return major, minor


def spelling(version: str) -> Spelling:
    """Returns the row of a release that the settings take."""
    return SPELLINGS[release_line(version)]


def llm_arguments(pair: PairPlan) -> dict[str, Any]:
    """Returns the keyword arguments of `LLM`, JSON-able; paths are relative to the YAML.

    Text is none of its business: specpipe encodes and decodes, so it loads no tokenizer. The
    overlap scheduler is off, as NVIDIA's documentation has it for a draft model
    (docs/source/features/speculative-decoding.md).
    """
    settings = pair.engine.tensorrt_llm
    checkpoint = pair.target.checkpoint
    arguments: dict[str, Any] = {
        "model": TARGET_FOLDER,
        "backend": "pytorch",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": checkpoint.tp_size,
        "pipeline_parallel_size": checkpoint.pp_size,
        "max_batch_size": pair.engine.max_batch_size,
        "max_seq_len": pair.max_seq_len,
        "max_num_tokens": pair.engine.max_num_tokens,
        # Without it a prompt that is longer than max_num_tokens is refused.
        "enable_chunked_prefill": pair.max_seq_len > pair.engine.max_num_tokens,
    }
    if settings.kv_cache_free_gpu_mem_fraction is not None:
        arguments["kv_cache_config"] = {
            "free_gpu_memory_fraction": settings.kv_cache_free_gpu_mem_fraction
        }
    if pair.num_draft_tokens > 0:
        names = spelling(settings.version)
        arguments["disable_overlap_scheduler"] = True
        arguments[SPECULATIVE_CONFIG] = {
            DECODING_TYPE: names.decoding_type,
            "max_draft_len": pair.num_draft_tokens,
            names.draft_model: DRAFT_FOLDER,
        }
    return arguments


def to_text(arguments: dict[str, Any], version: str) -> str:
    """Writes the arguments as the YAML file has them."""
    return _HEADER.format(version=version) + yaml.safe_dump(arguments, sort_keys=False)


def setting_faults(config: PipelineConfig) -> Iterator[Fault]:
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
    settings = config.engine.tensorrt_llm
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


def resolve_paths(arguments: dict[str, Any], *, draft: Path, target: Path) -> dict[str, Any]:
    """Returns the arguments with the folders where they lie now."""
    resolved = {**arguments, "model": str(target)}
    if SPECULATIVE_CONFIG in arguments:
        resolved[SPECULATIVE_CONFIG] = {
            key: str(draft) if value == DRAFT_FOLDER else value
            for key, value in arguments[SPECULATIVE_CONFIG].items()
        }
    return resolved
