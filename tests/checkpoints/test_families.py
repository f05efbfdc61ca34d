from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from specpipe.checkpoints.families import FAMILIES
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.unified_config import Gemma2Config, Phi3Config, UnifiedConfig
from specpipe.checkpoints.unified_layout import pipeline_layers, tensor_rules
from specpipe.errors import CheckpointError, ConfigError
from tests.toy import LLAMA3_SCALING, toy_config

SUPPORTED = (
    "supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
    "Phi3ForCausalLM, Gemma2ForCausalLM"
)

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}


def refusal(config: Mapping[str, Any], **mapping: int) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        unified_config(config, **mapping)
    return str(caught.value)


def differences(config: UnifiedConfig, other: UnifiedConfig) -> dict[str, Any]:
    theirs = other.plain()
    return {key: value for key, value in config.plain().items() if theirs.get(key) != value}


def test_llama_config_in_full() -> None:
    config = toy_config(
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_SCALING}
    )
    assert unified_config(config, tp_size=2, pp_size=2).plain() == {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "vocab_size": 256,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": 8,
        "intermediate_size": 64,
        "hidden_act": "silu",
        "norm_epsilon": 1e-5,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": 512,
        "rotary_embedding_dim": 8,
        "rotary_base": 500000.0,
        "rotary_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_window": None,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "tie_word_embeddings": False,
        "mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "residual_mlp": False,
        "disable_weight_only_quant_plugin": False,
        "remove_duplicated_kv_heads": False,
        "qk_layernorm": False,
        "attn_bias": False,
        "attn_dense_bias": False,
        "mlp_bias": False,
    }


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        ("llama", {"attention_bias": True}, (True, True, False, False)),
        ("llama", {"mlp_bias": True}, (False, False, True, False)),
        ("mistral", {}, (False, False, False, False)),
        ("qwen2", {}, (True, False, False, False)),
        ("qwen3", {}, (False, False, False, True)),
        ("phi3", {}, (False, False, False, False)),
        ("gemma2", {}, (False, False, False, False)),
        ("gemma2", {"attention_bias": True}, (True, True, False, False)),
    ],
)
def test_biases_and_norms(
    family: str, overrides: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    config = unified_config(toy_config(family, **overrides))
    keys = ("attn_bias", "attn_dense_bias", "mlp_bias", "qk_layernorm")
    assert tuple(getattr(config, key) for key in keys) == expected
    names = {rule.name.removeprefix("transformer.layers.{n}.") for rule, _ in tensor_rules(config)}
    assert (
        "attention.qkv.bias" in names,
        "attention.dense.bias" in names,
        {"mlp.fc.bias", "mlp.gate.bias", "mlp.proj.bias"} <= names,
        {"attention.q_layernorm.weight", "attention.k_layernorm.weight"} <= names,
    ) == expected


def test_left_out_keys_mean_what_transformers_assumes() -> None:
    names = "head_dim num_key_value_heads max_position_embeddings rms_norm_eps rope_parameters"
    names += " tie_word_embeddings hidden_act sliding_window"
    bare: dict[str, Any] = dict.fromkeys(names.split(), ...)
    heads = {"num_attention_heads": 32, "hidden_size": 256}
    expected = {
        "llama": (8, 32, 2048, None),
        "mistral": (8, 8, 131072, 4096),
        "qwen2": (8, 32, 32768, None),
        "qwen3": (128, 32, 32768, None),
        "phi3": (8, 32, 4096, None),
        "gemma2": (256, 4, 8192, 4096),
    }
    for family, values in expected.items():
        config = unified_config(toy_config(family, **bare, **heads))
        keys = ("head_size", "num_key_value_heads", "max_position_embeddings", "sliding_window")
        assert tuple(getattr(config, key) for key in keys) == values
        assert config.norm_epsilon == (1e-5 if family == "phi3" else 1e-6)
        assert config.rotary_base == 10000.0
        assert config.tie_word_embeddings is (family == "gemma2")
    names = "hidden_activation query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"
    config = unified_config(toy_config("gemma2", **dict.fromkeys(names.split(), ...)))
    assert isinstance(config, Gemma2Config)
    assert config.hidden_act == "gelu_pytorch_tanh"
    assert config.query_pre_attn_scalar == 256
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)


def test_what_phi3_has_otherwise() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    rope |= {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
    config = unified_config(
        toy_config("phi3", rope_parameters=rope, original_max_position_embeddings=128)
    )
    plain = unified_config(toy_config("phi3"))
    assert differences(config, plain) == {
        "position_embedding_type": "long_rope",
        "rotary_embedding_dim": 4,
        "rotary_pct": 0.5,
        "rotary_scaling": {
            "rope_type": "longrope",
            "original_max_position_embeddings": 128,
            # sqrt(1 + ln(512 / 128) / ln(128))
            "attention_factor": pytest.approx(1.133893, abs=1e-6),
            "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 4.0],
        },
        "original_max_position_embeddings": 128,
        "longrope_scaling_short_factors": [1.0, 1.5],
        "longrope_scaling_long_factors": [2.0, 4.0],
    }
    assert isinstance(plain, Phi3Config)
    assert plain.hidden_act == "swiglu"
    assert (plain.rotary_pct, plain.rotary_embedding_dim) == (1.0, 8)
    names = [rule.name.rsplit("}.")[-1] for rule, layer in tensor_rules(plain) if layer == 0]
    assert names == [
        "input_layernorm.weight",
        "attention.qkv.weight",
        "attention.dense.weight",
        "post_layernorm.weight",
        "mlp.fc.weight",
        "mlp.proj.weight",
    ]


def test_what_gemma2_has_otherwise() -> None:
    config, llama = unified_config(toy_config("gemma2")), unified_config(toy_config())
    assert differences(config, llama) == {
        "architecture": "Gemma2ForCausalLM",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
        "inter_layernorms": True,
        "query_pre_attn_scalar": 24.0,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "embedding_multiplier": pytest.approx(5.656854, abs=1e-6),
    }
    assert unified_config(toy_config("gemma2"), tp_size=2).use_parallel_embedding is True
    names = [rule.name.rsplit("}.")[-1] for rule, layer in tensor_rules(config) if layer == 0]
    assert names == [
        "input_layernorm.weight",
        "attention.qkv.weight",
        "attention.dense.weight",
        "post_layernorm.weight",
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "mlp.fc.weight",
        "mlp.gate.weight",
        "mlp.proj.weight",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
            f"MixtralForCausalLM is a mixture of experts, which is not supported; {SUPPORTED}",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128},
            f"Qwen3MoeForCausalLM is a mixture of experts, which is not supported; {SUPPORTED}",
        ),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"depth": 1}},
            "LlavaForConditionalGeneration is a multimodal or encoder-decoder model, "
            f"which is not supported; {SUPPORTED}",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            f"architecture GPT2LMHeadModel is not supported; {SUPPORTED}",
        ),
        (
            {"architectures": ...},
            f'config.json names no architecture; add "architectures" ({SUPPORTED})',
        ),
        (
            {"model_type": "mistral"},
            "config.json contradicts itself: architecture LlamaForCausalLM has model_type 'llama', "
            "not 'mistral'",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "the checkpoint is already quantized (awq); use the one it was quantized from",
        ),
        (
            {"hidden_act": "gelu"},
            "config.json: hidden_act 'gelu' is not supported; only silu is",
        ),
        (
            {"dtype": "float8_e4m3fn"},
            "config.json: dtype 'float8_e4m3fn' is not supported; "
            "supported: float32, bfloat16, float16",
        ),
        (
            {"num_hidden_layers": 0},
            "config.json: num_hidden_layers is 0, expected a whole number of at least 1",
        ),
        (
            {"hidden_size": "32"},
            "config.json: hidden_size is '32', expected a whole number of at least 1",
        ),
        (
            {"vocab_size": ...},
            "config.json: vocab_size is None, expected a whole number of at least 1",
        ),
        (
            {"rms_norm_eps": -1e-5},
            "config.json: rms_norm_eps is -1e-05, expected a positive number",
        ),
        (
            {"tie_word_embeddings": "yes"},
            "config.json: tie_word_embeddings is 'yes', expected true or false",
        ),
        (
            {"num_key_value_heads": 3},
            "config.json: num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        (
            {"head_dim": None, "num_attention_heads": 6, "num_key_value_heads": 2},
            "config.json: hidden_size 32 is not a multiple of num_attention_heads 6, "
            "and head_dim is not given",
        ),
        ({"head_dim": 7}, "config.json: head_dim 7 is odd; rotary needs an even one"),
    ],
)
def test_unsupported_is_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    assert refusal(toy_config(**overrides)) == message


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        (
            "qwen3",
            {"attention_bias": True},
            "attention_bias true is not supported for Qwen3ForCausalLM",
        ),
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention true is not supported for Gemma2ForCausalLM",
        ),
        (
            "gemma2",
            {"hidden_activation": "relu"},
            "hidden_activation 'relu' is not supported; only gelu_pytorch_tanh is",
        ),
        (
            "gemma2",
            {"attn_logit_softcapping": -1.0},
            "attn_logit_softcapping is -1.0, expected a positive number",
        ),
        (
            "gemma2",
            {"layer_types": ["sliding_attention"]},
            "layer_types is ['sliding_attention'], expected a list with one entry for each of the "
            "2 layers",
        ),
        (
            "gemma2",
            {"layer_types": ["sliding_attention", "linear_attention"]},
            "layer type 'linear_attention' is not supported; "
            "supported: full_attention, sliding_attention",
        ),
        (
            "phi3",
            {"partial_rotary_factor": 0.4},
            "partial_rotary_factor 0.4 turns 3 channels of a head; rotary needs an even number",
        ),
        (
            "phi3",
            {"rope_parameters": LONGROPE | {"long_factor": [1.0, 2.0, 3.0]}},
            "long_factor has 3 numbers, expected 4, half of the rotary channels of a head",
        ),
    ],
)
def test_what_a_family_cannot_have_is_refused(
    family: str, overrides: dict[str, Any], message: str
) -> None:
    assert refusal(toy_config(family, **overrides)) == f"config.json: {message}"


@pytest.mark.parametrize(
    ("tp_size", "overrides", "numbers", "possible"),
    [
        (3, {}, "4 query heads, 2 KV heads and an intermediate size of 64", "1, 2, 4"),
        (0, {}, "4 query heads, 2 KV heads and an intermediate size of 64", "1, 2, 4"),
        (8, {}, "4 query heads, 2 KV heads and an intermediate size of 64", "1, 2, 4"),
        (
            4,
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            "12 query heads, 6 KV heads and an intermediate size of 64",
            "1, 2",
        ),
        (
            4,
            {"intermediate_size": 66},
            "4 query heads, 2 KV heads and an intermediate size of 66",
            "1, 2",
        ),
    ],
)
def test_impossible_tp_is_refused_with_the_numbers(
    tp_size: int, overrides: dict[str, Any], numbers: str, possible: str
) -> None:
    assert refusal(toy_config(**overrides), tp_size=tp_size) == (
        f"tp_size {tp_size} cannot split {numbers}: it must divide the first and the last, and "
        f"divide the KV heads or be a multiple of them; possible: {possible}"
    )


@pytest.mark.parametrize("pp_size", [0, 3])
def test_impossible_pp_is_refused_with_the_numbers(pp_size: int) -> None:
    assert refusal(toy_config(), pp_size=pp_size) == (
        f"pp_size {pp_size} cannot split 2 layers; possible: 1 to 2"
    )


def test_first_pipeline_stages_take_the_layers_left_over() -> None:
    config = unified_config(toy_config(num_hidden_layers=11), pp_size=4)
    assert [pipeline_layers(config, rank) for rank in range(4)] == [
        range(3),
        range(3, 6),
        range(6, 9),
        range(9, 11),
    ]


def test_each_family_is_listed_under_its_architecture() -> None:
    assert {name: family.model_type for name, family in FAMILIES.items()} == {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Phi3ForCausalLM": "phi3",
        "Gemma2ForCausalLM": "gemma2",
    }
