"""The flags of `sglang serve` and of `python -m sglang.launch_server`, which are the same.

Source: SGLang 0.5.10.post1 (its wheel), sglang/srt/server_args.py (ServerArgs.add_cli_args; what
the numbers of speculation mean: _handle_speculative_decoding) and sglang/cli/serve.py;
docs/advanced_features/speculative_decoding.md@067ad4d3.
"""

from __future__ import annotations

from specpipe.build.migrate import reasons
from specpipe.build.migrate.flags import DTYPES, METHOD, NUM_VERIFIED, Flag, Left, Same, left_out
from specpipe.build.migrate.server import Server

_METHODS = {"STANDALONE": "draft_model", "NGRAM": "ngram"}

_CARRIED = (
    Flag(("--model-path", "--model"), "text", "target.checkpoint"),
    Flag(("--revision",), "text", "target.revision"),
    Flag(
        ("--served-model-name",),
        "text",
        "name",
        "which names the folder of the artifacts; the model in Triton is `ensemble`",
    ),
    Flag(("--dtype",), "text", "engine.dtype", values=DTYPES, closed=True),
    Flag(("--device",), "text", "engine.device"),
    Flag(("--context-length",), "sglang size", "engine.max_seq_len"),
    Flag(("--max-running-requests",), "whole", "engine.max_batch_size"),
    Flag(
        ("--chunked-prefill-size",),
        "whole",
        "engine.max_num_tokens",
        "which counts the tokens of requests that decode, too",
        values={-1: Left("prompts always come in chunks")},
    ),
    Flag(("--max-queued-requests",), "whole", "serving.max_queue_size"),
    Flag(("--tensor-parallel-size", "--tp-size"), "whole", "target.tp_size"),
    Flag(("--pipeline-parallel-size", "--pp-size"), "whole", "target.pp_size"),
    Flag(
        ("--modelopt-quant",),
        "text",
        "target.quantization.format",
        "calibrated on target.quantization.calibration while the pair is built",
        values={name: name for name in ("fp8", "int4_awq", "w4a8_awq", "nvfp4")},
        others=Left(reasons.QUANTIZED),
    ),
    Flag(
        ("--kv-cache-dtype",),
        "text",
        "target.quantization.kv_cache",
        values={
            "auto": Same("the KV cache has the model's dtype"),
            "fp8_e4m3": "fp8",
        },
        others=Left("the KV cache has the model's dtype, or is FP8 (e4m3) beside FP8 weights"),
    ),
    Flag(("--speculative-algorithm",), "text", METHOD, values=_METHODS, others=reasons.NO_MODEL),
    Flag(
        ("--speculative-draft-model-path", "--speculative-draft-model"), "text", "draft.checkpoint"
    ),
    Flag(("--speculative-draft-model-revision",), "text", "draft.revision"),
    Flag(("--speculative-num-steps",), "whole", "speculation.num_draft_tokens"),
    Flag(("--speculative-num-draft-tokens",), "whole", NUM_VERIFIED),
    Flag(
        ("--speculative-eagle-topk",),
        "whole",
        values={1: Same("a draft is a chain")},
        others=Left("a draft is a chain, and no tree"),
    ),
    Flag(
        ("--model-type",),
        "text",
        values={"auto": Same("a model generates text"), "llm": Same("a model generates text")},
        others=reasons.NO_MODEL,
    ),
    Flag(("--config",)),
)

_LEFT = (
    Flag(("--model-checksum",), "optional", note=reasons.LOADING),
    *left_out(reasons.MEMORY, values="mem-fraction-static max-total-tokens"),
    *left_out(
        "engine.max_num_tokens bounds a forward, prompts and all", values="max-prefill-tokens"
    ),
    *left_out(
        reasons.QUANTIZED,
        values="quantization quantization-param-path modelopt-checkpoint-restore-path "
        "modelopt-checkpoint-save-path modelopt-export-path rl-quant-profile torchao-config",
        switches="quantize-and-serve",
    ),
    *left_out(reasons.OWN_DRAFT, values="speculative-draft-model-quantization"),
    *left_out(
        reasons.LOSSLESS,
        values="speculative-accept-threshold-single speculative-accept-threshold-acc",
    ),
    *left_out(
        reasons.LOOKUP,
        values="speculative-ngram-min-bfs-breadth speculative-ngram-max-bfs-breadth "
        "speculative-ngram-match-type speculative-ngram-max-trie-depth "
        "speculative-ngram-capacity",
    ),
    *left_out(
        "it belongs to a way of drafting that specpipe does not have",
        values="speculative-token-map dllm-algorithm dllm-algorithm-config",
        switches="enable-multi-layer-eagle enable-draft-weights-cpu-backup",
    ),
    *left_out(reasons.SEED, values="random-seed"),
    *left_out(reasons.LISTEN, values="host port"),
    *left_out(reasons.SECRETS, values="api-key admin-api-key"),
    *left_out(
        reasons.TLS,
        values="ssl-keyfile ssl-certfile ssl-ca-certs ssl-keyfile-password",
        switches="enable-ssl-refresh",
    ),
    *left_out(reasons.REMOTE_CODE, switches="trust-remote-code"),
    *left_out(
        reasons.TOKENIZER,
        values="tokenizer-path tokenizer-mode tokenizer-worker-num chat-template "
        "hf-chat-template-name completion-template dynamic-batch-tokenizer-batch-size "
        "dynamic-batch-tokenizer-batch-timeout",
        switches="skip-tokenizer-init enable-tokenizer-batch-encode "
        "disable-tokenizer-batch-decode enable-dynamic-batch-tokenizer",
    ),
    *left_out(reasons.MODEL_FILES, values="json-model-override-args model-impl"),
    *left_out(
        reasons.LOADING,
        values="load-format model-loader-extra-config download-dir weight-version "
        "speculative-draft-load-format decrypted-config-file decrypted-draft-config-file "
        "remote-instance-weight-loader-seed-instance-ip "
        "remote-instance-weight-loader-seed-instance-service-port "
        "remote-instance-weight-loader-send-weights-group-ports "
        "remote-instance-weight-loader-backend engine-info-bootstrap-port modelexpress-config",
        switches="delete-ckpt-after-loading weight-loader-disable-mmap "
        "checkpoint-engine-wait-weights-before-ready "
        "remote-instance-weight-loader-start-seed-via-transfer-engine",
        several="custom-weight-loader",
    ),
    *left_out(
        reasons.KERNELS,
        values="attention-backend prefill-attention-backend decode-attention-backend "
        "sampling-backend nsa-prefill-backend nsa-decode-backend fp8-gemm-backend "
        "fp4-gemm-backend speculative-attention-mode speculative-draft-attention-backend "
        "linear-attn-backend linear-attn-decode-backend linear-attn-prefill-backend "
        "cuda-graph-max-bs torch-compile-max-bs piecewise-cuda-graph-compiler "
        "piecewise-cuda-graph-max-tokens triton-attention-num-kv-splits "
        "triton-attention-split-tile-size ds-channel-config-path ds-heavy-channel-num "
        "ds-heavy-token-num ds-heavy-channel-type ds-sparse-decode-threshold nsa-prefill-cp-mode "
        "prefill-cp-mode rl-on-policy-target",
        switches="disable-cuda-graph disable-cuda-graph-padding enable-profile-cuda-graph "
        "enable-cudagraph-gc enable-nccl-nvls enable-symm-mem disable-custom-all-reduce "
        "enable-mscclpp enable-torch-symm-mem pre-warm-nccl enable-torch-compile "
        "enable-torch-compile-debug-mode disable-piecewise-cuda-graph "
        "enable-piecewise-cuda-graph enforce-piecewise-cuda-graph enable-p2p-check "
        "triton-attention-reduce-in-fp32 flashinfer-mla-disable-ragged "
        "disable-flashinfer-autotune enable-flashinfer-allreduce-fusion "
        "enforce-disable-flashinfer-allreduce-fusion enable-aiter-allreduce-fusion "
        "enable-fused-qk-norm-rope enable-double-sparsity enable-deterministic-inference "
        "enable-fp32-lm-head enable-attn-tp-input-scattered enable-nsa-prefill-context-parallel "
        "enable-prefill-context-parallel enable-precise-embedding-interpolation",
        several="cuda-graph-bs piecewise-cuda-graph-tokens",
    ),
    *left_out(
        reasons.SCHEDULING,
        values="prefill-max-requests schedule-policy default-priority-value "
        "priority-scheduling-preemption-threshold schedule-conservativeness "
        "prefill-delayer-max-delay-passes prefill-delayer-token-usage-low-watermark "
        "stream-interval num-continuous-decode-steps scheduler-recv-interval "
        "tbo-token-distribution-threshold pp-max-micro-batch-size pp-async-batch-depth "
        "pdmux-config-path sm-group-num",
        switches="enable-dynamic-chunking enable-priority-scheduling disable-priority-preemption "
        "abort-on-priority-when-disabled schedule-low-priority-values-first "
        "enable-prefill-delayer disable-overlap-schedule enable-mixed-chunk "
        "enable-two-batch-overlap enable-single-batch-overlap enable-pdmux "
        "prefill-round-robin-balance",
        several="prefill-delayer-forward-passes-buckets prefill-delayer-wait-seconds-buckets",
    ),
    *left_out(reasons.PREFIXES, switches="disable-radix-cache"),
    *left_out(
        reasons.CACHE,
        values="page-size radix-eviction-policy swa-full-tokens-ratio hicache-ratio hicache-size "
        "hicache-write-policy hicache-io-backend hicache-mem-layout hicache-storage-backend "
        "hicache-storage-prefetch-policy hicache-storage-backend-extra-config hisparse-config "
        "kv-events-config",
        switches="disable-hybrid-swa-memory disable-chunked-prefix-cache "
        "enable-hierarchical-cache enable-hisparse enable-lmcache hybrid-kvcache-ratio",
    ),
    *left_out(
        reasons.OFFLOADING,
        values="cpu-offload-gb offload-group-size offload-num-in-group offload-prefetch-step "
        "offload-mode",
        switches="enable-memory-saver enable-weights-cpu-backup",
    ),
    *left_out(
        reasons.REPLICAS,
        values="data-parallel-size/--dp-size load-balance-method",
        switches="enable-dp-attention enable-dp-lm-head",
    ),
    *left_out(
        reasons.NODES,
        values="dist-init-addr/--nccl-init-addr nnodes node-rank nccl-port dist-timeout "
        "attention-context-parallel-size/--attn-cp-size",
        switches="use-ray",
        several="numa-node",
    ),
    *left_out(
        "CUDA_VISIBLE_DEVICES says which GPUs specpipe sees", values="base-gpu-id gpu-id-step"
    ),
    *left_out(
        reasons.PHASES,
        values="disaggregation-mode disaggregation-transfer-backend "
        "disaggregation-bootstrap-port disaggregation-ib-device num-reserved-decode-tokens "
        "disaggregation-decode-polling-interval encoder-transfer-backend",
        switches="disaggregation-decode-enable-offload-kvcache encoder-only language-only "
        "enable-adaptive-dispatch-to-encoder",
        several="encoder-urls",
    ),
    *left_out(
        reasons.EXPERTS,
        values="expert-parallel-size/--ep-size/--ep moe-a2a-backend moe-runner-backend "
        "flashinfer-mxfp4-moe-precision deepep-mode ep-num-redundant-experts "
        "ep-dispatch-algorithm init-expert-location eplb-algorithm "
        "eplb-rebalance-num-iterations eplb-rebalance-layers-per-chunk "
        "eplb-min-rebalancing-utilization-threshold expert-distribution-recorder-mode "
        "expert-distribution-recorder-buffer-size deepep-config moe-dense-tp-size "
        "elastic-ep-backend mooncake-ib-device moe-data-parallel-size/--moe-dp-size "
        "speculative-moe-runner-backend speculative-moe-a2a-backend kt-weight-path kt-method "
        "kt-cpuinfer kt-threadpool-count kt-num-gpu-experts kt-max-deferred-experts-per-token",
        switches="enable-eplb enable-expert-distribution-metrics enable-elastic-expert-backup "
        "disable-shared-experts-fusion enable-return-routed-experts "
        "enable-fused-moe-sum-all-reduce disable-flashinfer-cutlass-moe-fp4-allgather",
    ),
    *left_out(
        reasons.ADAPTERS,
        values="max-lora-rank max-loras-per-batch max-loaded-loras lora-eviction-policy "
        "lora-backend max-lora-chunk-size",
        switches="enable-lora enable-lora-overlap-loading experts-shared-outer-loras "
        "no-experts-shared-outer-loras",
        several="lora-target-modules lora-paths",
    ),
    *left_out(
        reasons.TEXT_ONLY,
        values="mm-attention-backend mm-process-config limit-mm-data-per-request",
        switches="enable-multimodal disable-fast-image-processor keep-mm-feature-on-device "
        "enable-broadcast-mm-inputs-process mm-enable-dp-encoder enable-prefix-mm-cache "
        "enable-mm-global-cache",
    ),
    *left_out(
        reasons.GENERATION_ONLY,
        values="multi-item-scoring-delimiter",
        switches="is-embedding enable-return-hidden-states",
    ),
    *left_out(
        reasons.STATE_SPACE,
        values="max-mamba-cache-size mamba-ssm-dtype mamba-full-memory-ratio "
        "mamba-scheduler-strategy mamba-track-interval mamba-backend",
    ),
    *left_out(
        reasons.GRAMMARS,
        values="grammar-backend constrained-json-whitespace-pattern",
        switches="constrained-json-disable-any-whitespace disable-outlines-disk-cache "
        "enable-custom-logit-processor",
    ),
    *left_out(reasons.SAMPLING, values="sampling-defaults preferred-sampling-params"),
    *left_out(
        reasons.FRONT_END,
        values="fastapi-root-path reasoning-parser tool-call-parser tool-server "
        "file-storage-path warmups",
        switches="grpc-mode skip-server-warmup enable-cache-report incremental-streaming-output "
        "stream-response-default-include-usage stream-output enable-streaming-session "
        "allow-auto-truncate",
    ),
    *left_out(
        "serving.request_timeout_s ends what takes too long",
        values="watchdog-timeout soft-watchdog-timeout",
    ),
    *left_out(
        reasons.LOGS,
        values="log-level log-level-http log-requests-level log-requests-format "
        "crash-dump-folder tokenizer-metrics-custom-labels-header extra-metric-labels "
        "gc-warning-threshold-secs decode-log-interval export-metrics-to-file-dir",
        switches="log-requests show-time-cost enable-metrics enable-mfu-metrics "
        "enable-metrics-for-all-schedulers collect-tokens-histogram "
        "enable-request-time-stats-logging export-metrics-to-file sleep-on-idle",
        several="log-requests-target uvicorn-access-log-exclude-prefixes gc-threshold "
        "tokenizer-metrics-allowed-custom-labels bucket-time-to-first-token "
        "bucket-inter-token-latency bucket-e2e-request-latency prompt-tokens-buckets "
        "generation-tokens-buckets",
    ),
    *left_out(
        reasons.TRACES,
        values="otlp-traces-endpoint",
        switches="enable-trace enable-layerwise-nvtx-marker",
    ),
    *left_out(
        reasons.DEBUGGING,
        values="debug-tensor-dump-output-folder debug-tensor-dump-input-file "
        "debug-tensor-dump-inject custom-sigquit-handler forward-hooks",
        switches="enable-nan-detection",
        several="debug-tensor-dump-layers",
    ),
)

SGLANG = Server(
    "SGLang",
    "0.5.10.post1",
    "torch",
    _CARRIED + _LEFT,
    "--speculative-algorithm",
    takes_model=False,
)
"""`sglang serve`, and `python -m sglang.launch_server`."""
