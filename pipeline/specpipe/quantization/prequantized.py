"""Hugging Face checkpoints that others quantized: what they say of themselves.

Only `config.json` and `hf_quant_config.json` are read here; prequantized_weights.py reads the rest.

| written by | quant_method | formats |
|---|---|---|
| NVIDIA ModelOpt | modelopt | fp8, fp8_pc_pt, int8_sq, int4_awq, w4a8_awq, nvfp4 |
| llm-compressor | compressed-tensors | fp8 static per tensor, fp8 with a scale per token |
| AutoAWQ | awq, version gemm | 4 bits |
| AutoGPTQ, GPTQModel | gptq | 4 bits, without act-order |

int4 numbers with zero points become int4_gptq, without any int4_awq with a prequant of 1.

Sources: modelopt/torch/export/convert_hf_config.py; compressed-tensors 0.11, quantization/
quant_args.py; AutoAWQ 0.2, awq/modules/linear/gemm.py; AutoGPTQ 0.7, quantization/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specpipe.checkpoints.checkpoint import QUANT_CONFIG_NAME, QUANTIZATION_KEYS, read_config
from specpipe.checkpoints.files import is_there, quoted, read_json
from specpipe.checkpoints.formats import FORMAT_OF_ALGO, FORMATS
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.unified_sections import Quantization
from specpipe.errors import CheckpointError

Layout = Literal["scaled", "awq", "gptq"]
"""How the weight of a linear is stored.

scaled  `weight` [out, in] or packed as in the unified checkpoint, `weight_scale` and so on
awq     `qweight` [in, out / 8], `qzeros`, `scales`; eight numbers in an int32, in an order of its
        own
gptq    `qweight` [in / 8, out], `qzeros`, `scales`, `g_idx`
"""

CURE = "use the checkpoint that it was quantized from"
_READ = "what is read: ModelOpt, compressed-tensors fp8, AWQ (gemm) and GPTQ"


@dataclass(frozen=True)
class Prequantized:
    """How a checkpoint says that it is quantized.

    hf_config    its config.json, without that
    format       one of FORMATS
    group_size   numbers that share a scale; None where no blocks do
    kv_cache     whether it has scales of an FP8 KV cache
    zero_offset  what GPTQ subtracted from zero points before it stored them
    """

    hf_config: Mapping[str, Any]
    layout: Layout
    format: str
    group_size: int | None
    kv_cache: bool
    zero_offset: int = 0

    def quantization(self, exclude_modules: tuple[str, ...] = ("lm_head",)) -> Quantization:
        """Returns the `quantization` of the unified config."""
        return Quantization.of(
            self.format,
            fp8_kv_cache=self.kv_cache,
            group_size=self.group_size,
            excluded=exclude_modules,
        )


def read_prequantized(folder: Path, limits: FileLimits = FILE_LIMITS) -> Prequantized | None:
    """Reads how a folder is quantized; None for a plain one. Refuses by name what is not read."""
    config = read_config(folder, allow_quantized=True, limits=limits)
    plain = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    path = folder / QUANT_CONFIG_NAME
    if is_there(path):
        values = read_json(path, limits=limits).get("quantization")
        return _modelopt(_Section(path, values), plain)
    values = next((config[key] for key in sorted(QUANTIZATION_KEYS) if config.get(key)), None)
    if values is None:
        return None
    section = _Section(folder / "config.json", values)
    method = section.values.get("quant_method")
    if method == "modelopt":
        return _modelopt(section, plain)
    if method == "compressed-tensors":
        return _compressed_tensors(section, plain)
    if method == "awq":
        return _awq(section, plain)
    if method == "gptq":
        return _gptq(section, plain)
    raise section.refused(f"quant_method {quoted(method)} is not read")


class _Section:
    """What a file says about quantization, and the refusals that name it."""

    def __init__(self, path: Path, values: Any) -> None:
        self.path = path
        if not isinstance(values, dict):
            raise CheckpointError(
                f"{path}: its quantization is {quoted(values)}, expected an object"
            )
        self.values: dict[str, Any] = values

    def refused(self, fault: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path.parent} is already quantized, and {fault} ({self.path.name}); {_READ}; "
            + CURE
        )

    def require(self, key: str, *possible: Any) -> Any:
        """Returns a value that is one of those that are read."""
        value = self.values.get(key)
        if not any(value == other and type(value) is type(other) for other in possible):
            listed = " or ".join(repr(other) for other in possible)
            raise self.refused(f"{key} {quoted(value)} is not read, only {listed}")
        return value

    def group_size(self) -> int:
        """Returns how many numbers share a scale."""
        size = self.values.get("group_size")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise self.refused(f"group_size {quoted(size)} is not read, only a positive number")
        return size


def _modelopt(section: _Section, hf_config: Mapping[str, Any]) -> Prequantized:
    algo = section.values.get("quant_algo")
    name = FORMAT_OF_ALGO.get(algo) if isinstance(algo, str) else None
    if name is None or not FORMATS[name].is_offered or not FORMATS[name].is_stored:
        raise section.refused(f"quant_algo {quoted(algo)} is not read")
    if section.values.get("has_zero_point"):
        raise section.refused("has_zero_point true is not read with quant_algo " + repr(algo))
    # hf_quant_config.json names the algorithm, config.json has a scheme instead.
    if "kv_cache_scheme" in section.values:
        kv_cache = _is_fp8_kv_cache(section)
    else:
        section.values.setdefault("kv_cache_quant_algo", None)
        kv_cache = section.require("kv_cache_quant_algo", None, "FP8") == "FP8"
    size = FORMATS[name].block_size
    group_size = section.group_size() if size == "set" else size
    return Prequantized(hf_config, "scaled", name, group_size, kv_cache)


def _compressed_tensors(section: _Section, hf_config: Mapping[str, Any]) -> Prequantized:
    groups = section.values.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise section.refused("it has several config_groups, or none, where one is read")
    group = _Section(section.path, next(iter(groups.values())))
    weights, inputs = (
        _Section(section.path, group.values.get(key)) for key in ("weights", "input_activations")
    )
    for numbers in (weights, inputs):
        numbers.require("type", "float")
        numbers.require("num_bits", 8)
    weights.require("strategy", "tensor", "channel")
    if inputs.values.get("dynamic"):
        inputs.require("strategy", "token")
        name = "fp8_pc_pt"
    else:
        weights.require("strategy", "tensor")
        inputs.require("strategy", "tensor")
        name = "fp8"
    sparsity = section.values.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise section.refused(f"sparsity {quoted(sparsity.get('format'))} is not read")
    return Prequantized(hf_config, "scaled", name, None, _is_fp8_kv_cache(section))


def _is_fp8_kv_cache(section: _Section) -> bool:
    scheme = section.values.get("kv_cache_scheme")
    if scheme is None:
        return False
    scheme = _Section(section.path, scheme)
    scheme.require("type", "float")
    scheme.require("num_bits", 8)
    scheme.require("dynamic", False)
    return True


def _awq(section: _Section, hf_config: Mapping[str, Any]) -> Prequantized:
    section.require("bits", 4)
    version = section.values.get("version")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise section.refused(f"version {quoted(version)} is not read, only 'gemm'")
    name = "int4_gptq" if section.require("zero_point", True, False) else "int4_awq"
    return Prequantized(hf_config, "awq", name, section.group_size(), False)


def _gptq(section: _Section, hf_config: Mapping[str, Any]) -> Prequantized:
    section.require("bits", 4)
    section.require("desc_act", False)
    if section.values.get("dynamic"):
        raise section.refused("settings of single modules (dynamic) are not read")
    section.values.setdefault("checkpoint_format", "gptq")
    kind = section.require("checkpoint_format", "gptq", "gptq_v2")
    name = "int4_awq" if section.require("sym", True, False) else "int4_gptq"
    # AutoGPTQ stores zero points less 1; the format's second version does not.
    offset = 1 if kind == "gptq" else 0
    return Prequantized(hf_config, "gptq", name, section.group_size(), False, offset)
