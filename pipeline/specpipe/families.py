"""Model families: which Hugging Face tensors make up each tensor of the unified checkpoint.

Conversion is data. A `Family` says how the keys of a Hugging Face `config.json` map to those of the
unified one, and lists one `TensorRule` per unified tensor: its name, the tensors that it is
concatenated from, and how each is split over the tensor-parallel ranks. Converting and merging back
both read these tables, plain weights here and quantized ones with their scales alike.

Names, keys and splits: TensorRT-LLM's checkpoint format, release lines 0.16 to 1.2. Note that
`mlp.fc` is Hugging Face's gate_proj and `mlp.gate` its up_proj. With the activation swiglu (Phi-3)
there is no `mlp.gate`: `mlp.fc` holds up_proj, then gate_proj.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specpipe.errors import CheckpointError, ConfigError, show
from specpipe.file_limits import FILE_LIMITS, FileLimits
from specpipe.hf_config import (
    Rope,
    Windows,
    activation,
    context_length,
    count,
    flag,
    number,
    optional_number,
    positions,
    rope,
    sliding_window,
    vocab_size,
)
from specpipe.quantization.formats import block_size_of
from specpipe.quantization.tensors import kv_cache_rule, quantized_rules
from specpipe.rules import Part, Split, Stage, TensorRule

_SILU = {"silu": "silu", "swish": "silu"}  # one function, as transformers spells it

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""The dtypes of a plain checkpoint, as `config.json` and as safetensors spell them."""


@dataclass(frozen=True)
class Family:
    """One architecture that specpipe converts.

    defaults  what transformers assumes for a key that `config.json` leaves out
    fixed     unified keys that do not depend on `config.json`
    biases    unified bias keys that `config.json` decides, with the key that decides each
    windows   which of its layers have a sliding window

    activation_key, activations
              the key of the MLP's activation, and its values in TensorRT-LLM's spelling
    is_partial
              whether rope may turn a part of each head
    is_capped
              whether attention scores and logits are soft-capped, queries scaled by a number of
              their own and embeddings by the root of their size: Gemma 2
    refused   keys that must not be true
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    biases: Mapping[str, str] = field(default_factory=dict)
    windows: Windows = "never"
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=lambda: _SILU)
    is_partial: bool = False
    is_capped: bool = False
    refused: tuple[str, ...] = ()
    tensors: tuple[TensorRule, ...] = ()


def _linear(
    name: str, parts: tuple[Part, ...], bias_when: str | None = None
) -> tuple[TensorRule, ...]:
    """Returns the rules of a linear layer: its weight and, if it can have one, its bias.

    A bias has its weight's rows. Where the weight is split by columns, each rank adds the bias
    after the all-reduce (TensorRT-LLM, layers/linear.py, RowLinear), so every rank holds all of it.
    """
    weight = TensorRule(
        f"{name}.weight",
        tuple(replace(part, source=f"{part.source}.weight") for part in parts),
    )
    if bias_when is None:
        return (weight,)
    bias_parts = tuple(
        Part(
            f"{part.source}.bias",
            part.shape[:1],
            "none" if part.split == "columns" else part.split,
        )
        for part in parts
    )
    return weight, TensorRule(f"{name}.bias", bias_parts, when=bias_when)


def _norm(
    name: str,
    source: str,
    size: str = "hidden",
    when: str | None = None,
    *,
    stage: Stage = "layer",
    one_plus: bool = False,
) -> TensorRule:
    part = Part(f"{source}.weight", (size,), one_plus=one_plus)
    return TensorRule(f"{name}.weight", (part,), stage, when)


_UNIFIED_LAYER = "transformer.layers.{n}"
_HF_LAYER = "model.layers.{n}"


def _embedding(split: Split = "none") -> TensorRule:
    part = Part("model.embed_tokens.weight", ("vocab", "hidden"), split)
    return TensorRule("transformer.vocab_embedding.weight", (part,), stage="first")


_QKV = _linear(
    f"{_UNIFIED_LAYER}.attention.qkv",
    (
        Part(f"{_HF_LAYER}.self_attn.q_proj", ("heads", "hidden"), "rows"),
        Part(f"{_HF_LAYER}.self_attn.k_proj", ("kv_heads", "hidden"), "kv_heads"),
        Part(f"{_HF_LAYER}.self_attn.v_proj", ("kv_heads", "hidden"), "kv_heads"),
    ),
    bias_when="attn_bias",
)
_HEAD_NORMS = tuple(
    _norm(
        f"{_UNIFIED_LAYER}.attention.{letter}_layernorm",
        f"{_HF_LAYER}.self_attn.{letter}_norm",
        "head_size",
        when="qk_layernorm",
    )
    for letter in "qk"
)
_DENSE = _linear(
    f"{_UNIFIED_LAYER}.attention.dense",
    (Part(f"{_HF_LAYER}.self_attn.o_proj", ("hidden", "heads"), "columns"),),
    bias_when="attn_dense_bias",
)
_MLP_IN = (
    *_linear(
        f"{_UNIFIED_LAYER}.mlp.fc",
        (Part(f"{_HF_LAYER}.mlp.gate_proj", ("intermediate", "hidden"), "rows"),),
        bias_when="mlp_bias",
    ),
    *_linear(
        f"{_UNIFIED_LAYER}.mlp.gate",
        (Part(f"{_HF_LAYER}.mlp.up_proj", ("intermediate", "hidden"), "rows"),),
        bias_when="mlp_bias",
    ),
)
_MLP_OUT = _linear(
    f"{_UNIFIED_LAYER}.mlp.proj",
    (Part(f"{_HF_LAYER}.mlp.down_proj", ("hidden", "intermediate"), "columns"),),
    bias_when="mlp_bias",
)
_HEAD = TensorRule(
    "lm_head.weight", (Part("lm_head.weight", ("vocab", "hidden"), "vocab"),), stage="last"
)

_DECODER: tuple[TensorRule, ...] = (
    _embedding(),
    _norm(f"{_UNIFIED_LAYER}.input_layernorm", f"{_HF_LAYER}.input_layernorm"),
    *_QKV,
    *_HEAD_NORMS,
    *_DENSE,
    _norm(f"{_UNIFIED_LAYER}.post_layernorm", f"{_HF_LAYER}.post_attention_layernorm"),
    *_MLP_IN,
    *_MLP_OUT,
    _norm("transformer.ln_f", "model.norm", stage="last"),
    _HEAD,
)
"""Llama's decoder, which Mistral, Qwen2 and Qwen3 share up to biases and q/k norms."""

_QKV_PROJ, _GATE_UP_PROJ = f"{_HF_LAYER}.self_attn.qkv_proj", f"{_HF_LAYER}.mlp.gate_up_proj"

_PHI3_DECODER: tuple[TensorRule, ...] = (
    _embedding(),
    _norm(f"{_UNIFIED_LAYER}.input_layernorm", f"{_HF_LAYER}.input_layernorm"),
    *_linear(
        f"{_UNIFIED_LAYER}.attention.qkv",
        (
            Part(_QKV_PROJ, ("heads", "hidden"), "rows", (), ("kv_heads", "kv_heads")),
            Part(_QKV_PROJ, ("kv_heads", "hidden"), "kv_heads", ("heads",), ("kv_heads",)),
            Part(_QKV_PROJ, ("kv_heads", "hidden"), "kv_heads", ("heads", "kv_heads")),
        ),
    ),
    *_DENSE,
    _norm(f"{_UNIFIED_LAYER}.post_layernorm", f"{_HF_LAYER}.post_attention_layernorm"),
    # The halves change places: TensorRT-LLM, models/phi3/convert.py.
    *_linear(
        f"{_UNIFIED_LAYER}.mlp.fc",
        (
            Part(_GATE_UP_PROJ, ("intermediate", "hidden"), "rows", ("intermediate",)),
            Part(_GATE_UP_PROJ, ("intermediate", "hidden"), "rows", (), ("intermediate",)),
        ),
    ),
    *_MLP_OUT,
    _norm("transformer.ln_f", "model.norm", stage="last"),
    _HEAD,
)

_GEMMA2_DECODER: tuple[TensorRule, ...] = (
    _embedding("vocab"),
    _norm(f"{_UNIFIED_LAYER}.input_layernorm", f"{_HF_LAYER}.input_layernorm", one_plus=True),
    *_QKV,
    *_DENSE,
    _norm(
        f"{_UNIFIED_LAYER}.post_layernorm", f"{_HF_LAYER}.post_attention_layernorm", one_plus=True
    ),
    *(
        _norm(f"{_UNIFIED_LAYER}.{name}", f"{_HF_LAYER}.{name}", one_plus=True)
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    ),
    *_MLP_IN,
    *_MLP_OUT,
    _norm("transformer.ln_f", "model.norm", stage="last", one_plus=True),
    _HEAD,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Hugging Face's names of the two tensors that `tie_word_embeddings` makes one."""

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old releases of transformers saved; they follow from the config."""

_LLAMA_KEYS = {
    "residual_mlp": False,
    "disable_weight_only_quant_plugin": False,
    "remove_duplicated_kv_heads": False,
}
_QWEN_KEYS = {"seq_length": 8192, "use_logn_attn": False, "mlp_bias": False}
_COMMON_DEFAULTS = {
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": 4096,
}
_QWEN_DEFAULTS = _COMMON_DEFAULTS | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
}

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            architecture="LlamaForCausalLM",
            model_type="llama",
            defaults=_COMMON_DEFAULTS
            | {"num_key_value_heads": None, "max_position_embeddings": 2048},
            fixed=_LLAMA_KEYS | {"qk_layernorm": False},
            biases={
                "attn_bias": "attention_bias",
                "attn_dense_bias": "attention_bias",
                "mlp_bias": "mlp_bias",
            },
            tensors=_DECODER,
        ),
        Family(
            architecture="MistralForCausalLM",
            model_type="mistral",
            defaults=_COMMON_DEFAULTS
            | {"num_key_value_heads": 8, "max_position_embeddings": 131072},
            fixed=_LLAMA_KEYS
            | {
                "qk_layernorm": False,
                "attn_bias": False,
                "attn_dense_bias": False,
                "mlp_bias": False,
            },
            windows="always",
            tensors=_DECODER,
        ),
        Family(
            architecture="Qwen2ForCausalLM",
            model_type="qwen2",
            defaults=_QWEN_DEFAULTS,
            fixed=_QWEN_KEYS
            | {
                "qwen_type": "qwen2",
                "qk_layernorm": False,
                "attn_bias": True,
                "attn_dense_bias": False,
            },
            windows="optional",
            tensors=_DECODER,
        ),
        Family(
            architecture="Qwen3ForCausalLM",
            model_type="qwen3",
            defaults=_QWEN_DEFAULTS | {"head_dim": 128},
            fixed=_QWEN_KEYS
            | {
                "qwen_type": "qwen3",
                "qk_layernorm": True,
                "attn_bias": False,
                "attn_dense_bias": False,
            },
            windows="optional",
            refused=("attention_bias",),
            tensors=_DECODER,
        ),
        Family(
            architecture="Phi3ForCausalLM",
            model_type="phi3",
            defaults=_COMMON_DEFAULTS
            | {
                "num_key_value_heads": None,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "sliding_window": None,
            },
            fixed={
                "qk_layernorm": False,
                "attn_bias": False,
                "attn_dense_bias": False,
                "mlp_bias": False,
            },
            windows="always",
            activations={"silu": "swiglu", "swish": "swiglu"},
            is_partial=True,
            tensors=_PHI3_DECODER,
        ),
        Family(
            architecture="Gemma2ForCausalLM",
            model_type="gemma2",
            defaults=_COMMON_DEFAULTS
            | {
                "num_key_value_heads": 4,
                "head_dim": 256,
                "hidden_activation": "gelu_pytorch_tanh",
                "max_position_embeddings": 8192,
                "tie_word_embeddings": True,
                "query_pre_attn_scalar": 256,
                "final_logit_softcapping": 30.0,
                "attn_logit_softcapping": 50.0,
            },
            fixed={"qk_layernorm": False, "mlp_bias": False, "inter_layernorms": True},
            biases={"attn_bias": "attention_bias", "attn_dense_bias": "attention_bias"},
            windows="alternating",
            activation_key="hidden_activation",
            activations={"gelu_pytorch_tanh": "gelu_pytorch_tanh"},
            is_capped=True,
            refused=("use_bidirectional_attention",),
            tensors=_GEMMA2_DECODER,
        ),
    )
}

_MOST_LAYERS = 1 << 16  # the most that serving.limits.max_num_layers may be
_MAX_LISTED_TP = 64  # the sizes that a message offers


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Returns the family of a Hugging Face config; refuses by name what is not supported."""
    architectures = hf_config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(
            f'config.json names no architecture; add "architectures" ({_supported()})'
        )
    name = show(architectures[0])
    kind = _unsupported_kind(name, hf_config)
    if kind:
        raise CheckpointError(f"{name} is {kind}, which is not supported; {_supported()}")
    if name not in FAMILIES:
        raise CheckpointError(f"architecture {name} is not supported; {_supported()}")
    quantization = hf_config.get("quantization_config") or hf_config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise CheckpointError(
            "the checkpoint is already quantized "
            f"({show(method) if method else 'no quant_method given'}); "
            "use the one it was quantized from"
        )
    family = FAMILIES[name]
    model_type = hf_config.get("model_type", family.model_type)
    if model_type != family.model_type:
        raise CheckpointError(
            f"config.json contradicts itself: architecture {name} has model_type "
            f"'{family.model_type}', not '{show(model_type)}'"
        )
    return family


def unified_config(
    hf_config: Mapping[str, Any],
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    limits: FileLimits = FILE_LIMITS,
) -> dict[str, Any]:
    """Maps a Hugging Face `config.json` to that of the unified checkpoint.

    Both spellings of transformers, 4.57 and 5.x, give the same result. Beside TensorRT-LLM's keys
    it has `attn_dense_bias`, `sliding_window` (null where no window cuts the context short),
    `layer_types` (where only some layers have it) and Gemma's `embedding_multiplier`.
    """
    family = family_of(hf_config)
    config = {**family.defaults, **hf_config}

    def size_of(key: str, default: int | None = None) -> int:
        return count(
            config, key, default=default, maximum=limits.max_layer_size, setting="max_layer_size"
        )

    num_layers = count(
        config, "num_hidden_layers", maximum=limits.max_num_layers, setting="max_num_layers"
    )
    hidden_size = size_of("hidden_size")
    num_heads = size_of("num_attention_heads")
    num_kv_heads = size_of("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if config["head_dim"] is None and hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_heads}, and head_dim is not given"
        )
    head_size = size_of("head_dim", default=hidden_size // num_heads)
    if head_size % 2:
        raise CheckpointError(f"config.json: head_dim {head_size} is odd; rotary needs an even one")
    max_position_embeddings = positions(config, limits)
    rotary = rope(config, max_position_embeddings)
    rotary_size = int(head_size * rotary.partial)
    _check_rotary(family, rotary, rotary_size)
    context = context_length(max_position_embeddings, rotary.scaling, limits)
    window = sliding_window(family.windows, config, context, num_layers)
    unified: dict[str, Any] = {
        "architecture": family.architecture,
        "dtype": _dtype(config),
        "logits_dtype": "float32",
        "vocab_size": vocab_size(config, limits),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_size": head_size,
        "intermediate_size": size_of("intermediate_size"),
        "hidden_act": activation(config, family.activation_key, family.activations),
        "norm_epsilon": number(config, "rms_norm_eps"),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": max_position_embeddings,
        "rotary_embedding_dim": rotary_size,
        "rotary_base": rotary.base,
        "rotary_scaling": rotary.scaling,
        "sliding_window": window.size if window else None,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "tie_word_embeddings": flag(config, "tie_word_embeddings"),
        "mapping": {
            "world_size": tp_size * pp_size,
            "tp_size": tp_size,
            "pp_size": pp_size,
        },
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        **family.fixed,
        **{key: flag(config, hf_key) for key, hf_key in family.biases.items()},
    }
    if window and window.layer_types:
        unified["layer_types"] = window.layer_types
    if family.is_partial:
        unified["rotary_pct"] = rotary.partial
    if rotary.scaling and rotary.scaling["rope_type"] == "longrope":
        unified |= _longrope_keys(rotary.scaling)
    if family.is_capped:
        unified |= _capped_keys(config, tp_size)
    for key in family.refused:
        if config.get(key):
            raise CheckpointError(
                f"config.json: {key} true is not supported for {family.architecture}"
            )
    _check_mapping(unified)
    return unified


def tensor_rules(config: Mapping[str, Any]) -> Iterator[tuple[TensorRule, int | None]]:
    """Yields the rules that hold for a unified config, each layer's with the number of the layer.

    The order is that of the forward pass, and of the tensors in the rank files.
    """
    if config["num_hidden_layers"] > _MOST_LAYERS:  # of an artifact that somebody else made
        raise CheckpointError(
            f"config.json: num_hidden_layers is {show(config['num_hidden_layers'])}, expected at "
            f"most {_MOST_LAYERS}"
        )
    rules = [
        rule
        for rule in FAMILIES[config["architecture"]].tensors
        if rule.when is None or config[rule.when]
    ]
    kv_cache = kv_cache_rule(config)
    for rule in rules:
        if rule.stage == "first":
            yield from ((made, None) for made in quantized_rules(config, rule, None))
    for layer in range(config["num_hidden_layers"]):
        for rule in rules:
            if rule.stage == "layer":
                yield from ((made, layer) for made in quantized_rules(config, rule, layer))
        if kv_cache is not None:
            yield kv_cache, layer
    for rule in rules:
        if rule.stage == "last":
            yield from ((made, None) for made in quantized_rules(config, rule, None))


def part_shape(config: Mapping[str, Any], part: Part) -> tuple[int, ...]:
    """Returns the shape of a part for this config."""
    sizes = _sizes(config)
    return tuple(_size(sizes, name) for name in part.shape)


def _size(sizes: Mapping[str, int], name: str) -> int:
    """Returns a size by its name, which may be divided by a number or another size."""
    whole, _, divisor = name.partition("/")
    size = int(whole) if whole.isdigit() else sizes[whole]
    if not divisor:
        return size
    return size // (int(divisor) if divisor.isdigit() else sizes[divisor])


def source_rows(config: Mapping[str, Any], part: Part) -> tuple[int, int]:
    """Returns how many rows a part's Hugging Face tensor has, and at which the part begins."""
    before = _num_rows(config, part.before)
    return before + _num_rows(config, part.shape[:1]) + _num_rows(config, part.after), before


def stored_dtype(config: Mapping[str, Any], rule: TensorRule) -> str:
    """Returns the dtype of a unified tensor, as safetensors spells it."""
    if rule.parts[0].one_plus:
        return "F32"
    return rule.dtype or DTYPES[config["dtype"]]


def pipeline_layers(config: Mapping[str, Any], pp_rank: int) -> range:
    """Returns the layers of one pipeline stage; the first stages take the layers left over.

    As TensorRT-LLM 1.x divides them (mapping.py, pp_layers).
    """
    size, rest = divmod(config["num_hidden_layers"], config["mapping"]["pp_size"])
    start = pp_rank * size + min(pp_rank, rest)
    return range(start, start + size + (pp_rank < rest))


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    return {
        "vocab": config["vocab_size"],
        "hidden": config["hidden_size"],
        "intermediate": config["intermediate_size"],
        "head_size": config["head_size"],
        "heads": config["num_attention_heads"] * config["head_size"],
        "kv_heads": config["num_key_value_heads"] * config["head_size"],
        "block": block_size_of(config) or 1,
    }


def _num_rows(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    sizes = _sizes(config)
    return sum(sizes[name] for name in names)


def _check_rotary(family: Family, rotary: Rope, rotary_size: int) -> None:
    if rotary.partial != 1 and not family.is_partial:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {rotary.partial} is not supported for "
            f"{family.architecture}; only 1 is"
        )
    if rotary_size < 2 or rotary_size % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {rotary.partial} turns {rotary_size} channels of "
            "a head; rotary needs an even number"
        )
    for key in ("short_factor", "long_factor"):
        factors = (rotary.scaling or {}).get(key)
        if factors is not None and len(factors) != rotary_size // 2:
            raise CheckpointError(
                f"config.json: {key} has {len(factors)} numbers, expected {rotary_size // 2}, half "
                "of the rotary channels of a head"
            )


def _longrope_keys(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Where TensorRT-LLM looks for longrope (models/phi3/config.py); the rest it infers."""
    return {
        "position_embedding_type": "long_rope",
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "longrope_scaling_short_factors": scaling["short_factor"],
        "longrope_scaling_long_factors": scaling["long_factor"],
    }


def _capped_keys(config: Mapping[str, Any], tp_size: int) -> dict[str, Any]:
    """TensorRT-LLM's keys of Gemma 2 (models/gemma/config.py), which splits the embedding too."""
    return {
        "query_pre_attn_scalar": number(config, "query_pre_attn_scalar"),
        "attn_logit_softcapping": optional_number(config, "attn_logit_softcapping"),
        "final_logit_softcapping": optional_number(config, "final_logit_softcapping"),
        "embedding_multiplier": math.sqrt(config["hidden_size"]),
        "use_parallel_embedding": tp_size > 1,
    }


def _supported() -> str:
    return "supported: " + ", ".join(FAMILIES)


def _unsupported_kind(name: str, config: Mapping[str, Any]) -> str | None:
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")) or (
        "Moe" in name or "Mixtral" in name
    ):
        return "a mixture of experts"
    modalities = [
        key
        for key in ("vision_config", "audio_config", "text_config", "thinker_config")
        if config.get(key)
    ]
    if modalities or name.endswith("ForConditionalGeneration"):
        return "a multimodal or encoder-decoder model"
    return None


def _check_mapping(config: Mapping[str, Any]) -> None:
    tp_size: int = config["mapping"]["tp_size"]
    pp_size: int = config["mapping"]["pp_size"]
    num_heads: int = config["num_attention_heads"]
    num_kv_heads: int = config["num_key_value_heads"]
    intermediate: int = config["intermediate_size"]
    num_layers: int = config["num_hidden_layers"]

    def splits(size: int) -> bool:
        kv_fits = num_kv_heads % size == 0 or size % num_kv_heads == 0
        return kv_fits and num_heads % size == 0 and intermediate % size == 0

    if tp_size < 1 or not splits(tp_size):
        possible = (size for size in range(1, min(num_heads, _MAX_LISTED_TP) + 1) if splits(size))
        raise ConfigError(
            f"tp_size {tp_size} cannot split {num_heads} query heads, {num_kv_heads} KV heads and "
            f"an intermediate size of {intermediate}: it must divide the first and the last, and "
            "divide the KV heads or be a multiple of them; possible: "
            + ", ".join(map(str, possible))
        )
    if not 1 <= pp_size <= num_layers:
        raise ConfigError(
            f"pp_size {pp_size} cannot split {num_layers} layers; possible: 1 to {num_layers}"
        )


def named_dtype(hf_config: Mapping[str, Any]) -> str:
    """Returns the dtype that a Hugging Face config names; bfloat16 where the weights decide."""
    name = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return name if isinstance(name, str) and name in DTYPES else "bfloat16"


def _dtype(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype")
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(
            f"config.json: dtype '{show(name)}' is not supported; supported: {', '.join(DTYPES)}"
        )
    return name
