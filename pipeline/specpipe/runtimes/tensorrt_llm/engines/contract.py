"""The Triton model `tensorrt_llm` as data: its tensors and parameters, with what each does.

It is the model of NVIDIA's C++ Triton backend that runs one engine; a repository has it twice, as
`draft` and `target`. Templates: TensorRT-LLM@2a9abd95, triton_backend/all_models/
inflight_batcher_llm/tensorrt_llm/config.pbtxt, and tensorrtllm_backend v0.19.0, all_models/
inflight_batcher_llm/tensorrt_llm/config.pbtxt, for the names before 0.20. What the backend does
with a value: TensorRT-LLM@0c8de69a, triton_backend/inflight_batcher_llm/src/
model_instance_state.cc and model_state.cc. Which release a commit belongs to was not verified.

Facts that callers of the model rely on (src/utils.cc@19290813, src/model_instance_state.cc;
tensorrtllm_backend v0.19.0 says the same):

- Draft tokens are refused neither by a decoupled model nor together with streaming. Refused are
  streaming by a model that is not decoupled, and several prompts in one request to such a model.
- A whole answer, streamed or not asked for, is one response that carries data and the final flag.
- `exclude_input_in_output` of a request wins over the parameter. A whole answer begins with the
  prompt unless it is true; a streamed one never does.
- `stop` cancels what runs under the same request id, and is itself answered by one empty final
  response, whether anything ran or not. A `stop` without an id is an error.
- `output_ids` and `sequence_length` must be among the outputs that a request asks for.
- Generation logits come only from an engine that was built to gather them: the backend never sets
  the executor's own switch (cpp/tensorrt_llm/executor/executorImpl.cpp@b35ac1b6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from specpipe.config.tensorrt_llm_versions import version_number
from specpipe.errors import RepositoryError
from specpipe.roles import Role

BACKEND = "tensorrtllm"
"""The backend's name in `config.pbtxt`."""

DRAFT: Role = "draft"
TARGET: Role = "target"
"""The names of the two models in a repository; `speculative` calls them, by its parameters."""

MODEL_NAMES: Mapping[Role, str] = {DRAFT: "draft_model_name", TARGET: "target_model_name"}
"""The parameters of `speculative` that name them as the server has them."""

ENGINE_DIR = "engine"
"""The folder of the engine in a model's version folder."""

LOGITS = "${logits_datatype}"
"""Stands for the type of all logits, which the engine decides."""

_LOGITS_TYPES = {"float32": "FP32", "float16": "FP16"}


@dataclass(frozen=True)
class BackendTensor:
    """One input or output, without the batch dimension; -1 in `dims` is any size.

    is_ragged  requests of different sizes may share a batch
    is_scalar  dims [1] on the wire, no dimension but the batch inside
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    is_ragged: bool = False
    is_scalar: bool = False


def _scalar(name: str, dtype: str, *, optional: bool = True) -> BackendTensor:
    return BackendTensor(name, dtype, optional=optional, is_scalar=True)


def _ragged(name: str, dtype: str, *dims: int) -> BackendTensor:
    return BackendTensor(name, dtype, dims or (-1,), is_ragged=True)


_INPUTS = (
    _ragged("input_ids", "INT32"),
    _ragged("encoder_input_features", "FP16", -1, -1),
    _scalar("encoder_output_lengths", "INT32"),
    _scalar("input_lengths", "INT32", optional=False),
    _scalar("request_output_len", "INT32", optional=False),
    _scalar("num_return_sequences", "INT32"),
    _ragged("draft_input_ids", "INT32"),
    _ragged("decoder_input_ids", "INT32"),
    _scalar("decoder_input_lengths", "INT32"),
    _ragged("draft_logits", LOGITS, -1, -1),
    _scalar("draft_acceptance_threshold", "FP32"),
    _scalar("end_id", "INT32"),
    _scalar("pad_id", "INT32"),
    _ragged("stop_words_list", "INT32", 2, -1),
    _ragged("bad_words_list", "INT32", 2, -1),
    _ragged("embedding_bias", "FP32"),
    _scalar("beam_width", "INT32"),
    _scalar("temperature", "FP32"),
    _scalar("runtime_top_k", "INT32"),
    _scalar("runtime_top_p", "FP32"),
    _scalar("runtime_top_p_min", "FP32"),
    _scalar("runtime_top_p_decay", "FP32"),
    _scalar("runtime_top_p_reset_ids", "INT32"),
    _scalar("len_penalty", "FP32"),
    _scalar("early_stopping", "BOOL"),
    _scalar("repetition_penalty", "FP32"),
    _scalar("min_tokens", "INT32"),
    _scalar("beam_search_diversity_rate", "FP32"),
    _scalar("presence_penalty", "FP32"),
    _scalar("frequency_penalty", "FP32"),
    _scalar("seed", "UINT64"),
    _scalar("return_log_probs", "BOOL"),
    _scalar("return_context_logits", "BOOL"),
    _scalar("return_generation_logits", "BOOL"),
    _scalar("return_perf_metrics", "BOOL"),
    _scalar("return_num_input_tokens", "BOOL"),
    _scalar("return_num_output_tokens", "BOOL"),
    _scalar("exclude_input_in_output", "BOOL"),
    _scalar("stop", "BOOL"),
    _scalar("streaming", "BOOL"),
    _ragged("prompt_embedding_table", "FP16", -1, -1),
    _ragged("prompt_table_extra_ids", "UINT64"),
    _scalar("prompt_vocab_size", "INT32"),
    _ragged("cross_attention_mask", "BOOL", -1, -1),
    BackendTensor("mrope_rotary_cos_sin", "FP32", (-1,)),
    BackendTensor("mrope_position_deltas", "INT64"),
    _scalar("lora_task_id", "UINT64"),
    _ragged("lora_weights", "FP16", -1, -1),
    _ragged("lora_config", "INT32", -1, 3),
    _ragged("context_phase_params", "UINT8"),
    _ragged("skip_cross_attn_blocks", "BOOL", 1),
    _ragged("retention_token_range_starts", "INT32"),
    _ragged("retention_token_range_ends", "INT32"),
    _ragged("retention_token_range_priorities", "INT32"),
    _ragged("retention_token_range_durations_ms", "INT32"),
    _ragged("retention_decode_priority", "INT32", 1),
    _ragged("retention_decode_duration_ms", "INT32", 1),
    _ragged("guided_decoding_guide_type", "STRING", 1),
    _ragged("guided_decoding_guide", "STRING", 1),
    _ragged("lookahead_window_size", "INT32", 1),
    _ragged("lookahead_ngram_size", "INT32", 1),
    _ragged("lookahead_verification_set_size", "INT32", 1),
)

OUTPUTS = (
    BackendTensor("output_ids", "INT32", (-1, -1)),
    BackendTensor("sequence_length", "INT32", (-1,)),
    BackendTensor("cum_log_probs", "FP32", (-1,)),
    BackendTensor("output_log_probs", "FP32", (-1, -1)),
    BackendTensor("context_logits", LOGITS, (-1, -1)),
    BackendTensor("generation_logits", LOGITS, (-1, -1, -1)),
    BackendTensor("batch_index", "INT32"),
    BackendTensor("sequence_index", "INT32"),
    BackendTensor("context_phase_params", "UINT8", (-1,)),
    BackendTensor("kv_cache_alloc_new_blocks", "INT32"),
    BackendTensor("kv_cache_reused_blocks", "INT32"),
    BackendTensor("kv_cache_alloc_total_blocks", "INT32"),
    BackendTensor("arrival_time_ns", "INT64"),
    BackendTensor("first_scheduled_time_ns", "INT64"),
    BackendTensor("first_token_time_ns", "INT64"),
    BackendTensor("last_token_time_ns", "INT64"),
    BackendTensor("acceptance_rate", "FP32"),
    BackendTensor("total_accepted_draft_tokens", "INT32"),
    BackendTensor("total_draft_tokens", "INT32"),
    BackendTensor("num_input_tokens", "INT32"),
    BackendTensor("num_output_tokens", "INT32"),
)
"""The outputs from 0.20 on, in the template's order."""

RENAMED = {"min_tokens": "min_length", "seed": "random_seed"}
"""Inputs that had another name up to 0.19."""

_SINCE_0_20 = frozenset(
    (
        "return_num_input_tokens",
        "return_num_output_tokens",
        "num_input_tokens",
        "num_output_tokens",
    )
)


def inputs(version: str) -> tuple[BackendTensor, ...]:
    """Returns the inputs of a release, in its template's order."""
    if _has_new_names(version):
        return _INPUTS
    return tuple(
        replace(tensor, name=RENAMED.get(tensor.name, tensor.name))
        for tensor in _INPUTS
        if tensor.name not in _SINCE_0_20
    )


def outputs(version: str) -> tuple[BackendTensor, ...]:
    """Returns the outputs of a release, in its template's order."""
    if _has_new_names(version):
        return OUTPUTS
    return tuple(tensor for tensor in OUTPUTS if tensor.name not in _SINCE_0_20)


def input_name(name: str, version: str) -> str:
    """Returns what a release calls the input that is called `name` from 0.20 on."""
    return name if _has_new_names(version) else RENAMED.get(name, name)


def _has_new_names(version: str) -> bool:
    return version_number(version) >= (0, 20)


def logits_type(logits_dtype: str) -> str:
    """Returns the Triton type, FP32 or FP16, of what an engine's `config.json` calls so.

    The backend compares it with the outputs of `config.pbtxt` whenever logits are asked for, and
    knows no third. It is not always float32: ModelOpt writes float16 into checkpoints of 16-bit
    models (modelopt/torch/export, 0.40).
    """
    if logits_dtype not in _LOGITS_TYPES:
        raise RepositoryError(
            f"the engine gives its logits in {logits_dtype}, which TensorRT-LLM's Triton backend "
            "does not know: build it with engine.tensorrt_llm.build.logits_dtype float32"
        )
    return _LOGITS_TYPES[logits_dtype]


ParameterUse = Literal["setting", "planned", "fixed", "unset", "absent"]
"""Who decides a parameter's value: the section `engine.tensorrt_llm.parameters`, specpipe from the
rest of the config, drafting as such, or nobody, since it belongs to something else; what is absent
is not even written, since an empty value would count as one."""

ParameterKind = Literal["bool", "int", "float", "ints", "text"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of `config.pbtxt`.

    kind         what the backend parses it as; ints are separated by commas
    default      what the backend takes when the value is empty; None: nothing
    placeholder  its name in NVIDIA's template; None: the template has a literal, or not the key
    choices      the values that there are
    value        what is written where `use` is "fixed"
    note         what to know of it
    """

    key: str
    kind: ParameterKind
    use: ParameterUse
    default: str | None = None
    placeholder: str | None = None
    choices: tuple[str, ...] = ()
    value: str = ""
    note: str = ""


def _setting(
    key: str, kind: ParameterKind, default: str | None, note: str, *, choices: tuple[str, ...] = ()
) -> Parameter:
    return Parameter(key, kind, "setting", default, key, choices, note=note)


def _planned(
    key: str, kind: ParameterKind, default: str | None, placeholder: str, note: str
) -> Parameter:
    return Parameter(key, kind, "planned", default, placeholder, note=note)


def _unset(key: str, kind: ParameterKind, note: str) -> Parameter:
    return Parameter(key, kind, "unset", None, key, note=note)


DECODING_MODE = "top_k_top_p"
"""The one that samples by the settings of each request; `top_k` ignores top_p, and so on."""

PARAMETERS = (
    _setting("max_beam_width", "int", "1", "drafting works with 1 only"),
    Parameter(
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "text",
        "fixed",
        value="no",
        note="a literal of the template",
    ),
    Parameter(
        "gpt_model_type",
        "text",
        "setting",
        None,
        "batching_strategy",
        ("inflight_fused_batching", "inflight_batching", "V1", "v1"),
        note="any other value is fatal, and from 1.0 on V1 is too",
    ),
    _planned(
        "gpt_model_path",
        "text",
        None,
        "engine_dir",
        "opened as it stands, so a relative path starts at the server's working directory; one "
        "that leads nowhere is logged as not specified, then both paths are said to be empty",
    ),
    Parameter(
        "encoder_model_path",
        "text",
        "unset",
        None,
        "encoder_engine_dir",
        note="encoder-decoder models",
    ),
    _planned(
        "max_tokens_in_paged_kv_cache",
        "int",
        None,
        "max_tokens_in_paged_kv_cache",
        "the smaller of this and the fraction wins; too few for one sequence shorten max_seq_len",
    ),
    _planned(
        "max_attention_window_size",
        "ints",
        None,
        "max_attention_window_size",
        "tokens, layer by layer; the list starts again where it is shorter than the layers",
    ),
    _unset("sink_token_length", "int", "StreamingLLM; 0 is refused at load"),
    _setting(
        "batch_scheduler_policy",
        "text",
        "guaranteed_no_evict",
        "whether a running request may be paused for others",
        choices=("guaranteed_no_evict", "max_utilization"),
    ),
    _planned(
        "kv_cache_free_gpu_mem_fraction",
        "float",
        "0.9",
        "kv_cache_free_gpu_mem_fraction",
        "of what is free when this engine loads; above 0 and below 1",
    ),
    _unset("cross_kv_cache_fraction", "float", "any value is fatal for a decoder-only model"),
    _setting("kv_cache_host_memory_bytes", "int", "0", "host memory that blocks move to"),
    _setting("kv_cache_onboard_blocks", "bool", "true", "false is fatal with paged context FMHA"),
    _setting("exclude_input_in_output", "bool", "false", "a request can say otherwise"),
    _setting("cancellation_check_period_ms", "int", "100", "how often cancellation is looked for"),
    _setting("stats_check_period_ms", "int", "100", "how often metrics are updated"),
    _setting("iter_stats_max_iterations", "int", None, "statistics that are kept"),
    _setting("request_stats_max_iterations", "int", None, "statistics that are kept"),
    _setting(
        "enable_kv_cache_reuse",
        "bool",
        "true",
        "false is fatal for an engine that verifies draft tokens",
    ),
    _setting("normalize_log_probs", "bool", "true", "log probabilities by sequence length"),
    _setting("enable_chunked_context", "bool", "false", "prompts longer than max_num_tokens"),
    _planned(
        "gpu_device_ids",
        "text",
        None,
        "gpu_device_ids",
        "as many as the engine has ranks; `;` between instances",
    ),
    _planned(
        "participant_ids",
        "text",
        None,
        "participant_ids",
        "MPI ranks; must be empty where the orchestrator spawns its workers",
    ),
    Parameter("num_nodes", "int", "fixed", "1", "num_nodes", value="1", note="one machine"),
    _unset("lora_cache_optimal_adapter_size", "int", "adapters"),
    _unset("lora_cache_max_adapter_size", "int", "adapters"),
    _unset("lora_cache_gpu_memory_fraction", "float", "adapters"),
    _unset("lora_cache_host_memory_bytes", "int", "adapters"),
    Parameter(
        "lora_prefetch_dir",
        "text",
        "absent",
        None,
        "lora_prefetch_dir",
        note="adapters; an empty one is taken for a folder",
    ),
    _setting(
        "decoding_mode",
        "text",
        "top_k_top_p",
        "drafting needs none of its own",
        choices=(
            "top_k",
            "top_p",
            DECODING_MODE,
            "beam_search",
            "medusa",
            "redrafter",
            "lookahead",
            "eagle",
        ),
    ),
    Parameter(
        "executor_worker_path",
        "text",
        "fixed",
        value="/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        note="what the orchestrator spawns; a literal of the template",
    ),
    _unset("lookahead_window_size", "int", "lookahead decoding"),
    _unset("lookahead_ngram_size", "int", "lookahead decoding"),
    _unset("lookahead_verification_set_size", "int", "lookahead decoding"),
    _unset("medusa_choices", "text", "Medusa"),
    _unset("eagle_choices", "text", "Eagle"),
    _setting("gpu_weights_percent", "float", "1.0", "below 1 needs an engine that streams weights"),
    _setting("enable_context_fmha_fp32_acc", "bool", "false", "sums of attention over prompts"),
    _setting("multi_block_mode", "bool", "true", "attention of long contexts over several blocks"),
    _setting("cuda_graph_mode", "bool", "false", "decode steps as CUDA graphs"),
    _setting("cuda_graph_cache_size", "int", "0", "CUDA graphs that are kept"),
    _setting(
        "speculative_decoding_fast_logits",
        "bool",
        "false",
        "logits straight from the draft's process; only without the orchestrator's spawning",
    ),
    _unset("tokenizer_dir", "text", "read without a guard, so the key must exist; then ignored"),
    _unset("guided_decoding_backend", "text", "read without a guard, so the key must exist"),
    _unset("xgrammar_tokenizer_info_path", "text", "read without a guard, so the key must exist"),
    Parameter(
        "recv_poll_period_ms",
        "int",
        "setting",
        "0",
        note="not in the template; the orchestrator's sleep between looks, 0: none",
    ),
)
"""The template's parameters in its order, then those that the backend reads beside them."""

REQUIRED_KEYS = ("tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path")
"""The backend reads these without a guard: it does not load where one is missing."""

BOOLEANS = {
    **dict.fromkeys(("True", "true", "TRUE", "1"), True),
    **dict.fromkeys(("False", "false", "FALSE", "0"), False),
}
"""How the backend spells truth; another spelling counts as no value."""
