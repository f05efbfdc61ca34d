"""The `config.json` of a unified checkpoint as a typed model, by family.

It is what `trtllm-build` reads, plain or quantized. Keys that TensorRT-LLM does not know become
attributes of its config and do no harm, but not inside `quantization`, where late versions refuse
them.

Sources: TensorRT-LLM, docs/source/architecture/checkpoint.md, models/modeling_utils.py
(PretrainedConfig, QuantConfig, QuantAlgo), models/{llama,qwen,phi3,gemma}/config.py,
quantization/quantize.py (what is left plain unless `exclude_modules` is given).
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from specpipe.errors import CheckpointError

Count = Annotated[int, Field(ge=1)]

QuantAlgo = Literal[
    "W8A16",
    "W4A16",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W8A16_GPTQ",
    "W4A16_GPTQ",
    "W8A8_SQ_PER_CHANNEL",
    "W8A8_SQ_PER_TENSOR_PLUGIN",
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
    "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
    "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
    "W4A8_QSERVE_PER_GROUP",
    "W4A8_QSERVE_PER_CHANNEL",
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_BLOCK_SCALES",
    "INT8",
    "MIXED_PRECISION",
    "NVFP4",
    "NO_QUANT",
]


_NEVER_QUANTIZED: dict[QuantAlgo | None, str] = {
    "W8A16": "transformer.vocab_embedding",
    "W4A16": "transformer.vocab_embedding",
    "FP8_PER_CHANNEL_PER_TOKEN": "transformer.ln_f",
}
"""What TensorRT-LLM would quantize too, by algorithm; no checkpoint has scales for it."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Mapping(_Strict):
    """How the model is split; ranks of tensor parallelism lie next to each other."""

    world_size: Count
    tp_size: Count
    pp_size: Count
    cp_size: Count = 1
    moe_tp_size: int = 1
    moe_ep_size: int = 1
    moe_cluster_size: int = 1
    gpus_per_node: int = 8
    attn_tp_size: int = -1
    attn_cp_size: int = -1
    auto_parallel: bool = False

    @model_validator(mode="after")
    def _check_world_size(self) -> Mapping:
        if self.world_size != self.tp_size * self.pp_size * self.cp_size:
            raise ValueError("world_size is not tp_size times pp_size times cp_size")
        return self


class Quantization(_Strict):
    """QuantConfig, without the per-layer settings of MIXED_PRECISION."""

    quant_algo: QuantAlgo | None = None
    kv_cache_quant_algo: Literal["FP8", "INT8", "NVFP4"] | None = None
    group_size: int | None = 128
    smoothquant_val: float = 0.5
    clamp_val: list[float] | None = None
    use_meta_recipe: bool = False
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: list[str] | None = None
    mamba_ssm_cache_dtype: str | None = None

    @model_validator(mode="after")
    def _check_excluded(self) -> Quantization:
        """A list takes the place of TensorRT-LLM's own, in which these are."""
        module, excluded = _NEVER_QUANTIZED.get(self.quant_algo), self.exclude_modules
        if module is None or excluded is None:
            return self
        if not any(fnmatchcase(module, name) for name in excluded):
            raise ValueError(f"exclude_modules lacks {module}")
        return self


class _Decoder(BaseModel):
    """What the supported families have in common."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    dtype: Literal["float16", "bfloat16", "float32"]
    logits_dtype: Literal["float16", "float32"] = "float32"
    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_size: Count
    intermediate_size: Count
    norm_epsilon: float = Field(gt=0)
    max_position_embeddings: Count
    rotary_embedding_dim: Count | None = None
    qk_layernorm: bool = False
    use_parallel_embedding: bool = False
    embedding_sharding_dim: Literal[0, 1] = 0
    tie_word_embeddings: bool = False
    mapping: Mapping
    quantization: Quantization = Quantization()
    position_embedding_type: Literal["rope_gpt_neox", "long_rope"]
    rotary_base: float = Field(gt=0)
    rotary_scaling: dict[str, Any] | None = None


class LlamaConfig(_Decoder):
    """Llama and Mistral, which TensorRT-LLM has one implementation of."""

    architecture: Literal["LlamaForCausalLM", "MistralForCausalLM"]
    hidden_act: Literal["silu"]
    attn_bias: bool
    mlp_bias: bool
    residual_mlp: bool = False
    disable_weight_only_quant_plugin: bool = False
    remove_duplicated_kv_heads: bool = False


class Qwen2Config(_Decoder):
    """Qwen2 and Qwen2.5: biases on q, k and v."""

    architecture: Literal["Qwen2ForCausalLM"]
    hidden_act: Literal["silu"]
    qwen_type: Literal["qwen2"]
    attn_bias: Literal[True]
    use_logn_attn: bool = False


class Qwen3Config(_Decoder):
    """Qwen3: norms of queries and keys instead of biases."""

    architecture: Literal["Qwen3ForCausalLM"]
    hidden_act: Literal["silu"]
    qwen_type: Literal["qwen3"]
    attn_bias: Literal[False]
    qk_layernorm: Literal[True]
    use_logn_attn: bool = False


class Phi3Config(_Decoder):
    """Phi-3: one matrix for gate and up; longrope has its factors beside the other keys."""

    architecture: Literal["Phi3ForCausalLM"]
    hidden_act: Literal["swiglu"]
    original_max_position_embeddings: Count | None = None
    longrope_scaling_short_factors: list[float] | None = None
    longrope_scaling_long_factors: list[float] | None = None

    @model_validator(mode="after")
    def _check_longrope(self) -> Phi3Config:
        needed = (
            self.original_max_position_embeddings,
            self.longrope_scaling_short_factors,
            self.longrope_scaling_long_factors,
        )
        if self.position_embedding_type == "long_rope" and None in needed:
            raise ValueError("long_rope needs its original length and both lists of factors")
        return self


class Gemma2Config(_Decoder):
    """Gemma 2: capped scores and logits, norms before and after; splits its embedding."""

    architecture: Literal["Gemma2ForCausalLM"]
    hidden_act: Literal["gelu_pytorch_tanh", "gelu", "gegelu"]
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    inter_layernorms: Literal[True]

    @model_validator(mode="after")
    def _check_embedding(self) -> Gemma2Config:
        if self.mapping.tp_size > 1 and not self.use_parallel_embedding:
            raise ValueError("Gemma's embedding is split when tp_size is above 1")
        return self


UnifiedConfig = Annotated[
    LlamaConfig | Qwen2Config | Qwen3Config | Phi3Config | Gemma2Config,
    Field(discriminator="architecture"),
]

_ADAPTER: TypeAdapter[LlamaConfig | Qwen2Config | Qwen3Config | Phi3Config | Gemma2Config] = (
    TypeAdapter(UnifiedConfig)
)


def read_unified_config(
    folder: Path,
) -> LlamaConfig | Qwen2Config | Qwen3Config | Phi3Config | Gemma2Config:
    """Reads and validates a checkpoint's config.json; CheckpointError lists what is wrong in it."""
    path = folder / "config.json"
    try:
        return _ADAPTER.validate_python(json.loads(path.read_bytes()))
    except FileNotFoundError as exc:
        raise CheckpointError(f"{folder} has no config.json") from exc
    except ValidationError as exc:
        # The first part of a place is the family's name, which the file itself tells.
        lines = "".join(
            f"\n  - {'.'.join(map(str, error['loc'][1:])) or 'architecture'}: {error['msg']}"
            for error in exc.errors()
        )
        raise CheckpointError(
            f"{path} is not one that TensorRT-LLM builds an engine from:{lines}"
        ) from exc
    except ValueError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc
