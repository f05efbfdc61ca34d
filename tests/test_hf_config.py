from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import CheckpointError
from specpipe.families import unified_config
from tests.toy import ARCHITECTURES, toy_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def legacy(config: Mapping[str, Any]) -> dict[str, Any]:
    """Spells a config as transformers 4.57 does."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    return config


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
        {"rope_type": "llama3", **LLAMA3},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_both_spellings_of_transformers(family: str, rope: dict[str, Any]) -> None:
    new = toy_config(family, rope_parameters={"rope_theta": 5e5, **rope})
    old = legacy(new)
    assert unified_config(old) == unified_config(new)
    assert unified_config(new)["rotary_base"] == 500000.0
    if old["rope_scaling"]:
        old["rope_scaling"]["type"] = old["rope_scaling"].pop("rope_type")
        assert unified_config(old) == unified_config(new)


@pytest.mark.parametrize("empty", [{"rope_type": None}, {"type": "default"}, {}, None])
def test_rope_without_scaling(empty: dict[str, Any] | None) -> None:
    config = toy_config(rope_parameters=..., rope_theta=5e5, rope_scaling=empty)
    unified = unified_config(config)
    assert (unified["rotary_base"], unified["rotary_scaling"]) == (500000.0, None)


def test_dynamic_scaling_starts_at_the_context_length() -> None:
    config = toy_config(rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2})
    assert unified_config(config)["rotary_scaling"] == {
        "rope_type": "dynamic",
        "factor": 2.0,
        "original_max_position_embeddings": 512,
    }


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"type": "yarn", "factor": 4.0},
            "rope type 'yarn' is not supported; supported: default, linear, dynamic, llama3",
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
            {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0},
            "rope low_freq_factor 4.0 is not below high_freq_factor 4.0",
        ),
        (
            {"type": "default", "partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5 is not supported; only 1 is",
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


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        ("llama", {"sliding_window": 64}, None),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": 512}, None),
        ("qwen2", {"sliding_window": 64}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, None),
        (
            "qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            64,
        ),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            64,
        ),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "full_attention"],
            },
            None,
        ),
    ],
)
def test_sliding_window_is_kept_where_it_has_an_effect(
    family: str, overrides: dict[str, Any], expected: int | None
) -> None:
    assert unified_config(toy_config(family, **overrides))["sliding_window"] == expected


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("spelling", ["4.57", "5"])
def test_agrees_with_transformers(tmp_path: Path, family: str, spelling: str) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    config = toy_config(family, rope_parameters=rope, num_key_value_heads=..., head_dim=...)
    config |= {"num_attention_heads": 32, "hidden_size": 256}
    if spelling == "4.57":
        config = legacy(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = unified_config(config)
    assert ours["rotary_base"] == theirs.rope_parameters["rope_theta"]
    scaling = ours["rotary_scaling"]
    assert scaling == {key: theirs.rope_parameters[key] for key in scaling}
    assert ours["num_key_value_heads"] == theirs.num_key_value_heads
    head_size = 8 if family == "qwen2" else theirs.head_dim  # Qwen2 has no head_dim of its own
    assert ours["head_size"] == head_size
    assert ours["norm_epsilon"] == theirs.rms_norm_eps
    assert ours["tie_word_embeddings"] == theirs.tie_word_embeddings
    assert ours["max_position_embeddings"] == theirs.max_position_embeddings
