"""Scales measured on texts, by NVIDIA's ModelOpt, one layer at a time.

ModelOpt takes each layer for a model of its own. What the layer reads comes from the plain layers
before it, as when ModelOpt calibrates a whole model, so the scales are the same. Only keys and
values are measured here: ModelOpt would let its search of AWQ scales see the rounded ones, and the
scales of the weights would depend on `kv_cache`.

What is measured, and under which names: scales.py.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from specpipe.checkpoints.formats import E4M3_MAX, FORMATS, Measured
from specpipe.checkpoints.plain_weights import PlainWeights
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.errors import CheckpointError
from specpipe.progress import counted
from specpipe.quantization.decoder import Batch, LayerwiseDecoder, kv_amax
from specpipe.quantization.quantized_config import quantized_config, quantized_linears

if TYPE_CHECKING:
    from specpipe.config.sections import QuantizationConfig

RunModule = Callable[[nn.Module, Batch], Tensor]
"""Runs a module on a batch."""

_SAME_INPUT = ("attention.qkv",), ("mlp.fc", "mlp.gate")
"""Linears of a layer that read the same input; engines run them as one, with the same scales."""

# Quantizer settings of ModelOpt 0.47 (modelopt/torch/quantization/config.py), its presets' own.
_E4M3 = {"num_bits": (4, 3), "axis": None}
_INT8 = {"num_bits": 8, "axis": None}
_INT8_ROWS = {"num_bits": 8, "axis": 0}
_E2M1 = {
    "num_bits": (2, 1),
    "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)},
    "effective_bits": 4.5,
}


@dataclass(frozen=True)
class Calibrated:
    """What was measured, by unified module and kind.

    warnings  sentences about numbers that are possible and yet look wrong
    """

    scales: Mapping[tuple[str, Measured], npt.NDArray[np.float32]]
    warnings: tuple[str, ...]


def calibrate(
    weights: PlainWeights,
    scheme: QuantizationConfig,
    texts: Sequence[Sequence[int]],
    *,
    device: str = "cpu",
) -> Calibrated:
    """Measures what a scheme needs on texts, given as token ids.

    The same inputs give the same scales on one machine. Raises CheckpointError, naming the module,
    for a scale that is 0, infinite or no number.
    """
    measured = FORMATS[scheme.format].measured
    linears = _linears(weights.config, scheme) if measured else {}
    scales: dict[tuple[str, Measured], npt.NDArray[np.float32]] = {}

    def keep(module: str, kind: Measured, value: Tensor) -> None:
        scales[module, kind] = _checked(module, kind, value)

    with torch.no_grad(), _quiet():
        decoder = LayerwiseDecoder(weights, texts, torch.device(device))
        for n in counted(range(decoder.num_layers), decoder.num_layers, "layers"):
            layer = decoder.take_layer(n)
            of_layer = {m: linear.names for m, linear in linears.items() if linear.layer == n}
            outputs = _calibrate_module(layer, scheme, of_layer, decoder.batches, _run_layer(n))
            for module, names in of_layer.items():
                for kind in measured:
                    keep(module, kind, _measured(layer.get_submodule(names[0]), kind))
            if scheme.kv_cache is not None:
                keep(f"transformer.layers.{n}.attention", "kv_amax", kv_amax(layer))
            layer.to("meta")  # frees the weights, even if something else still refers to the layer
            for batch, hidden in zip(decoder.batches, outputs, strict=True):
                batch.hidden = hidden
        if "lm_head" in linears:
            root = nn.ModuleDict({"head": decoder.head()})

            def run_head(root: Any, batch: Batch) -> Tensor:
                root.head(decoder.normed(batch))
                return batch.hidden

            _calibrate_module(root, scheme, {"lm_head": ("head",)}, decoder.batches, run_head)
            for kind in measured:
                keep("lm_head", kind, _measured(root.get_submodule("head"), kind))
    return Calibrated(scales, tuple(_implausible(scales)))


@dataclass(frozen=True)
class _Linear:
    """A linear to be calibrated: its layer, and its names there; several where parts are fused."""

    layer: int | None
    names: tuple[str, ...]


def _linears(config: UnifiedConfig, scheme: QuantizationConfig) -> dict[str, _Linear]:
    """Returns the linears that a scheme measures scales of, by unified name."""
    linears = {}
    for module, rule, layer in quantized_linears(quantized_config(config, scheme)):
        names = dict.fromkeys(
            part.source.removeprefix("model.layers.{n}.").removesuffix(".weight")
            for part in rule.parts
        )
        linears[module] = _Linear(layer, tuple(names))
    return linears


def _run_layer(n: int) -> RunModule:
    def run(layer: nn.Module, batch: Batch) -> Tensor:
        output = layer(batch.hidden, **batch.arguments[n])
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    return run


def _calibrate_module(
    root: nn.Module,
    scheme: QuantizationConfig,
    linears: Mapping[str, Sequence[str]],
    batches: Sequence[Batch],
    run: RunModule,
) -> list[Tensor]:
    """Has ModelOpt calibrate some linears below `root`; returns the plain outputs of `root`.

    The first time that ModelOpt runs the batches it only looks on, so these outputs are plain.
    """
    outputs: list[Tensor] = []

    def run_all(module: nn.Module) -> None:
        is_first = not outputs
        for batch in batches:
            output = run(module, batch)
            if is_first:
                outputs.append(output)

    if not linears:
        run_all(root)
        return outputs
    mtq, preprocess_linear_fusion = _modelopt()
    for module, names in linears.items():
        for name in names:
            root.get_submodule(name).register_forward_pre_hook(_check_finite(module))
    mtq.quantize(root, modelopt_config(scheme, linears), forward_loop=run_all)
    for group in _SAME_INPUT:
        members = [
            root.get_submodule(name)
            for module, names in linears.items()
            if module.endswith(group)
            for name in names
        ]
        if len(members) > 1:
            preprocess_linear_fusion(members)
    return outputs


def modelopt_config(
    scheme: QuantizationConfig, linears: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Returns what ModelOpt is asked for: its own presets, on some linears only."""
    int4 = {"num_bits": 4, "block_sizes": {-1: scheme.awq_block_size, "type": "static"}}
    weight, activation, algorithm = {
        "fp8": (_E4M3, _E4M3, "max"),
        "int8_sq": (_INT8_ROWS, _INT8, "smoothquant"),
        "int4_awq": (int4, None, "awq_lite"),
        "w4a8_awq": ([int4, _E4M3], _E4M3, "awq_lite"),
        "nvfp4": (_E2M1, _E2M1, "max"),
    }[scheme.format]
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for names in linears.values():
        for name in names:
            entries.append({"quantizer_name": f"{name}.weight_quantizer", "cfg": weight})
            if activation is not None:
                entries.append({"quantizer_name": f"{name}.input_quantizer", "cfg": activation})
    return {"quant_cfg": entries, "algorithm": algorithm}


def _measured(linear: Any, kind: Measured) -> Tensor:
    """Reads what ModelOpt left in the quantizers of a linear."""
    value: Tensor
    if kind == "input_amax":
        value = linear.input_quantizer.amax
    elif kind == "prequant":
        value = linear.input_quantizer.pre_quant_scale
    elif kind == "weight_amax":
        value = linear.weight_quantizer.amax
    else:
        value = linear.weight_quantizer[-1].amax
    return value


def _checked(module: str, kind: Measured, value: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = value.float().reshape(-1).cpu().numpy().copy()
    bad = array[~(np.isfinite(array) & (array > 0))]
    if bad.size:
        cure = f"put {module} into quantization.exclude"
        if kind == "kv_amax":
            cure = "leave out quantization.kv_cache"
        raise CheckpointError(
            f"{module}.{kind} is {bad[0]:g} on the calibration texts, which is no scale; {cure}, "
            "or use an undamaged checkpoint"
        )
    return array


def _check_finite(module: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not torch.isfinite(inputs[0]).all():
            raise CheckpointError(
                f"{module} reads NaN or infinity on the calibration texts; the layers before it "
                "are damaged, or too great for float32: use an undamaged checkpoint"
            )

    return hook


def _implausible(scales: Mapping[tuple[str, Measured], npt.NDArray[np.float32]]) -> Iterator[str]:
    of_kv = [float(value[0]) for (_, kind), value in scales.items() if kind == "kv_amax"]
    if of_kv and all(amax == E4M3_MAX for amax in of_kv):
        yield (
            "all scales of the KV cache are exactly 1: the keys and values of this model were "
            "clamped or scaled before, or its weights are not what they should be"
        )


def _modelopt() -> tuple[Any, Callable[[list[nn.Module]], None]]:
    """Imports the two doors of ModelOpt; what it imports warns of its own future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export.quant_utils import preprocess_linear_fusion
    return mtq, preprocess_linear_fusion


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps ModelOpt and transformers from printing; what matters of it is checked here."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.filterwarnings("ignore", module="modelopt")
            yield
    finally:
        logger.setLevel(level)
