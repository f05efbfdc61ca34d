"""The flags of `vllm serve`.

Source: vLLM 0.33.0 (its wheel), vllm/engine/arg_utils.py (AsyncEngineArgs.add_cli_args),
vllm/entrypoints/common/cli_args.py (FrontendArgs, make_arg_parser) and vllm/config/speculative.py
(SpeculativeConfig); flags of older releases from arg_utils.py@001999d2 and @99d7eb5d. The parser:
vllm/utils/argparse_utils.py (FlexibleArgumentParser).
"""

from __future__ import annotations

from specpipe.build.migrate import reasons
from specpipe.build.migrate.flags import DTYPES, METHOD, Flag, Left, Put, Same, left_out
from specpipe.build.migrate.server import Server

_METHODS = {
    "draft_model": "draft_model",
    "ngram": "ngram",
    "[ngram]": "ngram",
    "ngram_gpu": "ngram",
}

_NGRAM = Put(METHOD, "ngram")
_DRAFT_NAMES = {"ngram": _NGRAM, "[ngram]": _NGRAM}  # where a draft model stands

_SPECULATION = (
    Flag(("method",), "text", METHOD, values=_METHODS, others=reasons.NO_MODEL),
    Flag(("model",), "text", "draft.checkpoint", values=_DRAFT_NAMES),
    Flag(("revision",), "text", "draft.revision"),
    Flag(("num_speculative_tokens",), "whole", "speculation.num_draft_tokens"),
    Flag(("draft_tensor_parallel_size",), "whole", "draft.tp_size"),
    Flag(("num_speculative_tokens_per_batch_size",), "ranges", "speculation.schedule"),
    Flag(
        ("rejection_sample_method", "acceptance_method"),
        note=reasons.LOSSLESS,
        values={"standard": Same(), "rejection_sampler": Same()},
    ),
    Flag(
        ("parallel_drafting",),
        "switch",
        values={True: Same(reasons.PARALLEL), False: Left(reasons.PARALLEL)},
    ),
    *left_out(
        "the draft samples as the request says, or greedily",
        values="draft_sample_method",
        prefix="",
    ),
    *left_out(reasons.LOOKUP, values="prompt_lookup_max prompt_lookup_min", prefix=""),
    *left_out(
        "set speculation.schedule, with num_draft_tokens 0 from that batch size on",
        values="disable_by_batch_size",
        prefix="",
    ),
    *left_out(reasons.DRAFT_CONTEXT, values="max_model_len", prefix=""),
    *left_out(
        reasons.OWN_DRAFT,
        values="quantization kv_cache_dtype draft_lm_head_quantization",
        prefix="",
    ),
    *left_out(
        reasons.LOSSLESS,
        values="synthetic_acceptance_rates synthetic_acceptance_length posterior_threshold "
        "posterior_alpha",
        prefix="",
    ),
    *left_out(
        reasons.KERNELS,
        values="enforce_eager moe_backend attention_backend disable_padded_drafter_batch "
        "use_local_argmax_reduction disable_mqa_scorer",
        prefix="",
    ),
    *left_out(
        "it belongs to a way of drafting that specpipe does not have",
        values="index_share_for_mtp_iteration disable_eagle_block_drop "
        "disable_lookahead_block_hashes suffix_decoding_max_tree_depth "
        "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
        "suffix_decoding_min_token_prob enable_adaptive_verification",
        prefix="",
    ),
    *left_out(
        "a pair has one tokenizer; a draft may only know more tokens than the target",
        values="use_heterogeneous_vocab",
        prefix="",
    ),
    *left_out(reasons.LOADING, values="draft_load_config", prefix=""),
    *left_out(reasons.REMOTE_CODE, values="code_revision", prefix=""),
    *left_out("draft_tensor_parallel_size counts", values="tensor_parallel_size", prefix=""),
)

_CARRIED = (
    Flag(("--model",), "text", "target.checkpoint"),
    Flag(("--revision",), "text", "target.revision"),
    Flag(
        ("--served-model-name",),
        "several",
        "name",
        "which names the folder of the artifacts; the model in Triton is `ensemble`",
    ),
    Flag(("--dtype",), "text", "engine.dtype", values=DTYPES, closed=True),
    Flag(("--device",), "text", "engine.device"),
    Flag(
        ("--max-model-len",),
        "vllm size",
        "engine.max_seq_len",
        values={
            "auto": Left("the largest that fits is not searched for: set engine.max_seq_len"),
            -1: Left("the largest that fits is not searched for: set engine.max_seq_len"),
        },
    ),
    Flag(("--max-num-seqs",), "whole", "engine.max_batch_size"),
    Flag(("--max-num-batched-tokens",), "vllm size", "engine.max_num_tokens"),
    Flag(("--max-num-queued-reqs",), "whole", "serving.max_queue_size"),
    Flag(("--tensor-parallel-size", "-tp"), "whole", "target.tp_size"),
    Flag(("--pipeline-parallel-size", "-pp"), "whole", "target.pp_size"),
    Flag(
        ("--kv-cache-dtype",),
        values={"auto": Same("the KV cache has the model's dtype")},
        others=Left(reasons.FP8_CACHE),
    ),
    Flag(("--speculative-config", "-sc"), "mapping", keys=_SPECULATION),
    Flag(("--spec-method",), "text", METHOD, values=_METHODS, others=reasons.NO_MODEL),
    Flag(("--spec-model", "--speculative-model"), "text", "draft.checkpoint", values=_DRAFT_NAMES),
    Flag(("--spec-tokens", "--num-speculative-tokens"), "whole", "speculation.num_draft_tokens"),
    Flag(("--speculative-draft-tensor-parallel-size", "-spec-draft-tp"), "whole", "draft.tp_size"),
    Flag(
        ("--enable-chunked-prefill",),
        "switch",
        values={True: Same("prompts always come in chunks"), False: Left("prompts always do")},
    ),
    Flag(("--config",)),
)

_LEFT = (
    *left_out(
        reasons.MEMORY,
        values="gpu-memory-utilization/--device-memory-utilization kv-cache-memory-bytes "
        "num-gpu-blocks-override watermark",
    ),
    *left_out(
        reasons.QUANTIZED,
        values="quantization/-q quantization-config",
        switches="allow-deprecated-quantization",
    ),
    *left_out(reasons.SEED, values="seed"),
    *left_out(reasons.LISTEN, values="host port"),
    *left_out(reasons.SECRETS, several="api-key"),
    *left_out(
        reasons.TLS,
        values="ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs ssl-ciphers",
        switches="enable-ssl-refresh",
    ),
    Flag(
        ("--hf-token",),
        "optional",
        note="set HF_TOKEN for `specpipe build`; a repository in Triton needs no hub",
    ),
    *left_out(reasons.REMOTE_CODE, values="code-revision", switches="trust-remote-code"),
    *left_out(
        reasons.TOKENIZER,
        values="tokenizer tokenizer-mode tokenizer-revision tokenizer-pool-size "
        "tokenizer-pool-type tokenizer-pool-extra-config chat-template "
        "chat-template-content-format default-chat-template-kwargs response-role "
        "reasoning-effort-map cohere-format",
        switches="skip-tokenizer-init trust-request-chat-template cohere-is-reasoning-model",
    ),
    *left_out(
        reasons.MODEL_FILES,
        values="hf-config-path config-format hf-overrides rope-scaling rope-theta "
        "model-class-overrides model-impl",
        switches="disable-sliding-window",
    ),
    *left_out(
        reasons.LOADING,
        values="load-format download-dir safetensors-load-strategy "
        "safetensors-prefetch-num-threads safetensors-prefetch-block-size "
        "model-loader-extra-config pt-load-map-location max-parallel-loading-workers "
        "weight-transfer-config",
        switches="use-tqdm-on-load",
        several="ignore-patterns",
    ),
    *left_out(
        reasons.KERNELS,
        values="attention-backend attention-config/-ac linear-backend compilation-config/-cc/-O "
        "optimization-level performance-mode kernel-config max-cudagraph-capture-size "
        "max-seq-len-to-capture override-attention-dtype ir-op-priority gdn-prefill-backend "
        "kda-prefill-backend kda-decode-backend sparse-indexer-topk-backend",
        switches="enforce-eager disable-cascade-attn disable-custom-all-reduce "
        "enable-flashinfer-autotune monokernel enable-cumem-allocator enable-nccl-comm-suspend "
        "enable-shm-tensor-arena enable-hc-sp use-fp64-gumbel enable-batch-sharded-sampling",
        several="cudagraph-capture-sizes",
    ),
    *left_out(
        reasons.SCHEDULING,
        values="max-num-scheduled-tokens max-num-active-seqs max-num-queued-tokens "
        "long-prefill-token-threshold scheduling-policy scheduler-cls "
        "prefill-schedule-interval num-scheduler-steps scheduler-delay-factor preemption-mode "
        "max-num-partial-prefills max-long-partial-prefills num-lookahead-slots stream-interval",
        switches="async-scheduling long-prefill-token-threshold-adaptive "
        "scheduler-reserve-full-isl disable-chunked-mm-input enable-dbo "
        "multi-step-stream-outputs",
    ),
    *left_out(reasons.PREFIXES, switches="enable-prefix-caching"),
    *left_out(
        reasons.CACHE,
        values="block-size prefix-caching-hash-algo prefix-cache-retention-interval "
        "prefix-match-unit kv-events-config engram-config",
        switches="kv-sharing-fast-prefill calculate-kv-scales "
        "swa-bounded-replay disable-hybrid-kv-cache-manager",
        several="kv-cache-dtype-skip-layers",
    ),
    *left_out(
        reasons.OFFLOADING,
        values="swap-space cpu-offload-gb kv-offloading-size kv-offloading-backend "
        "offload-backend offload-group-size offload-num-in-group offload-prefetch-step",
        several="cpu-offload-params offload-params",
    ),
    *left_out(
        reasons.REPLICAS,
        values="data-parallel-size/-dp data-parallel-rank/-dpn data-parallel-start-rank/-dpr "
        "data-parallel-size-local/-dpl data-parallel-address/-dpa data-parallel-rpc-port/-dpp "
        "data-parallel-backend/-dpb data-parallel-supervisor-port dp-sync-interval "
        "dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s "
        "dp-supervisor-probe-failure-threshold api-server-count/-asc",
        switches="data-parallel-hybrid-lb/-dph data-parallel-external-lb/-dpe "
        "data-parallel-multi-port-external-lb/-dpm headless "
        "disable-nccl-for-dp-synchronization",
    ),
    *left_out(
        reasons.NODES,
        values="nnodes/-n node-rank/-r master-addr master-port distributed-executor-backend "
        "distributed-timeout-seconds cpu-distributed-timeout-seconds device-ids worker-cls "
        "worker-extension-cls fault-tolerance-config decode-context-parallel-size/-dcp "
        "dcp-comm-backend dcp-kv-cache-interleave-size cp-kv-cache-interleave-size "
        "prefill-context-parallel-size/-pcp",
        switches="ray-workers-use-nsight worker-use-ray numa-bind dcp-q-replicate "
        "enable-fault-tolerance",
        several="numa-bind-nodes numa-bind-cpus",
    ),
    *left_out(
        reasons.PHASES,
        values="kv-transfer-config ec-transfer-config ec-manager-config",
        switches="tokens-only enable-scale-out",
    ),
    *left_out(
        reasons.EXPERTS,
        values="moe-backend all2all-backend eplb-config expert-placement-strategy ubatch-size "
        "elastic-ep-max-dp-size dbo-decode-token-threshold dbo-prefill-token-threshold "
        "num-redundant-experts eplb-window-size eplb-step-interval",
        switches="enable-expert-parallel/-ep enable-ep-weight-filter enable-eplb "
        "enable-elastic-ep eplb-log-balancedness enable-return-routed-experts",
    ),
    *left_out(
        reasons.ADAPTERS,
        values="max-loras max-lora-rank lora-dtype max-cpu-loras default-mm-loras "
        "max-lora-cls-labels lora-extra-vocab-size long-lora-scaling-factors "
        "max-prompt-adapters max-prompt-adapter-token",
        switches="enable-lora enable-lora-bias fully-sharded-loras enable-tower-connector-lora "
        "specialize-active-lora enable-mixed-moe-lora-format enable-moe-shared-loras "
        "enable-prompt-adapter",
        several="lora-modules lora-target-modules prompt-adapters",
    ),
    *left_out(
        reasons.TEXT_ONLY,
        values="allowed-local-media-path limit-mm-per-prompt media-io-kwargs mm-processor-kwargs "
        "mm-processor-cache-gb mm-processor-cache-type mm-hasher-algorithm "
        "mm-shm-cache-max-object-size-mb mm-encoder-tp-mode mm-encoder-attn-backend "
        "mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path "
        "mm-encoder-fp8-scale-save-margin video-pruning-rate video-pruning-method mm-tensor-ipc "
        "mm-processor-device mm-ipc-gpu-memory-gb io-processor-plugin renderer-num-workers",
        switches="language-model-only enable-mm-embeds mm-encoder-only interleave-mm-strings "
        "skip-mm-profiling mm-device-do-normalize disable-mm-preprocessor-cache "
        "enable-multimodal-encoder-data-parallel trust-request-mm-kwargs",
        several="allowed-media-domains",
    ),
    *left_out(
        reasons.GENERATION_ONLY,
        values="runner convert task pooler-config override-pooler-config diffusion-config/-dc",
        switches="enable-prompt-embeds enable-flash-late-interaction",
    ),
    *left_out(
        reasons.STATE_SPACE,
        values="mamba-backend mamba-ssu-algorithm mamba-cache-philox-rounds mamba-cache-dtype "
        "mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode replayssm-buffer-len",
        switches="enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint "
        "use-replayssm",
    ),
    *left_out(
        reasons.GRAMMARS,
        values="structured-outputs-config guided-decoding-backend logits-processor-pattern",
        switches="guided-decoding-disable-fallback guided-decoding-disable-any-whitespace "
        "guided-decoding-disable-additional-properties",
        several="logits-processors",
    ),
    *left_out(
        reasons.SAMPLING,
        values="generation-config override-generation-config max-logprobs logprobs-mode "
        "watermark-config",
        switches="return-sampling-mask",
    ),
    *left_out(
        reasons.FRONT_END,
        values="reasoning-parser reasoning-parser-plugin reasoning-config tool-call-parser "
        "tool-parser-plugin tool-strict-level tool-server grpc-port uds root-path "
        "sse-keep-alive-interval fingerprint-mode fingerprint-value h11-max-header-count "
        "h11-max-incomplete-event-size anthropic-disabled-thinking-effort",
        switches="enable-auto-tool-choice exclude-tools-when-tool-choice-none "
        "return-tokens-as-token-ids enable-prompt-tokens-details enable-force-include-usage "
        "enable-tokenizer-info-endpoint enable-request-id-headers disable-fastapi-docs "
        "enable-offline-docs disable-frontend-multiprocessing allow-credentials grpc "
        "enable-reasoning",
        several="allowed-origins allowed-methods allowed-headers middleware",
    ),
    *left_out(
        reasons.LOGS,
        values="max-log-len logging-config log-level log-config-file uvicorn-log-level "
        "disable-access-log-for-endpoints show-hidden-metrics-for-version "
        "kv-cache-metrics-sample per-request-spec-decode-metrics",
        switches="disable-log-stats disable-log-requests enable-log-requests enable-log-outputs "
        "enable-log-deltas aggregate-engine-logging disable-uvicorn-access-log log-error-stack "
        "enable-server-load-tracking enable-per-request-metrics kv-cache-metrics "
        "cudagraph-metrics enable-mfu-metrics enable-logging-iteration-details "
        "disable-logprobs-during-spec-decoding",
        several="custom-histogram-buckets",
    ),
    *left_out(
        reasons.TRACES,
        values="otlp-traces-endpoint profiler-config jit-monitor-mode",
        switches="enable-layerwise-nvtx-tracing jit-monitor-verbose enable-trace-replay",
        several="collect-detailed-traces",
    ),
    *left_out(
        "a server that is not needed is stopped, and starts from what was built",
        values="sleep-mode-backend shutdown-timeout watchdog-config",
        switches="enable-sleep-mode sleep-mode-offload-cudagraph",
        several="sleep-preserve-parameter-names",
    ),
    *left_out(
        reasons.LOSSLESS,
        values="spec-decoding-acceptance-method typical-acceptance-sampler-posterior-threshold "
        "typical-acceptance-sampler-posterior-alpha",
    ),
    *left_out(reasons.LOOKUP, values="ngram-prompt-lookup-max ngram-prompt-lookup-min"),
    *left_out(reasons.OWN_DRAFT, values="speculative-model-quantization"),
    *left_out(reasons.DRAFT_CONTEXT, values="speculative-max-model-len"),
    *left_out(
        "set speculation.schedule, with num_draft_tokens 0 from that batch size on",
        values="speculative-disable-by-batch-size",
    ),
    *left_out(
        reasons.RETIRED,
        values="additional-config aux-output-config",
        switches="use-v2-block-manager speculative-disable-mqa-scorer fail-on-environ-validation",
    ),
)

VLLM = Server(
    "vLLM",
    "0.33.0",
    "torch",
    _CARRIED + _LEFT,
    has_underscores=True,
    has_negations=True,
)
"""`vllm serve`, and `python -m vllm.entrypoints.openai.api_server`."""
