"""What engines of TensorRT-LLM cannot do for a pair, found before anything is built.

`setting_faults` needs the YAML alone, `check_plan` the checkpoints' small files and the GPUs too.
Each fault names the setting to change.

Sources: TensorRT-LLM, builder.py (what it switches off with a warning, and what it raises for),
plugin/plugin.py (PluginConfig.validate), commands/build.py; releases 0.16 to 1.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from specpipe.checkpoints.formats import FORMATS
from specpipe.config.faults import Fault
from specpipe.errors import EngineBuildError
from specpipe.machine.gpus import sm_of
from specpipe.roles import Role
from specpipe.runtimes.tensorrt_llm.capabilities import (
    FP8_SM,
    MIN_SM,
    formats_on,
    instead,
    what_is_quantized,
)
from specpipe.runtimes.tensorrt_llm.formats import SUPPORT

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig, QuantizationConfig
    from specpipe.config.tensorrt_llm import BuildFlags, TensorRTLLMConfig
    from specpipe.runtimes.plan import Side
    from specpipe.runtimes.tensorrt_llm.plan import PairPlan


_BUILD = "engine.tensorrt_llm.build"


def setting_faults(config: PipelineConfig, settings: TensorRTLLMConfig) -> Iterator[Fault]:
    """Yields the settings for engines that contradict each other, or cannot be."""
    sides = {"draft": config.draft, "target": config.target}
    for role, ids in (("draft", settings.draft_gpu_ids), ("target", settings.target_gpu_ids)):
        if ids is not None:
            yield from _gpu_id_faults(role, ids, sides[role].world_size)
    if config.speculation.num_draft_tokens == 0:
        yield Fault(
            "speculation.num_draft_tokens",
            0,
            "at least 1: a target engine is built for the draft tokens that it verifies, and a "
            "request may still ask for 0",
        )
    for role, checkpoint in sides.items():
        if checkpoint.quantization is not None:
            yield from _scheme_faults(f"{role}.quantization", checkpoint.quantization)
    yield from _flag_faults(settings.build)
    weights = settings.parameters.gpu_weights_percent
    if weights < 1 and not settings.build.weight_streaming:
        yield Fault(
            "engine.tensorrt_llm.parameters.gpu_weights_percent",
            weights,
            "1, or engine.tensorrt_llm.build.weight_streaming true",
        )


def check_plan(pair: PairPlan, capabilities: Mapping[Role, str | None]) -> None:
    """Raises EngineBuildError with a line for everything about a pair that cannot be built.

    capabilities  as the function of that name returns them
    """
    # Reading a YAML, which needs this module too, must not take the time to import NumPy.
    from specpipe.runtimes.tensorrt_llm.engines.quantized_weights import weight_faults

    faults = [*_vocab_faults(pair), *_token_faults(pair)]
    for side in (pair.draft, pair.target):
        known = capabilities[side.role]
        flags = pair.engine.tensorrt_llm.build
        if known is not None:
            faults += _gpu_faults(side, flags, known)
        faults += _dtype_faults(side)
        faults += _stage_faults(side)
        faults += weight_faults(side, flags, None if known is None else sm_of(known))
        faults += _fusion_faults(side, flags)
    if faults:
        raise EngineBuildError("\n".join(dict.fromkeys(faults)))  # both sides may share one


def check_window(pair: PairPlan, side: Side) -> None:
    """Raises EngineBuildError where a sequence could grow past a sliding window.

    Steps of a pair reuse the KV cache, and blocks of a layer whose window has moved on are not
    stored for that (kvCacheManager.cpp@b35ac1b6, storeContextBlocks; before, the cache was cyclic).
    Without `max_attention_window_size` the engine would attend past the window instead.
    """
    from specpipe.runtimes.tensorrt_llm.kv_plan import engine_max_seq_len

    window = side.unified.sliding_window
    length = engine_max_seq_len(pair, side)
    if window is not None and length > window:
        raise EngineBuildError(
            f"{side.role}: {side.checkpoint.checkpoint} has a sliding window of {window} tokens, "
            f"and its sequences may have {length}: TensorRT-LLM does not reuse the KV cache past "
            "a window, which every step of a pair needs; set engine.max_seq_len to at most "
            f"{window - (length - pair.max_seq_len_of(side))}"
        )


def dtype_fault(role: Role, dtype: str) -> str | None:
    """Says what is wrong with a checkpoint's dtype; None if nothing is.

    NVIDIA's support matrix lists float16, bfloat16 and FP8 for draft and target.
    """
    if dtype != "float32":
        return None
    return (
        f"{role}: the checkpoint is float32, for which TensorRT-LLM has no paged context FMHA, "
        "which drafting needs: set dtype to bfloat16 or float16 in its config.json"
    )


def _gpu_id_faults(role: str, ids: tuple[int, ...], world_size: int) -> Iterator[Fault]:
    key = f"engine.tensorrt_llm.{role}_gpu_ids"
    if len(set(ids)) != len(ids):
        yield Fault(key, list(ids), "each GPU once")
    elif len(ids) != world_size:
        yield Fault(
            key,
            list(ids),
            f"{world_size} GPU{'s' if world_size > 1 else ''}, one for each rank of {role}.tp_size "
            f"times {role}.pp_size",
        )


def _scheme_faults(key: str, scheme: QuantizationConfig) -> Iterator[Fault]:
    """What the builder would switch off, has no kernels for, or would do otherwise."""
    name = scheme.format
    if scheme.kv_cache is not None and not FORMATS[name].fp8_kv_cache:
        formats = [other for other, made in FORMATS.items() if made.fp8_kv_cache]
        yield Fault(
            f"{key}.kv_cache",
            scheme.kv_cache,
            f"null with format '{name}': with it the builder switches off paged context FMHA, "
            f"which drafting needs; formats that go with it: {', '.join(formats)}",
        )
    sizes = SUPPORT[name].block_sizes
    if sizes and scheme.awq_block_size not in sizes:
        yield Fault(
            f"{key}.awq_block_size",
            scheme.awq_block_size,
            f"{' or '.join(map(str, sizes))}: TensorRT-LLM has no other kernels of {name}",
        )
    if SUPPORT[name].whole_modules and scheme.exclude:
        yield Fault(
            f"{key}.exclude",
            list(scheme.exclude),
            f"nothing with format '{name}', which TensorRT-LLM gives to whole attention and MLP "
            "modules; format 'fp8' leaves out single linears",
        )
    if not SUPPORT[name].has_head and scheme.quantize_lm_head:
        yield Fault(
            f"{key}.quantize_lm_head",
            True,
            f"false with format '{name}', of which TensorRT-LLM has no head; format 'fp8' has one",
        )


def _flag_faults(flags: BuildFlags) -> Iterator[Fault]:
    """What the builder would refuse, or switch off with only a warning."""
    if flags.multiple_profiles and flags.opt_num_tokens is not None:
        yield Fault(f"{_BUILD}.opt_num_tokens", flags.opt_num_tokens, "null with multiple_profiles")
    for name in ("gemm_swiglu_plugin", "low_latency_gemm_swiglu_plugin"):
        if getattr(flags, name) != "disable" and not flags.use_fused_mlp:
            yield Fault(f"{_BUILD}.{name}", getattr(flags, name), "'disable' without use_fused_mlp")
    if flags.user_buffer and not flags.reduce_fusion:
        yield Fault(f"{_BUILD}.user_buffer", True, "false without reduce_fusion")
    if flags.norm_quant_fusion and flags.reduce_fusion:
        yield Fault(f"{_BUILD}.norm_quant_fusion", True, "false with reduce_fusion")


def _gpu_faults(side: Side, flags: BuildFlags, known: str) -> Iterator[str]:
    """Formats and flags that a GPU has no kernels for."""
    sm = sm_of(known)
    gpu = f"a GPU of compute capability {known}"
    if sm < MIN_SM:
        yield (
            f"{side.role}: TensorRT-LLM does not verify draft tokens on {gpu}; it needs 8.0 or more"
        )
        return
    name = side.unified.format
    if name is not None and not FORMATS[name].runs_on(sm):
        yield (
            f"{what_is_quantized(side, name)} does not run on {gpu}; formats that do: "
            f"{', '.join(formats_on(sm))}; or {instead(side)}"
        )
    elif side.unified.quantization.kv_cache_quant_algo == "FP8" and sm < FP8_SM:
        yield (
            f"{side.role}.quantization.kv_cache 'fp8' does not run on {gpu}; set it to null"
            if side.checkpoint.quantization is not None
            else f"{side.role}: the FP8 KV cache of its checkpoint does not run on {gpu}; "
            "use one without"
        )
    if flags.gemm_swiglu_plugin != "disable" and sm != 90:
        yield f"{_BUILD}.gemm_swiglu_plugin does not run on {gpu}, but on 9.0; disable it"
    for name in (
        "fp8_rowwise_gemm_plugin",
        "low_latency_gemm_plugin",
        "low_latency_gemm_swiglu_plugin",
    ):
        if sm == 100 and getattr(flags, name) not in (None, "disable"):
            yield f"{_BUILD}.{name} does not run on {gpu}; disable it"


def _dtype_faults(side: Side) -> Iterator[str]:
    """Where config.json leaves the dtype to the weights, it is looked at after conversion."""
    from specpipe.checkpoints.checkpoint import read_config

    config = read_config(side.folder, allow_quantized=True, limits=side.limits)
    fault = dtype_fault(side.role, str(config.get("dtype") or config.get("torch_dtype")))
    if fault is not None:
        yield fault


def _stage_faults(side: Side) -> Iterator[str]:
    """Phi-3 has its embedding, last norm and head on every rank (models/phi3/model.py)."""
    architecture, pp_size = side.unified.architecture, side.checkpoint.pp_size
    if architecture == "Phi3ForCausalLM" and pp_size > 1:
        yield (
            f"{side.role}.pp_size {pp_size} does not go with {architecture}, which TensorRT-LLM "
            f"does not divide into pipeline stages: set it to 1, and split by {side.role}.tp_size"
        )


def _fusion_faults(side: Side, flags: BuildFlags) -> Iterator[str]:
    """What the builder would switch off in the target with only a warning.

    Flags are for both engines; one may have no effect in the draft.
    """
    architecture = side.unified.architecture
    if side.role == "target" and flags.reduce_fusion:
        if side.checkpoint.tp_size == 1:
            yield f"{_BUILD}.reduce_fusion has no effect with target.tp_size 1; set it to false"
        elif architecture not in ("LlamaForCausalLM", "Gemma2ForCausalLM"):
            yield f"{_BUILD}.reduce_fusion has no effect with {architecture}; set it to false"
    if side.role == "target" and flags.norm_quant_fusion:
        name = side.unified.format
        if architecture != "LlamaForCausalLM":
            yield f"{_BUILD}.norm_quant_fusion has no effect with {architecture}; set it to false"
        elif name != "nvfp4":
            what = "plain weights" if name is None else f"format '{name}'"
            yield (
                f"{_BUILD}.norm_quant_fusion has no effect with {what}, only with 'nvfp4'; set it "
                "to false"
            )


def _vocab_faults(pair: PairPlan) -> Iterator[str]:
    """Draft logits are copied row by row into rows as long as the target's.

    Comparing tokens instead needs no equal rows: `check` has found that ids mean the same in both.
    """
    if pair.engine.tensorrt_llm.acceptance != "logits":
        return
    sizes = {side.role: side.unified.vocab_size for side in (pair.draft, pair.target)}
    if sizes["draft"] != sizes["target"]:
        yield (
            f"the draft's vocabulary has {sizes['draft']} rows, the target's {sizes['target']}, "
            "but comparing logits needs equal ones: set engine.tensorrt_llm.acceptance to exact"
        )


def holds_longest_round(pair: PairPlan) -> bool:
    """Returns whether one iteration of the target can read the longest text with its draft tokens.

    One that it could not would end every request that runs (a check in
    batch_manager/microBatchScheduler.cpp, which trtGptModelInflightBatching.cpp lets through).
    """
    return pair.engine.max_num_tokens >= pair.max_seq_len + pair.num_draft_tokens


def plan_notes(pair: PairPlan) -> Iterator[str]:
    """Yields what is worth knowing of a pair that can be built."""
    engine = pair.engine
    yield (
        f"engine.max_num_tokens {engine.max_num_tokens} bounds the sum of the texts, prompts "
        "included, of the requests that the target verifies at once: TensorRT-LLM takes a whole "
        "text for each round until its reuse of the KV cache is known, and drops draft tokens, or "
        "makes requests wait, where the sum is more. "
        "specpipe_unverified_draft_tokens_total counts them"
    )


def _token_faults(pair: PairPlan) -> Iterator[str]:
    engine = pair.engine
    num_tokens = engine.max_num_tokens
    is_chunked = engine.tensorrt_llm.parameters.enable_chunked_context
    if not is_chunked and not holds_longest_round(pair):
        yield (
            f"engine.max_num_tokens {num_tokens} is less than engine.max_seq_len "
            f"{pair.max_seq_len} and {pair.num_draft_tokens} draft tokens, so that the longest "
            "texts would end all requests that run: raise it, or set "
            "engine.tensorrt_llm.parameters.enable_chunked_context to true"
        )
    flags = engine.tensorrt_llm.build
    if flags.opt_num_tokens is not None and flags.opt_num_tokens > num_tokens:
        yield (
            f"engine.tensorrt_llm.build.opt_num_tokens {flags.opt_num_tokens} is more than "
            f"engine.max_num_tokens {num_tokens}"
        )
