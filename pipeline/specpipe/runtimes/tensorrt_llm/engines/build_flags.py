"""The command line of `trtllm-build` as data, and the one that builds an engine of a pair.

Sources: TensorRT-LLM, commands/build.py@65f1d153 and plugin/plugin.py@c20322ff (`cli_plugin_args`
and the types of `PluginConfig`'s fields), late versions of both; that 1.0 to 1.2.1 all have exactly
these was not verified: `specpipe doctor --tensorrt-llm` compares them with `trtllm-build --help`.
What an engine of a pair needs: examples/draft_target_model/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from specpipe.checkpoints.formats import FORMAT_OF_ALGO, FORMATS
from specpipe.config.tensorrt_llm_versions import version_number
from specpipe.roles import Role
from specpipe.runtimes.tensorrt_llm.engines.toolbox import File, Word
from specpipe.runtimes.tensorrt_llm.formats import SUPPORT

if TYPE_CHECKING:
    from specpipe.config.tensorrt_llm import BuildFlags

FlagKind = Literal["text", "texts", "number", "choice", "toggle", "switch"]
"""What follows a flag.

text    one value; texts: one or more
number  a whole number
choice  one of `choices`
toggle  `enable` or `disable`
switch  nothing: the flag itself says yes
"""

Value: TypeAlias = str | int | bool | None

_COMMANDS = "commands/build.py"
_PLUGINS = "plugin/plugin.py"
_DTYPES = ("auto", "float16", "float32", "bfloat16", "int32", "disable")


@dataclass(frozen=True)
class Flag:
    """One flag of `trtllm-build`.

    default  what it is when it is not given; None: nothing, or decided by other values
    aliases  other names of it
    until    the last release that has it; None: those of today
    source   the file of TensorRT-LLM that defines it
    """

    name: str
    kind: FlagKind
    default: Value = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    until: str | None = None
    source: str = _COMMANDS

    @property
    def option(self) -> str:
        """As it is written on the command line."""
        return f"--{self.name}"


def _plugin(name: str, default: str, choices: tuple[str, ...] = _DTYPES) -> Flag:
    return Flag(name, "choice", default, choices, source=_PLUGINS)


def _toggle(name: str, default: bool) -> Flag:
    return Flag(name, "toggle", default, source=_PLUGINS)


FLAGS = (
    Flag("checkpoint_dir", "text"),
    Flag("model_config", "text"),
    Flag("build_config", "text"),
    Flag("model_cls_file", "text"),
    Flag("model_cls_name", "text"),
    Flag("output_dir", "text", "engine_outputs"),
    Flag("max_batch_size", "number", 2048),
    Flag("max_input_len", "number", 1024),
    Flag("max_seq_len", "number", aliases=("max_decoder_seq_len",)),
    Flag("max_beam_width", "number", 1),
    Flag("max_num_tokens", "number", 8192),
    Flag("opt_num_tokens", "number"),
    Flag("max_encoder_input_len", "number", 1024),
    Flag("max_prompt_embedding_table_size", "number", 0, aliases=("max_multimodal_len",)),
    Flag("kv_cache_type", "choice", None, ("continuous", "paged", "disabled")),
    Flag("paged_kv_cache", "text"),
    Flag("input_timing_cache", "text"),
    Flag("output_timing_cache", "text", "model.cache"),
    Flag(
        "profiling_verbosity",
        "choice",
        "layer_names_only",
        ("layer_names_only", "detailed", "none"),
    ),
    Flag("strip_plan", "switch", False),
    Flag("weight_sparsity", "switch", False),
    Flag("weight_streaming", "switch", False),
    Flag("fast_build", "switch", False),
    Flag("workers", "number", 1),
    Flag(
        "log_level",
        "choice",
        "info",
        ("internal_error", "error", "warning", "info", "verbose", "debug"),
    ),
    Flag("enable_debug_output", "switch", False),
    Flag("visualize_network", "text"),
    Flag("dry_run", "switch", False),
    Flag("monitor_memory", "switch", False),
    Flag("logits_dtype", "choice", None, ("float16", "float32")),
    Flag("gather_context_logits", "switch", False),
    Flag("gather_generation_logits", "switch", False),
    Flag("gather_all_token_logits", "switch", False),
    Flag("lora_dir", "texts"),
    Flag("lora_ckpt_source", "choice", "hf", ("hf", "nemo")),
    Flag("lora_target_modules", "texts"),
    Flag("max_lora_rank", "number", 64),
    Flag(
        "speculative_decoding_mode",
        "choice",
        None,
        ("draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens", "eagle"),
    ),
    Flag("max_draft_len", "number", 0),
    Flag("auto_parallel", "number", 1, until="0.21.0"),
    Flag("gpus_per_node", "number", 8, until="0.21.0"),
    Flag("cluster_key", "text", until="0.21.0"),
    _plugin("bert_attention_plugin", "auto"),
    _plugin("gpt_attention_plugin", "auto"),
    Flag(
        "gemm_plugin", "choice", None, (*_DTYPES[:-1], "fp8", "nvfp4", "disable"), source=_PLUGINS
    ),
    _plugin("gemm_swiglu_plugin", "disable", ("fp8", "disable")),
    _plugin("fp8_rowwise_gemm_plugin", "disable"),
    _plugin("lora_plugin", "disable"),
    _toggle("dora_plugin", False),
    _plugin("moe_plugin", "auto"),
    _plugin("mamba_conv1d_plugin", "auto"),
    _plugin("nccl_plugin", "auto"),
    _plugin("low_latency_gemm_plugin", "disable", ("fp8", "disable")),
    _plugin("low_latency_gemm_swiglu_plugin", "disable", ("fp8", "disable")),
    _plugin("gemm_allreduce_plugin", "disable", ("float16", "bfloat16", "disable")),
    _toggle("context_fmha", True),
    _toggle("bert_context_fmha_fp32_acc", False),
    _toggle("remove_input_padding", True),
    Flag("tokens_per_block", "number", 32, source=_PLUGINS),
    _toggle("use_paged_context_fmha", True),
    _toggle("use_fp8_context_fmha", True),
    _toggle("fuse_fp4_quant", False),
    _toggle("multiple_profiles", False),
    _toggle("paged_state", True),
    _toggle("streamingllm", False),
    _toggle("norm_quant_fusion", False),
    _toggle("reduce_fusion", False),
    _toggle("user_buffer", False),
    _toggle("use_fused_mlp", True),
    _toggle("pp_reduce_scatter", False),
)
"""Every flag; `--help` lists them in this order."""

NOT_PASSED = {
    "model_config": "the checkpoint has its own",
    "build_config": "it would win over the limits that are given as flags",
    "model_cls_file": "specpipe builds TensorRT-LLM's own models",
    "model_cls_name": "specpipe builds TensorRT-LLM's own models",
    "paged_kv_cache": "kv_cache_type says the same",
    "visualize_network": "it writes a second copy of the network for debugging",
    "dry_run": "it builds nothing",
    "gather_all_token_logits": "the two flags that it stands for are decided one by one",
    "lora_dir": "specpipe serves no adapters",
    "lora_ckpt_source": "specpipe serves no adapters",
    "lora_target_modules": "specpipe serves no adapters",
    "max_lora_rank": "specpipe serves no adapters",
}
"""Flags that no command line of specpipe has, with the reason."""


TIMING_CACHE_NAME = "model.cache"
"""What TensorRT measured, in the engine's folder; a later build may read it."""


def flags(version: str) -> tuple[Flag, ...]:
    """Returns the flags that a release has."""
    number = version_number(version)
    return tuple(
        flag for flag in FLAGS if flag.until is None or number <= version_number(flag.until)
    )


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """What one engine of a pair is to be.

    max_seq_len     tokens of prompt and answer
    num_draft_tokens
                    tokens that the target verifies at once, at least 1; the draft's own number is 0
    quant_algo, kv_cache_quant_algo
                    of the checkpoint's config.json; None: plain
    gather_logits   whether draft tokens are accepted by comparing logits
    """

    role: Role
    version: str
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    num_draft_tokens: int
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    gather_logits: bool
    flags: BuildFlags
    extra_args: tuple[str, ...] = ()

    @property
    def is_target(self) -> bool:
        return self.role == "target"


def values(spec: BuildSpec) -> dict[str, Value]:
    """Returns the value of every flag for an engine, but for paths; None: it is not given."""
    settings = spec.flags
    num_tokens_per_request = spec.num_draft_tokens + 1 if spec.is_target else 1
    full_batch = spec.max_batch_size * num_tokens_per_request
    # The builder raises the limit to this much by itself; said here, the plan shows it.
    max_num_tokens = max(spec.max_num_tokens, full_batch)
    opt_num_tokens = settings.opt_num_tokens
    if opt_num_tokens is None and not settings.multiple_profiles:
        opt_num_tokens = full_batch  # a step of a full batch is what the engine does most
    decided: dict[str, Value] = {
        "max_batch_size": spec.max_batch_size,
        "max_input_len": spec.max_seq_len,
        "max_seq_len": spec.max_seq_len,
        "max_beam_width": 1,
        "max_num_tokens": max_num_tokens,
        "opt_num_tokens": opt_num_tokens,
        "kv_cache_type": "paged",
        "gather_generation_logits": spec.gather_logits,
        "speculative_decoding_mode": "draft_tokens_external" if spec.is_target else None,
        "max_draft_len": spec.num_draft_tokens if spec.is_target else None,
        "gpt_attention_plugin": "auto",
        "context_fmha": True,
        "remove_input_padding": True,
        "use_paged_context_fmha": True,
        **_by_format(spec),
    }
    given = settings.model_dump(exclude_none=True, exclude={"input_timing_cache"})
    defaults = {
        flag.name: flag.default for flag in flags(spec.version) if flag.name not in NOT_PASSED
    }
    return defaults | given | decided


def _by_format(spec: BuildSpec) -> dict[str, Value]:
    """The flags that the weights decide where the config leaves them open.

    NVIDIA advises the GEMM plugin for float16 and bfloat16 weights and against it for FP8
    (useful-build-time-flags.md); for NVFP4 the builder would turn it on by itself.
    """
    settings = spec.flags
    name = None if spec.quant_algo is None else FORMAT_OF_ALGO[spec.quant_algo]
    decided: dict[str, Value] = {}
    if settings.gemm_plugin is None:
        decided["gemm_plugin"] = "auto" if name is None else SUPPORT[name].gemm_plugin
    if settings.fp8_rowwise_gemm_plugin is None:
        is_rowwise = name is not None and FORMATS[name].activations == "fp8_per_token"
        decided["fp8_rowwise_gemm_plugin"] = "auto" if is_rowwise else "disable"
    if settings.use_fp8_context_fmha is None:
        # With paged context FMHA it is the KV cache that decides, not the weights alone.
        decided["use_fp8_context_fmha"] = spec.kv_cache_quant_algo == "FP8"
    return decided


def arguments(
    spec: BuildSpec, *, checkpoint: File, out: File, timing_cache: File | None
) -> list[Word]:
    """Returns all that follows `trtllm-build`; every flag that has a value is written out.

    The timing cache of the build is written beside the engine; `timing_cache` is read.
    """
    decided: dict[str, Value | File] = {
        **values(spec),
        "checkpoint_dir": checkpoint,
        "output_dir": out,
        "input_timing_cache": timing_cache,
        "output_timing_cache": replace(out, inside=TIMING_CACHE_NAME),
    }
    line: list[Word] = []
    for flag in flags(spec.version):
        value = decided.get(flag.name)
        if value is None or (flag.kind == "switch" and not value):
            continue
        line.append(flag.option)
        if flag.kind == "toggle":
            line.append("enable" if value else "disable")
        elif flag.kind != "switch":
            line.append(value if isinstance(value, File) else str(value))
    return [*line, *spec.extra_args]


def as_settings(spec: BuildSpec) -> dict[str, Any]:
    """Returns the values for a manifest; those that do not change the engine are left out."""
    decided: dict[str, Any] = {
        name: value
        for name, value in values(spec).items()
        if value is not None and name not in ("workers", "log_level", "monitor_memory")
    }
    return {**decided, "extra_args": list(spec.extra_args)}
