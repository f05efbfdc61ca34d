"""Reads the values of a Hugging Face `config.json`, and refuses those that cannot be honoured.

transformers 4.57 and 5.x spell rope in different ways; both are read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specpipe.checkpoints.files import quoted
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.errors import CheckpointError, show

Windows = Literal["always", "optional", "alternating", "never"]
"""Which layers of a family have the config's sliding window.

always       all of them
optional     with `use_sliding_window` those of `layer_types`, or from `max_window_layers` on
alternating  those of `layer_types`, or every other one, the first included
never        none: the key means nothing
"""

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
    "yarn": ("factor",),
    "longrope": (),
}
"""The numbers that each supported rope scaling needs."""

_MOST = 2**53  # beyond it floats have gaps
_SLIDING, _FULL = "sliding_attention", "full_attention"  # what stands in `layer_types`


@dataclass(frozen=True)
class Rope:
    """What a `config.json` says about rope.

    scaling  the unified `rotary_scaling`: every number that it needs, None for plain rope
    partial  the part of a head's channels that is turned
    """

    base: float
    scaling: dict[str, Any] | None
    partial: float


@dataclass(frozen=True)
class SlidingWindow:
    """How many tokens a position attends to, itself included, and in which layers.

    layer_types  as transformers lists them; None where all layers have the window
    """

    size: int
    layer_types: list[str] | None


def context_length(
    max_position_embeddings: int,
    rotary_scaling: Mapping[str, Any] | None,
    limits: FileLimits = FILE_LIMITS,
) -> int:
    """Positions that a model is made for, from what `rope` returns."""
    length = stretched_length(max_position_embeddings, rotary_scaling)
    fact = f"config.json: rope stretches the context to {length:.6g} positions"
    limits.check("max_context_length", length, fact)
    return int(length)


def stretched_length(
    max_position_embeddings: int, rotary_scaling: Mapping[str, Any] | None
) -> float:
    """Returns the positions that rope reaches, however many that are.

    Linear and dynamic scaling stretch `max_position_embeddings`, as trtllm-build counts it. With
    llama3 and longrope that number is the stretched one already; with yarn it may be either, and
    the original length decides.
    """
    kind = rotary_scaling["rope_type"] if rotary_scaling else None
    if rotary_scaling and kind in ("linear", "dynamic"):
        return float(max_position_embeddings * rotary_scaling["factor"])
    if rotary_scaling and kind == "yarn":
        stretched = rotary_scaling["original_max_position_embeddings"] * rotary_scaling["factor"]
        return float(max(max_position_embeddings, stretched))
    return max_position_embeddings


def positions(config: Mapping[str, Any], limits: FileLimits) -> int:
    """Reads how many positions the model was made for, before any scaling."""
    return count(config, "max_position_embeddings", limit=(limits, "max_context_length"))


def vocab_size(config: Mapping[str, Any], limits: FileLimits) -> int:
    """Reads how many embedding rows the model has."""
    return count(config, "vocab_size", limit=(limits, "max_vocab_size"))


def rope(config: Mapping[str, Any], max_position_embeddings: int) -> Rope:
    """Reads what the config says about rope.

    transformers 5.x keeps all in `rope_parameters`, 4.57 in `rope_theta` and `rope_scaling`; a
    config that has both must say the same twice.
    """
    common = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    legacy = common | _section(config, "rope_scaling")
    current = _section(config, "rope_parameters")
    # Phi-3 keeps the length outside of the section; transformers lets that one win.
    outer = config.get("original_max_position_embeddings")
    if outer is not None:
        original = {"original_max_position_embeddings": outer}
        legacy, current = legacy | original, current | original if current else current
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
    windows: Windows, config: Mapping[str, Any], context: int, num_layers: int
) -> SlidingWindow | None:
    """Returns the window of a family's config; None where it cuts no text of the context short."""
    if windows == "never" or config["sliding_window"] is None:
        return None
    if windows == "optional" and not config.get("use_sliding_window"):
        return None
    layer_types: list[str] | None = None
    if windows != "always":
        layer_types = _layer_types(config, num_layers)
        if layer_types is None and windows == "optional":
            first = count(config, "max_window_layers", minimum=0)
            layer_types = [_SLIDING if n >= first else _FULL for n in range(num_layers)]
        elif layer_types is None:
            layer_types = [_FULL if n % 2 else _SLIDING for n in range(num_layers)]
        if _SLIDING not in layer_types:
            return None
        if _FULL not in layer_types:
            layer_types = None
    size = count(config, "sliding_window")
    return SlidingWindow(size, layer_types) if size < context else None


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str] | None:
    layer_types = config.get("layer_types")
    if layer_types is None:
        return None
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types is {quoted(layer_types)}, expected a list with one entry "
            f"for each of the {num_layers} layers"
        )
    for kind in layer_types:
        if kind not in (_SLIDING, _FULL):
            raise CheckpointError(
                f"config.json: layer type {quoted(kind)} is not supported; supported: {_FULL}, "
                f"{_SLIDING}"
            )
    return layer_types


def activation(config: Mapping[str, Any], key: str, supported: Mapping[str, str]) -> str:
    """Returns the activation of the MLP in TensorRT-LLM's spelling.

    supported  that spelling for each of transformers' that the family may have
    """
    name = config[key]
    if not isinstance(name, str) or name not in supported:
        raise CheckpointError(
            f"config.json: {key} {quoted(name)} is not supported; only {next(iter(supported))} is"
        )
    return supported[name]


def count(
    config: Mapping[str, Any],
    key: str,
    *,
    default: int | None = None,
    minimum: int = 1,
    limit: tuple[FileLimits, str] | None = None,
) -> int:
    """Reads a whole number; null counts as left out.

    limit  the limits, and the name of the one that is the maximum; None: 2^53
    """
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise CheckpointError(
            f"config.json: {key} is {quoted(value)}, expected a whole number of at least {minimum}"
        )
    fact = f"config.json: {key} is {show(value)}"
    if limit is not None:
        limits, name = limit
        limits.check(name, value, fact)
    elif value > _MOST:
        raise CheckpointError(f"{fact}, expected at most {_MOST}")
    return value


def number(config: Mapping[str, Any], key: str) -> float:
    """Reads a positive number."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise CheckpointError(f"config.json: {key} is {quoted(value)}, expected a positive number")
    return float(value)


def optional_number(config: Mapping[str, Any], key: str) -> float | None:
    """Reads a positive number; null stands for none."""
    return None if config.get(key) is None else number(config, key)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Reads a truth value; null is false."""
    value = config[key]
    if value is None:
        return False
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} is {quoted(value)}, expected true or false")
    return value


def _read_rope(values: Mapping[str, Any], max_position_embeddings: int) -> Rope:
    kind = _rope_type(values)
    base = number(values, "rope_theta")
    partial = optional_number(values, "partial_rotary_factor") or 1.0
    if partial > 1:
        raise CheckpointError(f"config.json: partial_rotary_factor {partial} is above 1")
    if kind == "default":
        return Rope(base, None, partial)
    scaling: dict[str, Any] = {"rope_type": kind}
    for key in _ROPE_KEYS[kind]:
        if key == "original_max_position_embeddings":
            scaling[key] = count(values, key)
        else:
            scaling[key] = number(values, key)
    if "factor" in scaling and scaling["factor"] < 1:
        raise CheckpointError(f"config.json: rope factor {scaling['factor']} is below 1")
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise CheckpointError(
            f"config.json: rope low_freq_factor {scaling['low_freq_factor']} is not below "
            f"high_freq_factor {scaling['high_freq_factor']}"
        )
    if kind == "dynamic":
        # transformers measures from max_position_embeddings, whatever else the config says.
        scaling["original_max_position_embeddings"] = max_position_embeddings
    elif kind in ("yarn", "longrope"):
        scaling["original_max_position_embeddings"] = count(
            values, "original_max_position_embeddings", default=max_position_embeddings, minimum=2
        )
        read_rest = _read_yarn if kind == "yarn" else _read_longrope
        scaling |= read_rest(values, base, max_position_embeddings, scaling)
    return Rope(base, scaling, partial)


def _rope_type(values: Mapping[str, Any]) -> str:
    kind = values.get("rope_type") or values.get("type") or "default"
    older = values.get("type") or kind
    if "short_factor" in values:  # names that Phi-3 had for longrope first
        kind, older = ("longrope" if name in ("su", "yarn") else name for name in (kind, older))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise CheckpointError(
            f"config.json: rope type '{show(kind)}' is not supported; supported: "
            + ", ".join(_ROPE_KEYS)
        )
    if older != kind:
        raise CheckpointError(
            f"config.json: rope type is '{kind}' by rope_type and '{show(older)}' by type"
        )
    return kind


def _read_yarn(
    values: Mapping[str, Any], base: float, max_position_embeddings: int, scaling: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads yarn (Peng et al. 2023, arXiv:2309.00071), with the defaults of transformers 5."""
    factor: float = scaling["factor"]
    beta_fast = optional_number(values, "beta_fast") or 32.0
    beta_slow = optional_number(values, "beta_slow") or 1.0
    if beta_fast < beta_slow:
        raise CheckpointError(
            f"config.json: rope beta_fast {beta_fast} is below beta_slow {beta_slow}"
        )
    if base <= 1:
        raise CheckpointError(f"config.json: rope_theta {base} is not above 1, which yarn needs")

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0

    attention_factor = optional_number(values, "attention_factor")
    if attention_factor is None:
        # 0 counts as left out.
        mscale, mscale_all_dim = values.get("mscale"), values.get("mscale_all_dim")
        attention_factor = magnitude(1.0)
        if mscale and mscale_all_dim:
            attention_factor = magnitude(number(values, "mscale"))
            attention_factor /= magnitude(number(values, "mscale_all_dim"))
    truncate = values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(
            f"config.json: truncate is {quoted(truncate)}, expected true or false"
        )
    return {
        "attention_factor": attention_factor,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "truncate": truncate,
    }


def _read_longrope(
    values: Mapping[str, Any], base: float, max_position_embeddings: int, scaling: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads longrope (Ding et al. 2024, arXiv:2402.13753), with the defaults of transformers 5."""
    original: int = scaling["original_max_position_embeddings"]
    attention_factor = optional_number(values, "attention_factor")
    if attention_factor is None:
        stretch = optional_number(values, "factor") or max_position_embeddings / original
        attention_factor = math.sqrt(1 + math.log(max(stretch, 1.0)) / math.log(original))
    factors: dict[str, Any] = {"attention_factor": attention_factor}
    for key in ("short_factor", "long_factor"):
        listed = values.get(key)
        if not isinstance(listed, list) or not listed:
            raise CheckpointError(
                f"config.json: {key} is {quoted(listed)}, expected a list of numbers"
            )
        factors[key] = [number({f"{key}[{i}]": x}, f"{key}[{i}]") for i, x in enumerate(listed)]
    return factors


def _section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {key} is {quoted(value)}, expected an object")
    return value
