"""Which quantized weights TensorRT-LLM's builder would take otherwise than they are meant.

Its network decides by itself what is quantized and how large that is, from `quantization` in
config.json. Where it comes to another answer than the checkpoint, the build fails after minutes,
or does not and computes nonsense.

Sources: TensorRT-LLM, quantization/quantize.py (quantize_layers: names are those within a pipeline
stage), quantization/layers.py (Fp8RowwiseAttention), models/modeling_utils.py (fuse_gate_mlp); read
as of 1.x, and not run. What these make of every family and format is a table in
tests/tensorrt_llm_module_trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specpipe.checkpoints.formats import FORMATS, OFFERED
from specpipe.checkpoints.quantized_rules import is_quantized
from specpipe.checkpoints.unified_layout import pipeline_layers, tensor_rules, whole_shape
from specpipe.quantization.quantized_config import quantized_linears
from specpipe.runtimes.tensorrt_llm.capabilities import formats_on, instead, what_is_quantized
from specpipe.runtimes.tensorrt_llm.formats import SUPPORT

if TYPE_CHECKING:
    from specpipe.checkpoints.unified_config import UnifiedConfig
    from specpipe.config.tensorrt_llm import BuildFlags
    from specpipe.runtimes.plan import Side

_LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")


def weight_faults(side: Side, flags: BuildFlags, sm: int | None) -> Iterator[str]:
    """Yields what is wrong with a side's quantized weights; nothing if they are plain.

    sm  compute capability times 10, None if it is not known
    """
    name = side.unified.format
    if name is None:
        return
    if name not in OFFERED:
        yield (
            f"{what_is_quantized(side, name)} is none that trtllm-build takes; set "
            "engine.tensorrt_llm.backend to pytorch, engine.runtime to torch, or "
            f"{instead(side)}"
        )
        return
    has_kv_cache = side.unified.quantization.kv_cache_quant_algo is not None
    if has_kv_cache and side.checkpoint.quantization is None and not FORMATS[name].fp8_kv_cache:
        yield (
            f"{side.role}: its checkpoint has {name} weights and an FP8 KV cache, with which the "
            f"builder switches off paged context FMHA, which drafting needs; {instead(side)}"
        )
    yield from _attention_faults(side, name, sm)
    yield from _size_faults(side, name, sm)
    yield from _layer_faults(side)
    if flags.use_fused_mlp:
        yield from _fused_mlp_faults(side, name)


def _attention_faults(side: Side, name: str, sm: int | None) -> Iterator[str]:
    lost = _lost_in_rowwise(side.unified)
    if name == "fp8_pc_pt" and lost is not None:
        yield (
            f"{what_is_quantized(side, name)} does not go with {side.unified.architecture}: "
            f"TensorRT-LLM's attention of this format leaves out {lost}; formats that go with it: "
            f"{', '.join(_formats_for(side, sm))}; or {instead(side)}"
        )


def _lost_in_rowwise(config: UnifiedConfig) -> str | None:
    """Names what the attention of fp8_pc_pt, a class of its own, leaves out of a model."""
    if config.qk_layernorm:
        return "the norms of queries and keys"
    if config.attention_scale is not None:
        return "the scale and cap of attention scores"
    return "longrope" if config.position_embedding_type == "long_rope" else None


def _formats_for(side: Side, sm: int | None) -> list[str]:
    """Returns the formats that run on a GPU and leave nothing out of a side's model."""
    loses = _lost_in_rowwise(side.unified) is not None
    return [other for other in formats_on(sm) if not (loses and other == "fp8_pc_pt")]


def _size_faults(side: Side, name: str, sm: int | None) -> Iterator[str]:
    multiple = SUPPORT[name].multiple
    if multiple is None:
        return
    config = side.unified
    multiple = max(multiple, config.quantization.block_size or 0)
    multiple *= side.checkpoint.tp_size
    unfit = []
    for module, rule, _ in quantized_linears(config):
        outputs, inputs = whole_shape(config, rule)
        for what, size in (("inputs", inputs), ("outputs", outputs)):
            if size % multiple:
                unfit.append(f"{module} has {size} {what}")
    if unfit:
        more = f", and {len(unfit) - 1} more do not fit either" if len(unfit) > 1 else ""
        others = [other for other in _formats_for(side, sm) if SUPPORT[other].multiple is None]
        yield (
            f"{what_is_quantized(side, name)} needs multiples of {multiple} in TensorRT-LLM, but "
            f"{unfit[0]}{more}; formats that need none: {', '.join(others)}; or {instead(side)}"
        )


def _layer_faults(side: Side) -> Iterator[str]:
    """`transformer.layers.0` is the first layer of every pipeline stage there."""
    config, pp_size = side.unified, side.checkpoint.pp_size
    for pp_rank in range(pp_size):
        layers = pipeline_layers(config, pp_rank)
        for layer in layers:
            if _plain_linears(config, layer) != _plain_linears(config, layer - layers.start):
                yield (
                    f"{side.role}: what is left plain differs from layer to layer, but with "
                    f"{side.role}.pp_size {pp_size} TensorRT-LLM counts layers anew on each stage; "
                    "exclude by patterns that mean all layers, or split by tp_size"
                )
                return


def _plain_linears(config: UnifiedConfig, layer: int) -> set[str]:
    prefix = f"transformer.layers.{layer}"
    return {linear for linear in _LINEARS if not is_quantized(config, f"{prefix}.{linear}")}


def _fused_mlp_faults(side: Side, name: str) -> Iterator[str]:
    """Fusing asks for the name of `fc` alone, which no pattern that begins with `*` matches."""
    config = side.unified
    if not any(rule.name.endswith("mlp.gate.weight") for rule, _ in tensor_rules(config)):
        return
    for layer in range(config.num_hidden_layers):
        mlp = f"transformer.layers.{layer}.mlp"
        fc, gate = (is_quantized(config, f"{mlp}.{linear}") for linear in ("fc", "gate"))
        if fc != gate or (name == "fp8" and not fc):
            yield (
                f"{side.role}: {mlp}.{'gate' if fc else 'fc'} is left plain, and TensorRT-LLM "
                "fuses gate and fc as if it were not; set "
                "engine.tensorrt_llm.build.use_fused_mlp to false"
            )
            return
