"""The flags of `trtllm-serve`, and the keys of its YAML (--config, --extra_llm_api_options).

Source: TensorRT-LLM, tensorrt_llm/commands/serve.py@00209af1 (1.2 era) and @4c05a748 (1.1 era). The
keys are the arguments of LLM: tensorrt_llm/llmapi/llm_args.py (id 55143598664, 1.3 era:
TorchLlmArgs, KvCacheConfig, DraftTargetDecodingConfig), tests/unittest/api_stability/references/
llm.yaml@000a01de (1.1 era) and docs/source/features/speculative-decoding.md@04c8822c;
PARDDecodingConfig: llm-api/reference/PARDDecodingConfig.html of 1.4.0rc4. Of the command line of
1.3 only these flags more are known, from its callers (ids 60577437702 and 53107869947):
--hf_revision, --served_model_name, --kv_cache_dtype, --video_pruning_rate and --no-telemetry.
"""

from __future__ import annotations

from specpipe.build.migrate import reasons
from specpipe.build.migrate.flags import METHOD, Flag, Left, Refused, Same, left_out
from specpipe.build.migrate.server import Server

_TENSORRT_LLM = "engine.tensorrt_llm."
_FRACTION = _TENSORRT_LLM + "kv_cache_free_gpu_mem_fraction"

_BACKENDS = {
    "pytorch": "pytorch",
    "tensorrt": "tensorrt",
    "trt": "tensorrt",
    "_autodeploy": Refused(
        "specpipe serves by TensorRT-LLM's backends pytorch and tensorrt; take --backend away for "
        "pytorch"
    ),
}

_METHODS = {
    "DraftTarget": "draft_model",
    "Draft_Target": "draft_model",
    "NGram": "ngram",
    "PARD": "draft_model",
}

_SPECULATION = (
    Flag(("decoding_type",), "text", METHOD, values=_METHODS, others=reasons.NO_MODEL),
    Flag(("speculative_model", "speculative_model_dir"), "text", "draft.checkpoint"),
    Flag(("max_draft_len",), "whole", "speculation.num_draft_tokens"),
    *left_out(reasons.PARALLEL, values="mask_token_id", prefix=""),
    Flag(("enable_penalty",), "switch", _TENSORRT_LLM + "enable_penalty"),
    *left_out(
        "TensorRT-LLM heeds it for EAGLE-3 heads only; draft tokens are accepted where the target "
        "samples them",
        values="use_rejection_sampling",
        prefix="",
    ),
    *left_out(
        "what its keys mean changed between TensorRT-LLM 1.2 and 1.3: set speculation.schedule",
        values="draft_len_schedule",
        prefix="",
    ),
    *left_out(
        "set speculation.schedule, with num_draft_tokens 0 from that batch size on",
        values="max_concurrency",
        prefix="",
    ),
    *left_out(
        "specpipe never gives drafting up for good",
        values="acceptance_window acceptance_length_threshold acceptance_rate_window_size "
        "acceptance_rate_threshold",
        prefix="",
    ),
    *left_out(
        reasons.LOOKUP,
        values="max_matching_ngram_size is_keep_all is_use_oldest is_public_pool",
        prefix="",
    ),
    *left_out(
        "it belongs to a way of drafting that specpipe does not have",
        values="max_total_draft_tokens use_sa_spec sa_spec_threshold spec_dec_variant",
        prefix="",
    ),
    *left_out(reasons.EXPERTS, values="moe_backend moe_tactic", prefix=""),
    *left_out(
        reasons.SAMPLING,
        values="allow_advanced_sampling advanced_sampling_mode",
        prefix="",
    ),
    *left_out(reasons.LOADING, values="load_format", prefix=""),
)

_KV_CACHE = (
    Flag(("free_gpu_memory_fraction",), "number", _FRACTION),
    Flag(
        ("dtype",),
        "text",
        values={"auto": Same("the KV cache is what the checkpoint says")},
        others=Left(reasons.FP8_CACHE),
    ),
    Flag(("enable_block_reuse",), "switch", _TENSORRT_LLM + "enable_block_reuse"),
    *left_out(
        reasons.CACHE,
        values="max_tokens max_attention_window sink_token_length cross_kv_cache_fraction "
        "secondary_offload_min_priority event_buffer_max_size "
        "attention_dp_events_gather_period_ms enable_partial_reuse copy_on_partial_reuse "
        "max_gpu_total_bytes iteration_stats_interval tokens_per_block use_kv_cache_manager_v2 "
        "max_util_for_resume enable_swa_scratch_reuse kv_cache_event_hash_algo "
        "enable_kv_pool_rebalance disk_prefetch_num_reqs pool_ratio avg_seq_len "
        "block_reuse_policy",
        prefix="",
    ),
    *left_out(
        reasons.OFFLOADING,
        values="host_cache_size disk_cache_size disk_cache_path use_uvm",
        prefix="",
    ),
    *left_out(
        reasons.STATE_SPACE,
        values="mamba_ssm_cache_dtype mamba_ssm_stochastic_rounding mamba_ssm_philox_rounds "
        "mamba_state_cache_interval",
        prefix="",
    ),
)

_CARRIED_KEYS = (
    Flag(("model",), "text", "target.checkpoint"),
    Flag(("revision",), "text", "target.revision"),
    Flag(("backend",), "text", _TENSORRT_LLM + "backend", values=_BACKENDS, closed=True),
    Flag(("tensor_parallel_size",), "whole", "target.tp_size"),
    Flag(("pipeline_parallel_size",), "whole", "target.pp_size"),
    Flag(("max_batch_size",), "whole", "engine.max_batch_size"),
    Flag(("max_num_tokens",), "whole", "engine.max_num_tokens"),
    Flag(("max_seq_len",), "whole", "engine.max_seq_len"),
    Flag(("dtype",), "text", "engine.dtype"),
    Flag(("kv_cache_config",), "mapping", keys=_KV_CACHE),
    Flag(("speculative_config",), "mapping", keys=_SPECULATION),
    Flag(
        ("enable_chunked_prefill",),
        "switch",
        note="prompts come in chunks where engine.max_num_tokens is below engine.max_seq_len",
    ),
    Flag(
        ("disable_overlap_scheduler",),
        "switch",
        note="specpipe writes what the release needs with a draft",
    ),
    Flag(
        ("max_beam_width",),
        "whole",
        values={1: Same("a request has one beam")},
        others=Left("drafting works with one beam only"),
    ),
)

_LEFT_KEYS = (
    *left_out(
        "set engine.max_seq_len, which prompt and answer share", values="max_input_len", prefix=""
    ),
    *left_out(
        reasons.QUANTIZED,
        values="quant_config force_dynamic_quantization kv_cache_dtype",
        prefix="",
    ),
    *left_out(
        reasons.TOKENIZER,
        values="tokenizer tokenizer_mode tokenizer_revision custom_tokenizer skip_tokenizer_init "
        "postprocess_tokenizer_dir num_postprocess_workers post_processor_hook",
        prefix="",
    ),
    *left_out(reasons.REMOTE_CODE, values="trust_remote_code", prefix=""),
    *left_out(reasons.MODEL_FILES, values="model_kwargs", prefix=""),
    *left_out(
        reasons.LOADING,
        values="load_format checkpoint_loader checkpoint_format mx_config gms_config",
        prefix="",
    ),
    *left_out(
        reasons.KERNELS,
        values="cuda_graph_config attn_backend torch_compile_config enable_autotuner "
        "allreduce_strategy nvfp4_gemm_config use_cute_dsl_blockscaling_mm "
        "use_cute_dsl_blockscaling_bmm use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm "
        "disable_flashinfer_sampling enable_min_latency sparse_attention_config "
        "extended_runtime_perf_knob_config enable_low_latency_host_dispatch "
        "sampler_type sampler_force_async_worker enable_trtllm_sampler enable_mixed_sampler "
        "enable_speculative_beam_history_d2h use_cuda_graph cuda_graph_padding_enabled "
        "cuda_graph_batch_sizes cuda_graph_max_batch_size",
        prefix="",
    ),
    *left_out(
        reasons.SCHEDULING,
        values="scheduler_config batching_type stream_interval batch_wait_timeout_ms "
        "batch_wait_timeout_iters batch_wait_max_tokens_ratio reorder_policy_config "
        "enable_early_first_token_response enable_resource_governor",
        prefix="",
    ),
    *left_out(reasons.CACHE, values="kv_cache_compression_config kv_connector_config", prefix=""),
    *left_out(
        reasons.REPLICAS,
        values="enable_attention_dp attention_dp_config enable_lm_head_tp_in_adp",
        prefix="",
    ),
    *left_out(
        reasons.NODES,
        values="context_parallel_size cp_config gpus_per_node pp_partition orchestrator_type "
        "ray_worker_extension_cls ray_placement_config ray_worker_nsight_options mpi_session "
        "env_overrides",
        prefix="",
    ),
    *left_out(
        reasons.PHASES, values="cache_transceiver_config disagg_cluster dwdp_config", prefix=""
    ),
    *left_out(
        reasons.EXPERTS,
        values="moe_config moe_cluster_parallel_size moe_tensor_parallel_size "
        "moe_expert_parallel_size moe_backend",
        prefix="",
    ),
    *left_out(
        reasons.ADAPTERS,
        values="enable_lora lora_config peft_cache_config enable_prompt_adapter "
        "max_prompt_adapter_token",
        prefix="",
    ),
    *left_out(
        reasons.TEXT_ONLY,
        values="multimodal_config encoder_max_batch_size encoder_max_num_tokens mm_encoder_only",
        prefix="",
    ),
    *left_out(
        reasons.GENERATION_ONLY,
        values="encode_only gather_generation_logits normalize_log_probs",
        prefix="",
    ),
    *left_out(
        reasons.GRAMMARS, values="guided_decoding_backend batched_logits_processor", prefix=""
    ),
    *left_out(reasons.FRONT_END, values="reasoning_parser", prefix=""),
    *left_out(
        reasons.LOGS,
        values="iter_stats_max_iterations request_stats_max_iterations enable_iter_perf_stats "
        "enable_iter_req_stats print_iter_log return_perf_metrics perf_metrics_max_requests "
        "prometheus_metrics_config enable_energy_metrics max_stats_len telemetry_config "
        "garbage_collection_gen0_threshold fail_fast_on_attention_window_too_large",
        prefix="",
    ),
    *left_out(
        reasons.TRACES,
        values="otlp_traces_endpoint enable_layerwise_nvtx_marker layer_wise_benchmarks_config",
        prefix="",
    ),
    *left_out(
        "a server that is not needed is stopped, and starts from what was built",
        values="sleep_config",
        prefix="",
    ),
    *left_out(
        "specpipe builds engines by engine.tensorrt_llm with backend tensorrt",
        values="build_config enable_build_cache fast_build workspace enable_tqdm "
        "embedding_parallel_mode calib_config",
        prefix="",
    ),
)

OPTIONS = _CARRIED_KEYS + _LEFT_KEYS
"""The keys of the YAML."""

_FLAGS = (
    Flag(("--revision", "--hf_revision"), "text", "target.revision"),
    Flag(("--backend",), "text", _TENSORRT_LLM + "backend", values=_BACKENDS, closed=True),
    Flag(("--tensor_parallel_size", "--tp_size"), "whole", "target.tp_size"),
    Flag(("--pipeline_parallel_size", "--pp_size"), "whole", "target.pp_size"),
    Flag(("--max_batch_size",), "whole", "engine.max_batch_size"),
    Flag(("--max_num_tokens",), "whole", "engine.max_num_tokens"),
    Flag(("--max_seq_len",), "whole", "engine.max_seq_len"),
    Flag(
        ("--free_gpu_memory_fraction", "--kv_cache_free_gpu_memory_fraction"), "number", _FRACTION
    ),
    Flag(
        ("--served_model_name",),
        "text",
        "name",
        "which names the folder of the artifacts; the model in Triton is `ensemble`",
    ),
    Flag(
        ("--max_beam_width",),
        "whole",
        values={1: Same("a request has one beam")},
        others=Left("drafting works with one beam only"),
    ),
    Flag(
        ("--enable_chunked_prefill",),
        "switch",
        note="prompts come in chunks where engine.max_num_tokens is below engine.max_seq_len",
    ),
    Flag(("--config", "--extra_llm_api_options")),
    *left_out(reasons.LISTEN, values="host port"),
    *left_out(
        reasons.TOKENIZER,
        values="tokenizer custom_tokenizer num_postprocess_workers chat_template",
    ),
    *left_out(reasons.REMOTE_CODE, values="custom_module_dirs", switches="trust_remote_code"),
    *left_out(reasons.NODES, values="context_parallel_size/--cp_size gpus_per_node"),
    *left_out(
        reasons.EXPERTS,
        values="moe_expert_parallel_size/--ep_size moe_cluster_parallel_size/--cluster_size",
    ),
    *left_out(
        reasons.PHASES,
        values="metadata_server_config_file server_role disagg_cluster_uri",
    ),
    Flag(
        ("--kv_cache_dtype",),
        "text",
        values={"auto": Same("the KV cache is what the checkpoint says")},
        others=Left(reasons.FP8_CACHE),
    ),
    *left_out(reasons.TEXT_ONLY, values="media_io_kwargs video_pruning_rate"),
    *left_out(reasons.FRONT_END, values="reasoning_parser tool_parser", switches="grpc"),
    *left_out(reasons.LOGS, values="log_level", switches="fail_fast_on_attention_window_too_large"),
    *left_out(reasons.TRACES, values="otlp_traces_endpoint"),
    *left_out("specpipe reports nothing to anybody", switches="telemetry no-telemetry"),
)

TRTLLM_SERVE = Server(
    "trtllm-serve",
    "of TensorRT-LLM 1.2",
    "tensorrt_llm",
    _FLAGS,
    "decoding_type",
    file_keys=OPTIONS,
    file_wins=True,
    has_prefixes=False,
)
"""`trtllm-serve`, with or without its command `serve`."""
