"""The unified config of a quantized checkpoint, and whether a model's sizes fit its format."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from specpipe.checkpoints.formats import AWQ_BLOCK_SIZES, FORMATS, OFFERED
from specpipe.checkpoints.quantized_rules import is_quantized
from specpipe.checkpoints.rules import Part, TensorRule
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.checkpoints.unified_layout import part_shape, tensor_rules
from specpipe.checkpoints.unified_sections import UNQUANTIZED, Quantization
from specpipe.config.sections import QuantizationConfig
from specpipe.errors import ConfigError

_CURE = "exclude it, or use fp8"


def quantized_config(config: UnifiedConfig, scheme: QuantizationConfig) -> UnifiedConfig:
    """Returns a plain unified config with its `quantization` filled in.

    Nothing else changes: `vocab_size` stays that of the checkpoint, where TensorRT-LLM's own
    quantization pads it to a multiple of 64 for AWQ, so that draft and target stay a pair; rows
    that tensor parallelism adds to the head are no tokens. Refused are sizes that the format cannot
    divide, and patterns of `exclude` that name nothing.
    """
    quantization = Quantization.of(
        scheme.format,
        fp8_kv_cache=scheme.kv_cache == "fp8",
        group_size=scheme.awq_block_size,
        excluded=(*(() if scheme.quantize_lm_head else ("lm_head",)), *scheme.exclude),
    )
    quantized = config.quantized(quantization)
    _check_exclude(config, scheme)
    if not list(quantized_linears(quantized)):
        raise ConfigError("quantization.exclude leaves no linear to quantize; exclude fewer")
    check_sizes(quantized)
    return quantized


def check_export(config: UnifiedConfig) -> None:
    """Refuses a quantized config that Hugging Face's layout has no place for."""
    row = config.quantization.row
    assert row is not None
    if not row.is_stored:
        able = [other for other in OFFERED if FORMATS[other].is_stored]
        raise ConfigError(
            f"{config.format} has no Hugging Face layout, because TensorRT-LLM quantizes plain "
            f"weights while it builds an engine; formats that have one: {', '.join(able)}"
        )
    for layer in range(config.num_hidden_layers):
        fc, gate = (f"transformer.layers.{layer}.mlp.{part}" for part in ("fc", "gate"))
        is_gated = config.hidden_act != "swiglu"  # with it, `fc` holds both
        if is_gated and is_quantized(config, fc) != is_quantized(config, gate):
            raise ConfigError(
                f"quantization.exclude names only one of {fc} and {gate}, which runtimes that read "
                "Hugging Face's layout join into one; exclude both or none"
            )


def quantized_linears(config: UnifiedConfig) -> Iterator[tuple[str, TensorRule, int | None]]:
    """Yields name, plain rule and layer of every linear that a quantized config has quantized."""
    for rule, layer in tensor_rules(config.quantized(UNQUANTIZED)):
        module, _, kind = rule.name.format(n=layer).rpartition(".")
        if kind == "weight" and is_quantized(config, module):
            yield module, rule, layer


def plain_parts(config: UnifiedConfig) -> dict[tuple[str, tuple[str, ...]], Part]:
    """Returns the plain parts that quantized parts and their scales are made of.

    By source, and by what that holds before the part, which a part and its scales share.
    """
    return {
        (part.source, part.before): part
        for _, rule, _ in quantized_linears(config)
        for part in rule.parts
    }


def check_sizes(config: UnifiedConfig, *, cure: str | None = None) -> None:
    """Refuses a model, or a split of it, whose matrices its format cannot divide.

    cure  what the message says to do; None: what helps where a scheme can be changed
    """
    tp_size = config.mapping.tp_size
    name = config.format
    for module, rule, _ in quantized_linears(config):
        for part in rule.parts:
            fault = _fault(config, part, cure)
            if fault is not None:
                shared = f" on each of {tp_size} ranks" if tp_size > 1 else ""
                raise ConfigError(f"{name} does not fit {module}: it has {fault.format(shared)}")


def _fault(config: UnifiedConfig, part: Part, cure: str | None) -> str | None:
    """Says what of a part's size does not fit; `{}` stands for the ranks that share it."""
    row = config.quantization.row
    assert row is not None
    rows, columns = part_shape(config, part)
    tp_size = config.mapping.tp_size
    block = config.quantization.block_size
    if part.split == "columns":
        columns //= tp_size
    if block is not None and columns % block:
        fitting = [size for size in AWQ_BLOCK_SIZES if columns % size == 0 and size < block]
        if cure is None and fitting and row.block_size == "set":
            cure = f"an awq_block_size of {fitting[0]} divides them"
        return f"{columns} inputs{{}}, which blocks of {block} do not divide; {cure or _CURE}"
    if row.packs == "out":
        if part.split == "rows":
            rows //= tp_size
        elif part.split == "vocab" and rows % 2 == 0:
            rows = -(-rows // tp_size)
        if rows % 2:
            return f"{rows} outputs{{}}, and {config.format} packs them in pairs; {cure or _CURE}"
    return None


def _check_exclude(config: UnifiedConfig, scheme: QuantizationConfig) -> None:
    everything = Quantization(quant_algo=FORMATS[scheme.format].quant_algo)
    modules = [module for module, _, _ in quantized_linears(config.quantized(everything))]
    for pattern in scheme.exclude:
        if not any(fnmatchcase(module, pattern) for module in modules):
            raise ConfigError(
                f"quantization.exclude: {pattern!r} names no linear; they are named as {modules[0]}"
            )
