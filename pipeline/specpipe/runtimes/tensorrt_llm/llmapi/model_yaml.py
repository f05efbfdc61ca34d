"""`model.yaml`: the keyword arguments of `tensorrt_llm.LLM`, spelled as each release has them.

What is not known for certain: the sources of the table are snapshots of TensorRT-LLM's main branch
that were dated by their content, not the tagged releases. The field names of a release are checked
by TensorRT-LLM itself when the pair is loaded, since its models refuse unknown ones;
`decoding_type` is not even read then, for `backend.py` makes the object of the class that it names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specpipe.config.tensorrt_llm_versions import version_number

if TYPE_CHECKING:
    from specpipe.runtimes.tensorrt_llm.plan import PairPlan

MODEL_YAML = "model.yaml"
SPECULATIVE_CONFIG = "speculative_config"
DECODING_TYPE = "decoding_type"

TARGET_FOLDER, DRAFT_FOLDER = "target", "draft"
"""Where the checkpoints lie, relative to the YAML."""

_HEADER = "# Keyword arguments of tensorrt_llm.LLM {version}; paths are relative to this file.\n"


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


def resolve_paths(arguments: dict[str, Any], *, draft: Path, target: Path) -> dict[str, Any]:
    """Returns the arguments with the folders where they lie now."""
    resolved = {**arguments, "model": str(target)}
    if SPECULATIVE_CONFIG in arguments:
        resolved[SPECULATIVE_CONFIG] = {
            key: str(draft) if value == DRAFT_FOLDER else value
            for key, value in arguments[SPECULATIVE_CONFIG].items()
        }
    return resolved
