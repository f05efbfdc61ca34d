"""The section `engine.tensorrt_llm.parameters`: what the Triton models of both engines are given.

The names are those of TensorRT-LLM's `config.pbtxt`; contract.py has all of them with their
sources. Values with which a draft and a target do not work are refused here, where the YAML is
read, with the reason; a server would start with some of them, and answer wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from specpipe.config import messages
from specpipe.section import Section

SECTION = "engine.tensorrt_llm.parameters"

FIXED_PARAMETERS = {
    "gpt_model_path": "the engine lies in the repository",
    "encoder_model_path": "there is no encoder",
    "max_attention_window_size": "the checkpoint's sliding windows decide it",
    "sink_token_length": "StreamingLLM is not supported by TensorRT-LLM 1.x",
    "kv_cache_free_gpu_mem_fraction": "set engine.tensorrt_llm.kv_cache_free_gpu_mem_fraction",
    "cross_kv_cache_fraction": "there is no encoder",
    "gpu_device_ids": "set engine.tensorrt_llm.draft_gpu_ids and target_gpu_ids",
    "participant_ids": "`specpipe serve` decides how the engines' processes start",
    "num_nodes": "one machine is served from",
    "executor_worker_path": "it is part of the image",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "the backend needs its template's value",
    "lora_cache_optimal_adapter_size": "adapters are not served",
    "lora_cache_max_adapter_size": "adapters are not served",
    "lora_cache_gpu_memory_fraction": "adapters are not served",
    "lora_cache_host_memory_bytes": "adapters are not served",
    "lora_prefetch_dir": "adapters are not served",
    "lookahead_window_size": "a draft model speculates here, not lookahead decoding",
    "lookahead_ngram_size": "a draft model speculates here, not lookahead decoding",
    "lookahead_verification_set_size": "a draft model speculates here, not lookahead decoding",
    "medusa_choices": "a draft model speculates here, not Medusa",
    "eagle_choices": "a draft model speculates here, not Eagle",
    "tokenizer_dir": "preprocessing has the tokenizer",
    "guided_decoding_backend": "guided decoding is not served",
    "xgrammar_tokenizer_info_path": "guided decoding is not served",
    "logits_datatype": "the engine decides it; set engine.tensorrt_llm.build.logits_dtype",
    "decoupled": "the pair decides which of its models stream",
}
"""Keys of a `config.pbtxt` that a pair decides, with the reason or what to set instead."""


class TritonParameters(Section):
    """Parameters of the Triton models of both engines, by TensorRT-LLM's names."""

    max_tokens_in_paged_kv_cache: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Tokens that each KV cache holds; none: what engine.max_batch_size requests need."""

    kv_cache_host_memory_bytes: int = Field(default=0, ge=0)
    """Bytes of host memory for blocks of the KV cache that leave the GPU, for each engine."""

    kv_cache_onboard_blocks: bool = True
    """Whether blocks that left the GPU return to it before they are read; engines here need it."""

    enable_kv_cache_reuse: bool = True
    """Whether a request finds the KV cache of a text that begins alike; each step of a pair needs
    it."""

    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = (
        "guaranteed_no_evict"
    )
    """Whether a running request keeps its place, or may be paused to fit in more."""

    gpt_model_type: Literal["inflight_fused_batching", "inflight_batching", "V1", "v1"] = (
        "inflight_fused_batching"
    )
    """How requests share a batch; V1 is static batching, which TensorRT-LLM 1.x refuses."""

    enable_chunked_context: bool = True
    """Whether prompts longer than engine.max_num_tokens are prefilled in chunks; left out with
    acceptance logits: no, where engine.max_num_tokens holds the longest text."""

    max_queue_delay_microseconds: int = Field(default=0, ge=0)
    """Microseconds that Triton waits for more requests to hand over together."""

    max_queue_size: int = Field(default=0, ge=0)
    """Requests that may wait for an engine; 0: any number, since the pair limits its own."""

    max_beam_width: int = Field(default=1, ge=1)
    """Beams of a request, at most; drafting works with one."""

    decoding_mode: Literal[
        "top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle"
    ] = "top_k_top_p"
    """How tokens are sampled: by top_k and top_p of each request."""

    exclude_input_in_output: bool = False
    """Whether answers leave out the prompt, where a request does not say."""

    normalize_log_probs: bool = True
    """Whether log probabilities are divided by the length."""

    cancellation_check_period_ms: int = Field(default=100, ge=1)
    """Milliseconds after which the backend looks for cancelled requests again."""

    stats_check_period_ms: int = Field(default=100, ge=1)
    """Milliseconds after which the backend updates its metrics again."""

    iter_stats_max_iterations: int | None = Field(default=None, ge=0)
    """Iterations whose statistics are kept; none: TensorRT-LLM's default."""

    request_stats_max_iterations: int | None = Field(default=None, ge=0)
    """Iterations whose request statistics are kept; none: TensorRT-LLM's default."""

    gpu_weights_percent: float = Field(default=1.0, ge=0, le=1, allow_inf_nan=False)
    """The part of the weights that stays on the GPU; below 1 needs build.weight_streaming."""

    enable_context_fmha_fp32_acc: bool = False
    """Whether attention over prompts is summed in float32."""

    multi_block_mode: bool = True
    """Whether the attention of one long context is spread over the GPU."""

    cuda_graph_mode: bool = False
    """Whether decode steps run as CUDA graphs."""

    cuda_graph_cache_size: int = Field(default=0, ge=0)
    """CUDA graphs that are kept, at most."""

    recv_poll_period_ms: int = Field(default=0, ge=0)
    """Milliseconds that the orchestrator sleeps before it looks for requests again; 0: it does not
    sleep."""

    speculative_decoding_fast_logits: bool = False
    """Whether draft logits go from process to process; a pair needs it off."""

    @model_validator(mode="before")
    @classmethod
    def _explain_fixed(cls, data: Any) -> Any:
        for name in FIXED_PARAMETERS if isinstance(data, Mapping) else ():
            if name in data:
                reason = FIXED_PARAMETERS[name]
                expected = f"nothing here, since specpipe sets it: {reason}"
                raise messages.broken_rule(f"{SECTION}.{name}", data[name], expected)
        return data

    @model_validator(mode="after")
    def _check_can_draft(self) -> TritonParameters:
        for name, accepted, expected in _NEEDED:
            if getattr(self, name) not in accepted:
                value = getattr(self, name)
                raise messages.broken_rule(f"{SECTION}.{name}", value, expected)
        return self


_NEEDED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("max_beam_width", (1,), "1, since draft tokens are verified for one beam only"),
    (
        "exclude_input_in_output",
        (False,),
        "false, since the pair asks for what it needs with every request",
    ),
    (
        "enable_kv_cache_reuse",
        (True,),
        "true, since an engine that verifies draft tokens does not load without it, and a draft "
        "would read the whole text again in each step",
    ),
    (
        "kv_cache_onboard_blocks",
        (True,),
        "true, since an engine with paged context FMHA does not load without it",
    ),
    (
        "gpt_model_type",
        ("inflight_fused_batching", "inflight_batching"),
        "'inflight_fused_batching', since TensorRT-LLM 1.x refuses static batching",
    ),
    (
        "decoding_mode",
        ("top_k_top_p",),
        "'top_k_top_p', since any other ignores sampling settings of requests or needs another "
        "way to speculate",
    ),
    (
        "speculative_decoding_fast_logits",
        (False,),
        "false, since it works only where the orchestrator spawns no processes, which specpipe's "
        "does",
    ),
)
"""Setting, the values that a pair works with, and what to expect instead of another."""
