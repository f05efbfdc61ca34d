"""Reads the values of a Hugging Face `config.json`, and refuses those that cannot be honoured.

transformers 4.57 and 5.x spell rope in different ways; both are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from specpipe.errors import CheckpointError

Windows = Literal["always", "optional", "never"]
"""Whether a family's sliding windows are always on, need `use_sliding_window`, or do not exist."""

_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""The numbers that each supported rope scaling needs."""


def context_length(max_position_embeddings: int, rotary_scaling: Mapping[str, Any] | None) -> int:
    """Positions that a model is made for, from what `rope` returns.

    Linear and dynamic scaling stretch `max_position_embeddings`, as trtllm-build counts it; with
    llama3 scaling that number is the stretched one already.
    """
    if rotary_scaling is not None and rotary_scaling["rope_type"] in ("linear", "dynamic"):
        return int(max_position_embeddings * rotary_scaling["factor"])
    return max_position_embeddings


def rope(
    config: Mapping[str, Any], max_position_embeddings: int
) -> tuple[float, dict[str, Any] | None]:
    """Returns `rotary_base` and `rotary_scaling` (None for plain rope).

    transformers 5.x keeps all in `rope_parameters`, 4.57 in `rope_theta` and `rope_scaling`; a
    config that has both must say the same twice.
    """
    common = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    legacy = common | _section(config, "rope_scaling")
    current = _section(config, "rope_parameters")
    if not current:
        return _read_rope(legacy, max_position_embeddings)
    result = _read_rope(common | current, max_position_embeddings)
    if config.get("rope_scaling") and _read_rope(legacy, max_position_embeddings) != result:
        raise CheckpointError(
            "config.json contradicts itself: rope_parameters and rope_scaling differ; "
            "remove the one that is wrong"
        )
    return result


def sliding_window(
    windows: Windows, config: Mapping[str, Any], max_position_embeddings: int
) -> int | None:
    """Returns how many tokens a position attends to, itself included; None where all of them."""
    if windows == "never" or config["sliding_window"] is None:
        return None
    if windows == "optional":
        num_layers = config["num_hidden_layers"]
        layer_types = config.get("layer_types")
        if not config.get("use_sliding_window"):
            return None
        if layer_types is None and count(config, "max_window_layers", minimum=0) >= num_layers:
            return None
        if isinstance(layer_types, list) and "sliding_attention" not in layer_types:
            return None
    window = count(config, "sliding_window")
    return window if window < max_position_embeddings else None


def activation(config: Mapping[str, Any]) -> str:
    """Returns the activation of the MLP in TensorRT-LLM's spelling; silu selects the gated MLP."""
    name = config["hidden_act"]
    if name not in ("silu", "swish"):
        raise CheckpointError(f"config.json: hidden_act '{name}' is not supported; only silu is")
    return "silu"


def count(
    config: Mapping[str, Any], key: str, *, default: int | None = None, minimum: int = 1
) -> int:
    """Reads a whole number; null counts as left out."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise CheckpointError(
            f"config.json: {key} is {value!r}, expected a whole number of at least {minimum}"
        )
    return value


def number(config: Mapping[str, Any], key: str) -> float:
    """Reads a positive number."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise CheckpointError(f"config.json: {key} is {value!r}, expected a positive number")
    return float(value)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Reads a truth value; null is false."""
    value = config[key]
    if value is None:
        return False
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} is {value!r}, expected true or false")
    return value


def _read_rope(
    values: Mapping[str, Any], max_position_embeddings: int
) -> tuple[float, dict[str, Any] | None]:
    kind = values.get("rope_type") or values.get("type") or "default"
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise CheckpointError(
            f"config.json: rope type '{kind}' is not supported; supported: {', '.join(_ROPE_KEYS)}"
        )
    if (values.get("type") or kind) != kind:
        raise CheckpointError(
            f"config.json: rope type is '{kind}' by rope_type and '{values['type']}' by type"
        )
    if values.get("partial_rotary_factor") not in (None, 1):
        raise CheckpointError(
            f"config.json: partial_rotary_factor {values['partial_rotary_factor']} is not "
            "supported; only 1 is"
        )
    base = float(number(values, "rope_theta"))
    if kind == "default":
        return base, None
    scaling: dict[str, Any] = {"rope_type": kind}
    for key in _ROPE_KEYS[kind]:
        if key == "original_max_position_embeddings":
            scaling[key] = count(values, key)
        else:
            scaling[key] = float(number(values, key))
    if scaling["factor"] < 1:
        raise CheckpointError(f"config.json: rope factor {scaling['factor']} is below 1")
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise CheckpointError(
            f"config.json: rope low_freq_factor {scaling['low_freq_factor']} is not below "
            f"high_freq_factor {scaling['high_freq_factor']}"
        )
    if kind == "dynamic":
        # transformers measures from max_position_embeddings, whatever else the config says.
        scaling["original_max_position_embeddings"] = max_position_embeddings
    return base, scaling


def _section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {key} is {value!r}, expected an object")
    return value
