"""`model.yaml`: the keyword arguments of `tensorrt_llm.LLM`, spelled as each release has them.

What is not known for certain: the sources of the table are stored texts of TensorRT-LLM (some by
commit, some by number only) that were dated by their content, not the tagged releases. The field
names of a release are checked by TensorRT-LLM itself when the pair is loaded, since its models
refuse unknown ones; `decoding_type` is not even read then, for `backend.py` makes the object of the
class that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specpipe.config.tensorrt_llm_versions import is_without_engines, version_number

if TYPE_CHECKING:
    from specpipe.runtimes.tensorrt_llm.plan import PairPlan
    from specpipe.speculative.adaptive import Schedule

MODEL_YAML = "model.yaml"
SPECULATIVE_CONFIG = "speculative_config"
DECODING_TYPE = "decoding_type"
DRAFT_LEN_SCHEDULE = "draft_len_schedule"
KV_CACHE_CONFIG = "kv_cache_config"

PARALLEL = "PARD"
"""The decoding_type of a draft that proposes all of its tokens in one pass, as one engine runs it:
pull request 11438, in 1.3.0rc7; its page in the reference of 1.4.0rc1 and 1.4.0rc4. From each text
it reads what was accepted and K - 1 masks (_torch/speculative/pard.py, id 66807157793).
"""

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
    is_one_engine   whether the draft runs inside the target's engine: by matching what the target
                    samples at each position, with the target's KV dtype, without log-probabilities,
                    and for families of `ONE_ENGINE_TARGETS` only. `request_perf_metrics` count its
                    draft tokens, draft_len_schedule bounds batch sizes from above, and the draft
                    may be `PARALLEL`
    """

    decoding_type: str
    draft_model: str
    sampling: frozenset[str]
    quant_methods: frozenset[str]
    is_one_engine: bool = False


ONE_ENGINE_TARGETS = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Families whose class in tensorrt_llm/_torch/models holds a draft (SpecDecOneEngineForCausalLM):
modeling_llama.py (id 426411151) and modeling_qwen3.py (id 2464033405). Those of Qwen2
(modeling_qwen.py@87b279a9), Mistral (id 52281727364) and Phi-3 (id 1151304321) do not."""

FIRST_WITH_PENALTIES = "1.3.0rc27"
"""The oldest release whose documentation has enable_penalty (pull request 17701, 2026-08-14)."""

_TEMPERATURE_TOP_K_TOP_P = frozenset({"temperature", "top_k", "top_p"})

_ONE_ENGINE = Spelling(
    "Draft_Target",
    "speculative_model",
    _TEMPERATURE_TOP_K_TOP_P,
    frozenset({"fp8", "compressed-tensors", "mxfp4", "mxfp8", "nvfp4"}),
    is_one_engine=True,
)

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
    # speculative_model (speculative_model_dir still works): llm_args.py, id 7019226376. In which
    # 1.2.x compressed-tensors came in was not found out.
    (1, 2): Spelling(
        "Draft_Target",
        "speculative_model",
        _TEMPERATURE_TOP_K_TOP_P,
        frozenset({"fp8", "compressed-tensors"}),
    ),
    # llm_args.py, id 55143598664, and the reference of 1.3.0rc27, 1.3.0rc29, 1.4.0rc1 and 1.4.0rc4,
    # which has no other argument that is written here. Sampling: SpecSampler.validate_request (id
    # 57364433433) refuses min_p. Quantization: _torch/model_config.py, id 54702305068.
    (1, 3): _ONE_ENGINE,
    (1, 4): _ONE_ENGINE,
}
"""By release line, major and minor; 1.2.0 and 1.2.1 are spelled alike."""


def release_line(version: str) -> tuple[int, int]:
    """Returns major and minor of a version: (1, 2) of "1.2.0rc8"."""
    major, minor, *_ = (*version_number(version), 0, 0)
    return major, minor


def serves(installed: str, version: str) -> bool:
    """Whether a TensorRT-LLM understands what was written for a release.

    It must be of its line, and where its line has no engines no older candidate than is known.
    """
    return release_line(installed) == release_line(version) and (
        is_without_engines(installed) == is_without_engines(version)
    )


def spelling(version: str) -> Spelling:
    """Returns the row of a release that the settings take."""
    return SPELLINGS[release_line(version)]


def llm_arguments(pair: PairPlan) -> dict[str, Any]:
    """Returns the keyword arguments of `LLM`, JSON-able; paths are relative to the YAML.

    Text is none of its business: specpipe encodes and decodes, so it loads no tokenizer. Where the
    draft has an engine of its own the overlap scheduler is off, as NVIDIA's documentation has it
    for a draft model (docs/source/features/speculative-decoding.md).
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
    kv_cache = {
        "free_gpu_memory_fraction": settings.kv_cache_free_gpu_mem_fraction,
        "enable_block_reuse": settings.enable_block_reuse,
    }
    if kv_cache := {name: value for name, value in kv_cache.items() if value is not None}:
        arguments[KV_CACHE_CONFIG] = kv_cache
    if pair.num_draft_tokens > 0:
        if not spelling(settings.version).is_one_engine:
            arguments["disable_overlap_scheduler"] = True
        arguments[SPECULATIVE_CONFIG] = _speculative_config(pair)
    return arguments


def drafting_class(speculative_config: Mapping[str, Any]) -> str:
    """Returns the name of the class in tensorrt_llm.llmapi that a `speculative_config` is of."""
    is_parallel = speculative_config[DECODING_TYPE] == PARALLEL
    return "PARDDecodingConfig" if is_parallel else "DraftTargetDecodingConfig"


def _speculative_config(pair: PairPlan) -> dict[str, Any]:
    settings = pair.engine.tensorrt_llm
    names = spelling(settings.version)
    parallel = pair.draft.unified.parallel
    fields: dict[str, Any] = {
        DECODING_TYPE: names.decoding_type if parallel is None else PARALLEL,
        "max_draft_len": pair.num_draft_tokens,
        names.draft_model: DRAFT_FOLDER,
    }
    if parallel is not None:
        fields["mask_token_id"] = parallel.mask_token_id
    if names.is_one_engine:
        # Said even where it is the default: without it output is lossless.
        fields["use_rejection_sampling"] = settings.acceptance == "logits"
    if settings.enable_penalty:
        fields["enable_penalty"] = True
    if pair.schedule:
        fields[DRAFT_LEN_SCHEDULE] = draft_len_schedule(
            pair.schedule, pair.num_draft_tokens, pair.engine.max_batch_size
        )
    return fields


def draft_len_schedule(
    schedule: Schedule, num_draft_tokens: int, max_batch_size: int
) -> dict[str, int]:
    """Returns the schedule as 1.3 and later have it: draft tokens by the last batch size of each.

    The smallest key must have num_draft_tokens, and above the last nothing would be drafted (pull
    request 10860). Keys are texts, as JSON and our YAML have them.
    """
    levels = schedule if schedule[0][0] == 1 else ((1, num_draft_tokens), *schedule)
    ends = [following - 1 for following, _ in levels[1:]] + [max_batch_size]
    return {str(end): most for end, (_, most) in zip(ends, levels, strict=True)}


def to_text(arguments: dict[str, Any], version: str) -> str:
    """Writes the arguments as the YAML file has them."""
    return _HEADER.format(version=version) + yaml.safe_dump(arguments, sort_keys=False)


def resolve(arguments: dict[str, Any], *, draft: Path, target: Path) -> dict[str, Any]:
    """Returns the file's arguments as `LLM` takes them: folders where they lie, batch sizes as
    numbers.
    """
    resolved = {**arguments, "model": str(target)}
    if SPECULATIVE_CONFIG not in arguments:
        return resolved
    drafting: dict[str, Any] = {
        key: str(draft) if value == DRAFT_FOLDER else value
        for key, value in arguments[SPECULATIVE_CONFIG].items()
    }
    if DRAFT_LEN_SCHEDULE in drafting:
        by_size = {int(size): most for size, most in drafting[DRAFT_LEN_SCHEDULE].items()}
        drafting[DRAFT_LEN_SCHEDULE] = by_size
    return {**resolved, SPECULATIVE_CONFIG: drafting}
