"""Model families: how a Hugging Face `config.json` maps to that of the unified checkpoint.

Conversion is data. A `Family` says how the keys map, and lists the tensors (decoder_tensors.py).
Keys: TensorRT-LLM's checkpoint format, release lines 0.16 to 1.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specpipe.checkpoints.decoder_tensors import GEMMA2_DECODER, LLAMA_DECODER, PHI3_DECODER
from specpipe.checkpoints.hf_config import Windows
from specpipe.checkpoints.rules import TensorRule

_SILU = {"silu": "silu", "swish": "silu"}  # one function, as transformers spells it


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
            tensors=LLAMA_DECODER,
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
            tensors=LLAMA_DECODER,
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
            tensors=LLAMA_DECODER,
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
            tensors=LLAMA_DECODER,
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
            tensors=PHI3_DECODER,
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
            tensors=GEMMA2_DECODER,
        ),
    )
}
