"""The section `engine.tensorrt_llm` of the YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from specpipe.config import messages
from specpipe.config.tensorrt_llm_parameters import TritonParameters
from specpipe.config.tensorrt_llm_versions import (
    DEFAULT_VERSION,
    Release,
    SupportedVersion,
    release,
)
from specpipe.roles import Role
from specpipe.section import Section

Plugin = Literal["auto", "float16", "float32", "bfloat16", "int32", "disable"]
"""What a plugin computes in; auto: the checkpoint's dtype."""

GpuIds = Annotated[
    tuple[Annotated[int, Field(ge=0, strict=True)], ...], Field(min_length=1, strict=False)
]

_NO_SUCH_FAMILY = "no supported family has {}"

FIXED_FLAGS = {
    "checkpoint_dir": "it is the artifact of the stage before",
    "output_dir": "it is the stage's artifact",
    "max_batch_size": "set engine.max_batch_size",
    "max_seq_len": "set engine.max_seq_len",
    "max_num_tokens": "set engine.max_num_tokens",
    "max_input_len": "set engine.max_seq_len, which prompt and answer share",
    "max_beam_width": "drafting works with a beam of 1 only",
    "kv_cache_type": "drafting needs a paged KV cache",
    "use_paged_context_fmha": "drafting needs it on, in both engines",
    "gpt_attention_plugin": "a paged KV cache needs it on",
    "remove_input_padding": "in-flight batching needs it on",
    "context_fmha": "paged context FMHA needs it on",
    "speculative_decoding_mode": "the target verifies the draft's tokens, the draft none",
    "max_draft_len": "set speculation.num_draft_tokens",
    "gather_context_logits": "an engine that verifies draft tokens cannot gather them",
    "gather_generation_logits": "engine.tensorrt_llm.acceptance decides it",
    "strip_plan": "an engine without its weights cannot be served",
    "max_prompt_embedding_table_size": "specpipe serves text only",
    "max_encoder_input_len": _NO_SUCH_FAMILY.format("an encoder"),
    "bert_attention_plugin": _NO_SUCH_FAMILY.format("an encoder"),
    "bert_context_fmha_fp32_acc": _NO_SUCH_FAMILY.format("an encoder"),
    "moe_plugin": _NO_SUCH_FAMILY.format("experts"),
    "pp_reduce_scatter": _NO_SUCH_FAMILY.format("experts"),
    "mamba_conv1d_plugin": _NO_SUCH_FAMILY.format("a state space"),
    "paged_state": _NO_SUCH_FAMILY.format("a state space"),
    "lora_plugin": "specpipe serves no adapters",
    "dora_plugin": "specpipe serves no adapters",
    "streamingllm": "TensorRT-LLM 1.x does not support it",
}
"""Flags of `trtllm-build` that specpipe sets by itself, with what to do instead or the reason."""


def _check_absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("an absolute path")
    return path


class BuildFlags(Section):
    """Flags of `trtllm-build` for both engines; none: specpipe decides, or the flag's default."""

    logits_dtype: Literal["float16", "float32"] = "float32"
    """The number format of the logits that the engines give."""

    opt_num_tokens: int | None = Field(default=None, ge=1)
    """Tokens per iteration that kernels are tuned for; none: what trtllm-build takes by itself."""

    input_timing_cache: Annotated[Path, AfterValidator(_check_absolute)] | None = Field(
        default=None, strict=False
    )
    """Absolute path of the `model.cache` of an earlier engine, to build faster and the same."""

    profiling_verbosity: Literal["layer_names_only", "detailed", "none"] = "layer_names_only"
    """What the engine keeps for profilers."""

    weight_sparsity: bool = False
    """Whether to use the sparsity of weights where it is there."""

    weight_streaming: bool = False
    """Whether weights may stay in host memory; needed for `gpu_weights_percent` below 1."""

    fast_build: bool = False
    """Whether to build faster, for an engine that may be slower."""

    workers: int = Field(default=1, ge=1)
    """Ranks that are built at once; trtllm-build takes no more than there are GPUs."""

    log_level: Literal["internal_error", "error", "warning", "info", "verbose", "debug"] = "info"
    """How much trtllm-build says."""

    enable_debug_output: bool = False
    """Whether the engine keeps every layer's output."""

    monitor_memory: bool = False
    """Whether to log the memory that building takes."""

    gemm_plugin: Plugin | Literal["fp8", "nvfp4"] | None = None
    """The plugin for matrix products; none: off for FP8 weights, nvfp4 for NVFP4 weights, else
    auto."""

    gemm_swiglu_plugin: Literal["fp8", "disable"] = "disable"
    """The plugin for a fused gated MLP in FP8, on GPUs of compute capability 9.0 only."""

    fp8_rowwise_gemm_plugin: Plugin | None = None
    """The plugin for matrix products of fp8_pc_pt weights; none: auto for these, else off."""

    low_latency_gemm_plugin: Literal["fp8", "disable"] = "disable"
    """The plugin for FP8 matrix products of few tokens."""

    low_latency_gemm_swiglu_plugin: Literal["fp8", "disable"] = "disable"
    """The plugin for an FP8 gated MLP of few tokens."""

    gemm_allreduce_plugin: Literal["float16", "bfloat16", "disable"] = "disable"
    """The plugin for matrix product and all-reduce in one kernel."""

    nccl_plugin: Plugin = "auto"
    """The plugin for the collectives of tensor and pipeline parallelism."""

    use_fp8_context_fmha: bool | None = None
    """Whether attention over prompts is computed in FP8; none: where weights and KV cache are both
    FP8."""

    fuse_fp4_quant: bool = False
    """Whether to fuse the quantization of activations to FP4."""

    tokens_per_block: Literal[8, 16, 32, 64, 128] = 32
    """Tokens in one block of the KV cache; a block is the unit of its reuse."""

    multiple_profiles: bool = False
    """Whether kernels are tuned for several numbers of tokens: faster, less repeatable."""

    reduce_fusion: bool = False
    """Whether all-reduce, residual and norm are one kernel, for Llama and Gemma 2 with tp_size
    above 1."""

    norm_quant_fusion: bool = False
    """Whether norm and quantization are one kernel."""

    user_buffer: bool = False
    """Whether all-reduce skips a copy; needs reduce_fusion and FP8 weights of Llama."""

    use_fused_mlp: bool = True
    """Whether both products of a gated MLP are one."""

    @model_validator(mode="before")
    @classmethod
    def _explain_fixed(cls, data: Any) -> Any:
        for name in FIXED_FLAGS.keys() & data.keys() if isinstance(data, dict) else ():
            raise messages.broken_rule(
                f"engine.tensorrt_llm.build.{name}",
                data[name],
                f"nothing here, since specpipe sets it: {FIXED_FLAGS[name]}",
            )
        return data


class TensorRTLLMConfig(Section):
    """How TensorRT-LLM builds and serves the pair."""

    backend: Literal["tensorrt", "pytorch"] = "tensorrt"
    """What serves the pair: engines that `trtllm-build` makes, or TensorRT-LLM's LLM API on
    PyTorch."""

    version: SupportedVersion = DEFAULT_VERSION
    """The TensorRT-LLM that builds and serves; an engine runs under no other. Backend tensorrt has
    none after 1.2.1."""

    image: str | None = Field(default=None, min_length=1)
    """The container image to build in, by tag or digest; none: NVIDIA's Triton for `version`."""

    compute_capability: str | None = Field(default=None, pattern=r"^[0-9]{1,2}\.[0-9]$")
    """The compute capability of the GPUs that build and serve, as "9.0"; none: that of those here,
    where there are any."""

    draft_gpu_ids: GpuIds | None = None
    """Numbers of the GPUs of the draft, one for each rank; none: the first ones."""

    target_gpu_ids: GpuIds | None = None
    """Numbers of the GPUs of the target, one for each rank; none: the first ones."""

    build: BuildFlags = BuildFlags()
    """Flags of `trtllm-build` for both engines."""

    extra_build_args: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Arguments put after all others of `trtllm-build`, unchecked: the way out of this schema."""

    kv_cache_free_gpu_mem_fraction: float | None = Field(
        default=None, gt=0, lt=1, allow_inf_nan=False
    )
    """The most of the free GPU memory that a KV cache may take as its engine loads; none: 0.9."""

    acceptance: Literal["exact", "logits"] = "exact"
    """What a draft token is accepted by: that the target samples the same, or a comparison of both
    models' logits."""

    enable_block_reuse: bool | None = Field(default=None, json_schema_extra={"since": "0.2.0"})
    """Whether backend pytorch keeps the KV cache of prompts for later ones that begin alike; none:
    TensorRT-LLM's own default, which is yes. With a draft it may cost acceptance."""

    enable_penalty: bool = Field(default=False, json_schema_extra={"since": "0.2.0"})
    """Whether requests with a draft may have penalties, which takes GPU memory; with backend
    pytorch from 1.3.0rc27 on."""

    parameters: TritonParameters = TritonParameters()
    """Parameters of TensorRT-LLM's Triton backend, for both engines."""

    def gpu_ids(self, role: Role, world_size: int) -> tuple[int, ...]:
        """The GPUs of one engine, by rank."""
        given = self.draft_gpu_ids if role == "draft" else self.target_gpu_ids
        return given or tuple(range(world_size))

    @property
    def release(self) -> Release:
        """The release's row of the version table."""
        return release(self.version)

    @property
    def build_image(self) -> str:
        """The container image to build in."""
        return self.image or self.release.image
