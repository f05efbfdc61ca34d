"""A Hugging Face `config.json` as the config of the unified checkpoint; refusals name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specpipe.checkpoints.families import FAMILIES, Family
from specpipe.checkpoints.hf_config import (
    Rope,
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
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.parallel_draft import parallel_keys
from specpipe.checkpoints.unified_config import DTYPES, UnifiedConfig
from specpipe.checkpoints.unified_sections import UNQUANTIZED
from specpipe.errors import CheckpointError, ConfigError, show

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
) -> UnifiedConfig:
    """Maps a Hugging Face `config.json` to that of the unified checkpoint.

    Both spellings of transformers, 4.57 and 5.x, give the same result.
    """
    family = family_of(hf_config)
    config = {**family.defaults, **hf_config}

    def size_of(key: str, default: int | None = None) -> int:
        return count(config, key, default=default, limit=(limits, "max_layer_size"))

    num_layers = count(config, "num_hidden_layers", limit=(limits, "max_num_layers"))
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
        "dtype": supported_dtype(config),
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
        "mapping": {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size},
        "quantization": UNQUANTIZED.plain(),
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
    unified |= parallel_keys(config, unified["vocab_size"])
    for key in family.refused:
        if config.get(key):
            raise CheckpointError(
                f"config.json: {key} true is not supported for {family.architecture}"
            )
    _check_mapping(unified)
    return UnifiedConfig.from_json(unified)


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
    """Returns the keys in which TensorRT-LLM reads longrope (models/phi3/config.py)."""
    return {
        "position_embedding_type": "long_rope",
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "longrope_scaling_short_factors": scaling["short_factor"],
        "longrope_scaling_long_factors": scaling["long_factor"],
    }


def _capped_keys(config: Mapping[str, Any], tp_size: int) -> dict[str, Any]:
    """Returns TensorRT-LLM's keys of Gemma 2, whose embedding is split (models/gemma/config.py)."""
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
    name = _dtype(hf_config)
    return name if name in DTYPES else "bfloat16"


def supported_dtype(hf_config: Mapping[str, Any]) -> str:
    """Returns the dtype that a Hugging Face config names; refuses what no plain checkpoint has."""
    name = _dtype(hf_config)
    if name not in DTYPES:
        raise CheckpointError(
            f"config.json: dtype '{show(name)}' is not supported; supported: {', '.join(DTYPES)}"
        )
    return name


def _dtype(hf_config: Mapping[str, Any]) -> str:
    name = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return str(name).removeprefix("torch.")
