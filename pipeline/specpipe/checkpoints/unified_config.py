"""The `config.json` of a unified checkpoint: what a model is, and how its numbers are stored.

It is what `trtllm-build` reads, plain or quantized; every part of the pipeline reads it as this
type. Fields have the names of the file and stand in its order, so that `plain` gives it back. Keys
that TensorRT-LLM does not know become attributes of its config and do no harm, but not inside
`quantization`, where late versions refuse them. Beside TensorRT-LLM's own there are
`attn_dense_bias`, `sliding_window`, `layer_types`, Gemma's `embedding_multiplier` and
`rounds_norms`, and what parallel_draft.py reads.

Sources: TensorRT-LLM, docs/source/architecture/checkpoint.md, models/modeling_utils.py
(PretrainedConfig, QuantConfig, QuantAlgo), models/{llama,qwen,phi3,gemma}/config.py,
quantization/quantize.py (what is left plain unless `exclude_modules` is given).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from specpipe.checkpoints.files import is_there, read_json
from specpipe.checkpoints.parallel_draft import ParallelDraft, parallel_draft
from specpipe.checkpoints.unified_sections import (
    Count,
    ParallelMapping,
    Quantization,
    UnifiedSection,
)
from specpipe.errors import CheckpointError, show, to_sentence

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""The dtypes of a plain checkpoint, as `config.json` and as safetensors spell them."""

LayerTypes = list[Literal["sliding_attention", "full_attention"]]

_MOST_FAULTS = 20  # in one message; a guess at what is still read


class UnifiedConfig(UnifiedSection):
    """What the supported families have in common; each adds its own keys behind.

    rotary_embedding_dim  channels of a head that rope turns, the first ones
    rotary_scaling        every number that its `rope_type` needs (hf_config.py); None: plain rope
    sliding_window        tokens that a position sees; None where no window cuts the context short
    layer_types           which layers have the window; None: all of them
    """

    model_config = ConfigDict(extra="allow")

    architecture: str
    dtype: Literal["float16", "bfloat16", "float32"]
    logits_dtype: Literal["float16", "float32"] = "float32"
    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_size: Count
    intermediate_size: Count
    hidden_act: str
    norm_epsilon: float = Field(gt=0)
    position_embedding_type: Literal["rope_gpt_neox", "long_rope"]
    max_position_embeddings: Count
    rotary_embedding_dim: Count
    rotary_base: float = Field(gt=0)
    rotary_scaling: dict[str, Any] | None
    sliding_window: Count | None
    use_parallel_embedding: bool = False
    embedding_sharding_dim: Literal[0, 1] = 0
    tie_word_embeddings: bool
    mapping: ParallelMapping
    quantization: Quantization
    if TYPE_CHECKING:  # of every family, but each has them in another place of its config.json
        qk_layernorm: bool
        layer_types: LayerTypes | None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> UnifiedConfig:
        """Checks the values of a config.json; CheckpointError says what is wrong, in a sentence."""
        try:
            return _FAMILIES.validate_python(values)
        except ValidationError as exc:
            raise CheckpointError(to_sentence("; ".join(_faults(exc)))) from exc

    def quantized(self, quantization: Quantization) -> UnifiedConfig:
        """Returns the config of the same model, quantized otherwise."""
        return self.model_copy(update={"quantization": quantization})

    @property
    def format(self) -> str | None:
        """The format of the linears; None for plain ones."""
        return self.quantization.format

    @property
    def parallel(self) -> ParallelDraft | None:
        """How it drafts in parallel, which is said last of all; None where it does not."""
        return parallel_draft(self.model_extra or {}, self.vocab_size)

    @property
    def query_size(self) -> int:
        """Channels of one token's queries."""
        return self.num_attention_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Channels of one token's keys, or of its values."""
        return self.num_key_value_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Numbers of one token's keys and values in all layers."""
        return 2 * self.num_hidden_layers * self.key_size

    @property
    def plain_dtype(self) -> str:
        """The dtype of weights that are not quantized, as safetensors spells it."""
        return DTYPES[self.dtype]

    @property
    def one_plus_dtype(self) -> str:
        """The dtype of norms that are stored as 1 + a weight, likewise."""
        return "F32"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """One for each layer: tokens that a position sees; None where it sees all."""
        types: LayerTypes = self.layer_types or ["sliding_attention"] * self.num_hidden_layers
        return tuple(self.sliding_window if t == "sliding_attention" else None for t in types)

    @property
    def has_branch_norms(self) -> bool:
        """Whether the outputs of attention and MLP are normalized too."""
        return False

    @property
    def attention_scale(self) -> float | None:
        """The factor of attention scores; None for 1 / sqrt(head_size)."""
        return None

    @property
    def attention_cap(self) -> float | None:
        """What caps attention scores: x → cap · tanh(x / cap); None: nothing does."""
        return None

    @property
    def logits_cap(self) -> float | None:
        """What caps the logits likewise."""
        return None

    @property
    def embedding_scale(self) -> float | None:
        """The factor of embeddings; None for 1."""
        return None


class LlamaConfig(UnifiedConfig):
    """Llama and Mistral, which TensorRT-LLM has one implementation of."""

    architecture: Literal["LlamaForCausalLM", "MistralForCausalLM"]
    hidden_act: Literal["silu"]
    residual_mlp: bool = False
    disable_weight_only_quant_plugin: bool = False
    remove_duplicated_kv_heads: bool = False
    qk_layernorm: bool
    attn_bias: bool
    attn_dense_bias: bool
    mlp_bias: bool
    layer_types: LayerTypes | None = None


class _QwenConfig(UnifiedConfig):
    hidden_act: Literal["silu"]
    seq_length: Count = 8192
    use_logn_attn: bool = False
    mlp_bias: bool
    qwen_type: str
    qk_layernorm: bool
    attn_bias: bool
    attn_dense_bias: bool
    layer_types: LayerTypes | None = None


class Qwen2Config(_QwenConfig):
    """Qwen2 and Qwen2.5: biases on q, k and v."""

    architecture: Literal["Qwen2ForCausalLM"]
    qwen_type: Literal["qwen2"]
    attn_bias: Literal[True]


class Qwen3Config(_QwenConfig):
    """Qwen3: norms of queries and keys instead of biases."""

    architecture: Literal["Qwen3ForCausalLM"]
    qwen_type: Literal["qwen3"]
    qk_layernorm: Literal[True]
    attn_bias: Literal[False]


class Phi3Config(UnifiedConfig):
    """Phi-3: one matrix for gate and up; longrope has keys of its own for its factors."""

    architecture: Literal["Phi3ForCausalLM"]
    hidden_act: Literal["swiglu"]
    qk_layernorm: bool
    attn_bias: bool
    attn_dense_bias: bool
    mlp_bias: bool
    layer_types: LayerTypes | None = None
    rotary_pct: float = 1.0
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


class Gemma2Config(UnifiedConfig):
    """Gemma 2: capped scores and logits, norms before and after; splits its embedding."""

    architecture: Literal["Gemma2ForCausalLM"]
    hidden_act: Literal["gelu_pytorch_tanh", "gelu", "gegelu"]
    qk_layernorm: bool
    mlp_bias: bool
    inter_layernorms: Literal[True]
    attn_bias: bool
    attn_dense_bias: bool
    layer_types: LayerTypes | None = None
    query_pre_attn_scalar: float = Field(gt=0)
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    embedding_multiplier: float
    rounds_norms: bool = False  # for trtllm-build (trtllm_build.py)

    @property
    def one_plus_dtype(self) -> str:
        return self.plain_dtype if self.rounds_norms else "F32"

    @property
    def has_branch_norms(self) -> bool:
        return self.inter_layernorms

    @property
    def attention_scale(self) -> float | None:
        return float(self.query_pre_attn_scalar**-0.5)

    @property
    def attention_cap(self) -> float | None:
        return self.attn_logit_softcapping

    @property
    def logits_cap(self) -> float | None:
        return self.final_logit_softcapping

    @property
    def embedding_scale(self) -> float | None:
        return self.embedding_multiplier

    @model_validator(mode="after")
    def _check_embedding(self) -> Gemma2Config:
        if self.mapping.tp_size > 1 and not self.use_parallel_embedding:
            raise ValueError("Gemma's embedding is split when tp_size is above 1")
        return self


_FAMILIES: TypeAdapter[UnifiedConfig] = TypeAdapter(
    Annotated[
        LlamaConfig | Qwen2Config | Qwen3Config | Phi3Config | Gemma2Config,
        Field(discriminator="architecture"),
    ],
    config=ConfigDict(defer_build=True),
)


def read_unified_config(folder: Path) -> UnifiedConfig:
    """Reads and checks a checkpoint's config.json; CheckpointError lists what is wrong in it."""
    path = folder / "config.json"
    try:
        values = read_json(path)
    except CheckpointError as exc:
        if is_there(path):
            raise
        raise CheckpointError(f"{folder} has no config.json; convert again") from exc
    if "architecture" not in values:
        raise CheckpointError(f"{path} is not that of a unified checkpoint of a supported family")
    try:
        return _FAMILIES.validate_python(values)
    except ValidationError as exc:
        lines = "".join(f"\n  - {fault}" for fault in _faults(exc))
        raise CheckpointError(
            f"{path} is not one that TensorRT-LLM builds an engine from:{lines}"
        ) from exc


def _faults(exc: ValidationError) -> Iterator[str]:
    for error in islice(exc.errors(include_url=False, include_input=False), _MOST_FAULTS):
        # The first part of a place is the family's name, which the file itself names.
        place = ".".join(map(str, error["loc"][1:])) or "architecture"
        message, tag = error["msg"], error.get("ctx", {}).get("tag")
        if tag:  # the file's own word for its architecture
            message = message.replace(tag, show(tag))
        yield f"{show(place)}: {message}"
