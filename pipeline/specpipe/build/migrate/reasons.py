"""Why flags of other servers are not carried, and which ways to draft are refused."""

from __future__ import annotations

from specpipe.build.migrate.flags import Refused

MEMORY = (
    "runtimes torch and tensorrt make the KV cache as large as engine.max_batch_size and "
    "engine.max_seq_len need, which `specpipe check` says; with torch on a GPU set "
    "engine.kv_cache_memory, with tensorrt_llm engine.tensorrt_llm.kv_cache_free_gpu_mem_fraction, "
    "a share of what weights leave free"
)
KERNELS = "the runtime chooses its kernels and graphs itself"
SCHEDULING = "specpipe's scheduler has no such choice"
CACHE = "specpipe's KV cache has no such choice"
PREFIXES = (
    "with runtime torch on a GPU prompts that begin alike share what is cached of that, unless "
    "engine.prefix_reuse is false"
)
LISTEN = "`specpipe serve` has --host and --http-port"
SECRETS = "Triton checks no key; put a proxy that does in front of it"
TLS = "Triton speaks no TLS here; put a proxy that does in front of it"
FRONT_END = "clients talk to Triton, which is no OpenAI endpoint"
LOGS = "`specpipe serve --verbose` logs more, and Triton's metrics are always there"
TRACES = "specpipe writes no traces of this kind"
REPLICAS = "a specpipe server is one pair on one machine; start several behind a balancer"
NODES = "specpipe serves from one machine"
PHASES = "prefill and decode run in one process"
EXPERTS = "specpipe serves no models with experts"
ADAPTERS = "specpipe serves no adapters"
TEXT_ONLY = "specpipe serves text only"
GENERATION_ONLY = "specpipe generates text, and nothing else"
STATE_SPACE = "specpipe serves no models with a state space"
OFFLOADING = "specpipe keeps weights and KV cache where they are computed with"
LOADING = "specpipe reads safetensors and builds from them before it serves"
REMOTE_CODE = "specpipe runs no code from a checkpoint"
TOKENIZER = "the tokenizer and the chat template are those of target.checkpoint"
MODEL_FILES = "config.json of the checkpoint decides it"
SEED = "a request names its seed"
SAMPLING = "a request names what it samples by"
GRAMMARS = "specpipe constrains no output"
DEBUGGING = "it is for finding faults in the other server"
QUANTIZED = (
    "a checkpoint that is quantized says so itself; what specpipe quantizes is "
    "target.quantization (docs/quantization.md)"
)
FP8_CACHE = (
    "specpipe has an FP8 KV cache together with quantized weights only: "
    "target.quantization {format, kv_cache: fp8}"
)
LOSSLESS = "specpipe keeps the target's distribution exactly"
LOOKUP = "specpipe looks for the longest repetition itself"
OWN_DRAFT = "draft.quantization is a choice of its own (docs/quantization.md)"
PARALLEL = "a draft proposes in one pass where its config.json has pard_token, and with that mask"
DRAFT_CONTEXT = "the draft's context is that of its config.json"
RETIRED = "the other server has dropped it"

NO_MODEL = Refused(
    "specpipe runs pairs of two whole models, and this drafts otherwise; take its flags away and "
    "name a draft model with --draft"
)
