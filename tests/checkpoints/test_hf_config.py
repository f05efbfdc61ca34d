from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.hf_config import context_length
from specpipe.errors import CheckpointError
from tests.toy import ARCHITECTURES, LLAMA3_SCALING, spelled_as_4_57, toy_config

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}


def refusal(config: Mapping[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        unified_config(config)
    return str(caught.value)


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", **LLAMA3_SCALING},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16},
        {"rope_type": "longrope", **LONGROPE},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_both_spellings_of_transformers(family: str, rope: dict[str, Any]) -> None:
    new = toy_config(family, rope_parameters={"rope_theta": 5e5, **rope})
    old = spelled_as_4_57(new)
    assert unified_config(old) == unified_config(new)
    assert unified_config(new).rotary_base == 500000.0
    if old["rope_scaling"] and family != "phi3":
        old["rope_scaling"]["type"] = old["rope_scaling"].pop("rope_type")
        assert unified_config(old) == unified_config(new)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_first_names_of_longrope(name: str) -> None:
    old = spelled_as_4_57(toy_config("phi3", rope_parameters={"rope_theta": 1e4, **LONGROPE}))
    old["rope_scaling"]["type"] = name
    assert unified_config(old).rotary_scaling["rope_type"] == "longrope"


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        # 0.1 ln 4 + 1
        ({}, (512, 1.138629, 32.0, 1.0, True)),
        ({"original_max_position_embeddings": 64}, (64, 1.138629, 32.0, 1.0, True)),
        ({"attention_factor": 1.5, "mscale": 2.0}, (512, 1.5, 32.0, 1.0, True)),
        # (0.2 ln 4 + 1) / (0.05 ln 4 + 1)
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, (512, 1.194465, 32.0, 1.0, True)),
        ({"mscale": 2.0, "mscale_all_dim": 0}, (512, 1.138629, 32.0, 1.0, True)),
        (
            {"beta_fast": 8, "beta_slow": 2, "truncate": False},
            (512, 1.138629, 8.0, 2.0, False),
        ),
    ],
)
def test_yarn_is_written_with_all_its_numbers(
    numbers: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4, **numbers}
    scaling = unified_config(toy_config(rope_parameters=rope)).rotary_scaling
    original, attention_factor, beta_fast, beta_slow, truncate = expected
    assert scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": original,
        "attention_factor": pytest.approx(attention_factor, abs=1e-6),
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "truncate": truncate,
    }


def test_phi3_has_the_original_length_beside_its_rope() -> None:
    rope = {"rope_theta": 1e4, **LONGROPE, "original_max_position_embeddings": 64}
    for beside, expected in ((100, 100), (None, 64), (..., 4096)):
        config = toy_config("phi3", rope_parameters=rope, original_max_position_embeddings=beside)
        scaling = unified_config(config).rotary_scaling
        assert scaling["original_max_position_embeddings"] == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, 1.224745),  # sqrt(1 + ln(512 / 64) / ln(64))
        ({"factor": 4.0}, 1.154701),  # sqrt(1 + ln(4) / ln(64))
        ({"factor": 4.0, "attention_factor": 1.5}, 1.5),
        ({"original_max_position_embeddings": 600}, 1.0),
    ],
)
def test_longrope_attention_factor(numbers: dict[str, Any], expected: float) -> None:
    rope = {"rope_theta": 1e4, **LONGROPE, "original_max_position_embeddings": 64, **numbers}
    scaling = unified_config(toy_config(rope_parameters=rope)).rotary_scaling
    assert scaling["attention_factor"] == pytest.approx(expected, abs=1e-6)


def test_context_length() -> None:
    assert context_length(512, None) == 512
    assert context_length(512, {"rope_type": "linear", "factor": 4.0}) == 2048
    assert context_length(512, {"rope_type": "llama3", "factor": 8.0}) == 512
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert (context_length(512, yarn), context_length(2048, yarn)) == (2048, 2048)
    assert context_length(512, {"rope_type": "longrope"}) == 512


@pytest.mark.parametrize("empty", [{"rope_type": None}, {"type": "default"}, {}, None])
def test_rope_without_scaling(empty: dict[str, Any] | None) -> None:
    config = toy_config(rope_parameters=..., rope_theta=5e5, rope_scaling=empty)
    unified = unified_config(config)
    assert (unified.rotary_base, unified.rotary_scaling) == (500000.0, None)


def test_dynamic_scaling_starts_at_the_context_length() -> None:
    config = toy_config(rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2})
    assert unified_config(config).rotary_scaling == {
        "rope_type": "dynamic",
        "factor": 2.0,
        "original_max_position_embeddings": 512,
    }


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"type": "spiral", "factor": 4.0},
            "rope type 'spiral' is not supported; "
            "supported: default, linear, dynamic, llama3, yarn, longrope",
        ),
        (
            {"rope_type": "llama3", "type": "linear", "factor": 4.0},
            "rope type is 'llama3' by rope_type and 'linear' by type",
        ),
        (
            {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings is None, expected a whole number of at least 1",
        ),
        ({"type": "linear"}, "factor is None, expected a positive number"),
        ({"type": "linear", "factor": "2"}, "factor is '2', expected a positive number"),
        ({"type": "linear", "factor": 0.5}, "rope factor 0.5 is below 1"),
        (
            {"type": "llama3", **LLAMA3_SCALING, "low_freq_factor": 4.0},
            "rope low_freq_factor 4.0 is not below high_freq_factor 4.0",
        ),
        (
            {"type": "default", "partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5 is not supported for LlamaForCausalLM; only 1 is",
        ),
        ({"type": "default", "partial_rotary_factor": 2}, "partial_rotary_factor 2.0 is above 1"),
        ({"type": "yarn"}, "factor is None, expected a positive number"),
        (
            {"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2},
            "rope beta_fast 1.0 is below beta_slow 2.0",
        ),
        (
            {"type": "yarn", "factor": 4.0, "rope_theta": 1},
            "rope_theta 1.0 is not above 1, which yarn needs",
        ),
        (
            {"type": "yarn", "factor": 4.0, "truncate": 0},
            "truncate is 0, expected true or false",
        ),
        (
            {"type": "longrope", "short_factor": [1.0]},
            "long_factor is None, expected a list of numbers",
        ),
        (
            {"type": "longrope", "short_factor": [1.0, "2"]},
            "short_factor[1] is '2', expected a positive number",
        ),
        (
            {"type": "longrope", "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1, expected a whole number of at least 2",
        ),
        ([2.0], "rope_scaling is [2.0], expected an object"),
    ],
)
def test_bad_rope_is_refused(rope: Any, message: str) -> None:
    config = toy_config(rope_parameters=..., rope_theta=1e4, rope_scaling=rope)
    assert refusal(config) == f"config.json: {message}"


def test_contradicting_rope_is_refused() -> None:
    config = toy_config(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0})
    assert refusal(config) == (
        "config.json contradicts itself: rope_parameters and rope_scaling differ; "
        "remove the one that is wrong"
    )


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        ("llama", {"sliding_window": 64}, (None, None)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("mistral", {"sliding_window": 64}, (64, None)),
        ("mistral", {"sliding_window": 64, "layer_types": [FULL, SLIDING]}, (64, None)),
        ("mistral", {"sliding_window": 512}, (None, None)),
        ("mistral", {"sliding_window": 512, "rope_parameters": LINEAR}, (512, None)),
        ("qwen2", {"sliding_window": 64}, (None, None)),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, (None, None)),
        (
            "qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            (64, [FULL, SLIDING]),
        ),
        (
            "qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0},
            (64, None),
        ),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": [SLIDING, FULL],
            },
            (64, [SLIDING, FULL]),
        ),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": [FULL, FULL],
            },
            (None, None),
        ),
        ("phi3", {"sliding_window": 64}, (64, None)),
        ("gemma2", {"num_hidden_layers": 3}, (64, [SLIDING, FULL, SLIDING])),
        ("gemma2", {"layer_types": [FULL, SLIDING]}, (64, [FULL, SLIDING])),
        ("gemma2", {"sliding_window": 512}, (None, None)),
    ],
)
def test_sliding_window_is_kept_where_it_has_an_effect(
    family: str, overrides: dict[str, Any], expected: tuple[int | None, list[str] | None]
) -> None:
    config = unified_config(toy_config(family, **overrides))
    assert (config.sliding_window, config.layer_types) == expected


def test_no_list_is_made_of_more_layers_than_any_model_has() -> None:
    assert refusal(toy_config("gemma2", num_hidden_layers=10**9)) == (
        "config.json: num_hidden_layers is 1000000000, expected at most 512 "
        "(serving.limits.max_num_layers)"
    )


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("spelling", ["4.57", "5"])
def test_agrees_with_transformers(tmp_path: Path, family: str, spelling: str) -> None:
    transformers = pytest.importorskip("transformers")
    if spelling == "5" and transformers.__version__.startswith("4."):
        pytest.skip("this transformers does not read it")
    scaling = LONGROPE if family == "phi3" else {"rope_type": "llama3", **LLAMA3_SCALING}
    rope = {"rope_theta": 5e5, **scaling}
    config = toy_config(family, rope_parameters=rope, num_key_value_heads=..., head_dim=...)
    config |= {"num_attention_heads": 32, "hidden_size": 256}
    if spelling == "4.57":
        config = spelled_as_4_57(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = unified_config(config)
    if hasattr(theirs, "rope_parameters"):
        their_rope = theirs.rope_parameters
    else:
        their_rope = {"rope_theta": theirs.rope_theta, **theirs.rope_scaling}
    assert ours.rotary_base == their_rope["rope_theta"]
    assert {key: their_rope[key] for key in scaling if key != "rope_type"} == {
        key: ours.rotary_scaling[key] for key in scaling if key != "rope_type"
    }
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    # Qwen2 and Phi-3 have no head_dim of their own, Mistral has None in 4.57.
    assert ours.head_size == (getattr(theirs, "head_dim", None) or 256 // 32)
    assert ours.norm_epsilon == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
