"""Quantized weights in Hugging Face's layout, as NVIDIA's ModelOpt 0.47 writes it.

One folder that TensorRT-LLM's pytorch backend, vLLM and SGLang read: safetensors under Hugging
Face's names, the scales of a linear beside its weight; how it is quantized stands in
`hf_quant_config.json` and, in other words, under `quantization_config` of `config.json`. Names and
both files: modelopt/torch/export/unified_export_hf.py, quant_utils.py and convert_hf_config.py.

The numbers are those of the unified checkpoint. ModelOpt's own differ in this:

- It rounds weight / scale to the weight's dtype before it rounds to the format's.
- For fp8 it leaves q, k and v, gate and up a weight scale each, and a runtime that joins
  them on loading rounds all again at the greatest; here they share it, and none does.
- The scales of int4 numbers are stored in the checkpoint's dtype, and no wider.
- k_scale and v_scale are one number, the greater: engines have one for both.

prequant of int4_awq and w4a8_awq is multiplied into the norm before q, k, v and before gate and up,
as ModelOpt does where several linears share an input, because a runtime that joins these on loading
looks for it nowhere else (TensorRT-LLM, _torch/modules/linear.py); here the fused linears of Phi-3
too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specpipe.checkpoints.checkpoint import (
    CONFIG_NAME,
    ELEMENT_BYTES,
    INDEX_NAME,
    QUANT_CONFIG_NAME,
    RawArray,
    create_safetensors,
)
from specpipe.checkpoints.families import HEAD
from specpipe.checkpoints.formats import Content, Format, Scale
from specpipe.checkpoints.quantized_rules import is_quantized
from specpipe.checkpoints.row_jobs import JOB_BYTES, in_threads
from specpipe.checkpoints.unified_layout import tensor_rules
from specpipe.machine.own_json import write_object
from specpipe.quantization.quantized_config import check_export
from specpipe.quantization.tensors import as_raw
from specpipe.quantization.weights import QuantizedWeights

SUFFIXES: Mapping[Content, str] = {
    "quantized": "weight",
    "weights_scaling_factor": "weight_scale",
    "per_channel_scale": "weight_scale",
    "weights_scaling_factor_2": "weight_scale_2",
    "activation_scaling_factor": "input_scale",
    "prequant_scaling_factor": "pre_quant_scale",
}
"""What the tensors of a quantized linear are called after its name."""

KV_SCALES = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")
"""Where the scales of keys and values stand within a layer, even of Phi-3 without such linears."""

_SHARD_BYTES = 5_000_000_000  # as transformers cuts

_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
"""Whose layout it is; SGLang looks for the name."""


def write_huggingface(out: Path, weights: QuantizedWeights, hf_config: Mapping[str, Any]) -> None:
    """Writes weights, index and both configs into the folder `out`, row by row.

    hf_config  the config.json of the plain checkpoint
    """
    check_export(weights.config)
    shards = _shards(list(_tensors(weights)))
    names = [
        f"model-{n:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        for n in range(1, len(shards) + 1)
    ]
    with ExitStack() as stack:
        writers = {
            tensor.name: writer
            for name, shard in zip(names, shards, strict=True)
            for writer in [
                stack.enter_context(
                    create_safetensors(out / name, {t.name: (t.dtype, t.shape) for t in shard})
                )
            ]
            for tensor in shard
        }

        def write(job: _Job) -> None:
            row, writer = job.start, writers[job.tensor.name]
            for block in job.tensor.rows(job.start, job.stop):
                if job.tensor.shape:
                    writer.write_rows(job.tensor.name, row, block)
                    row += len(block)
                else:
                    writer.write(job.tensor.name, block.reshape(()))

        jobs = [job for shard in shards for tensor in shard for job in _jobs(tensor)]
        in_threads(write, jobs, lambda job: job.num_bytes)
    if len(shards) > 1:
        weight_map = {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        total = sum(tensor.num_bytes for shard in shards for tensor in shard)
        write_object(
            out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    quantization = _quantization(weights)
    write_object(out / QUANT_CONFIG_NAME, {"producer": _PRODUCER, "quantization": quantization})
    config = dict(hf_config)
    if not (config.get("dtype") or config.get("torch_dtype")):
        config["dtype"] = weights.config.dtype
    if is_quantized(weights.config, "lm_head"):
        config["tie_word_embeddings"] = False  # the embedding stays plain
    write_object(out / CONFIG_NAME, {**config, "quantization_config": _as_section(quantization)})


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the layout; `rows` yields some of its rows, or the one number of a scalar."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: Callable[[int, int], Iterator[RawArray]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class _Job:
    """Rows of one tensor, to be copied to its file."""

    tensor: _Tensor
    start: int
    stop: int
    num_bytes: int


def _jobs(tensor: _Tensor) -> Iterator[_Job]:
    rows, *columns = tensor.shape or (1,)
    row_bytes = math.prod(columns) * ELEMENT_BYTES[tensor.dtype]
    step = max(1, JOB_BYTES // row_bytes)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield _Job(tensor, start, stop, (stop - start) * row_bytes)


def _shards(tensors: Sequence[_Tensor]) -> list[list[_Tensor]]:
    """Divides the tensors among files of at most 5 GB, but one tensor for each at least."""
    shards: list[list[_Tensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.num_bytes > _SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.num_bytes
    return shards


def _tensors(weights: QuantizedWeights) -> Iterator[_Tensor]:
    """Yields the tensors of the layout in the order of the plain ones."""
    plain = weights.plain
    dtype = weights.config.plain_dtype
    fused = {norm.name: norm for norm in _fused_norms(weights)}
    without_prequant = {module for norm in fused.values() for module in norm.modules}
    for name, info in plain.tensors.items():
        if name in weights.modules:
            yield from _linear(weights, name, without_prequant)
        elif name in fused:
            yield _Tensor(name, dtype, info.shape, partial(_fused_rows, weights, fused[name]))
        elif name != HEAD or not weights.config.tie_word_embeddings:
            yield _Tensor(name, dtype, info.shape, partial(_plain_rows, weights, name))
    if weights.config.quantization.kv_cache_quant_algo is not None:
        for layer in range(weights.config.num_hidden_layers):
            scale = weights.kv_cache_scale(layer)
            for name in KV_SCALES:
                yield _whole(f"model.layers.{layer}.{name}", "F32", (), scale)


def _plain_rows(weights: QuantizedWeights, name: str, start: int, stop: int) -> Iterator[RawArray]:
    return weights.plain.blocks(name, start, stop - start)


def _linear(
    weights: QuantizedWeights, name: str, without_prequant: Collection[str]
) -> Iterator[_Tensor]:
    """Yields what stands for a plain weight.

    without_prequant  linears that have it in the norm before them
    """
    module = weights.modules[name]
    rows, columns = weights.plain.tensors[name].shape
    prefix = name.removesuffix("weight")

    def of_rows(content: Content, rows_each: int, start: int, stop: int) -> Iterator[RawArray]:
        for block in weights.of_rows(name, content, start * rows_each, stop * rows_each):
            yield as_raw(block)

    dtype, shape, rows_each = _quantized(weights.format, rows, columns)
    yield _Tensor(name, dtype, shape, partial(of_rows, "quantized", rows_each))
    for scale in weights.format.scales:
        full_name = prefix + SUFFIXES[scale.content]
        if not scale.is_shared:
            of_row = () if scale.axes == "out" else (columns // weights.block_size,)
            dtype = _scale_dtype(weights, scale)
            yield _Tensor(full_name, dtype, (rows, *of_row), partial(of_rows, scale.content, 1))
        elif scale.axes == "one":
            shared = weights.shared(module, scale.content)
            yield _whole(full_name, _scale_dtype(weights, scale), (), shared)
        elif module not in without_prequant:
            shared = weights.shared(module, scale.content)
            yield _whole(full_name, _scale_dtype(weights, scale), (columns,), shared)


def _quantized(row: Format, rows: int, columns: int) -> tuple[str, tuple[int, int], int]:
    """Returns dtype and shape of a quantized weight, and how many outputs a row of it holds."""
    assert row.weight_dtype is not None
    if row.packs == "out":
        return "U8", (rows // 2, columns), 2
    if row.packs == "in":
        return "U8", (rows, columns // 2), 1
    return row.weight_dtype, (rows, columns), 1


def _scale_dtype(weights: QuantizedWeights, scale: Scale) -> str:
    return scale.dtype or weights.config.plain_dtype


def _whole(name: str, dtype: str, shape: tuple[int, ...], tensor: Tensor) -> _Tensor:
    """Returns a tensor that is small enough to be there before it is asked for."""

    def rows(start: int, stop: int) -> Iterator[RawArray]:
        yield as_raw(tensor[start:stop])

    return _Tensor(name, dtype, shape, rows)


@dataclass(frozen=True)
class _FusedNorm:
    """A norm that takes in the prequant of the linears behind it.

    name     of its Hugging Face weight
    modules  the linears, in the unified checkpoint's names
    """

    name: str
    modules: tuple[str, ...]
    one_plus: bool
    prequant: Tensor


def _fused_norms(weights: QuantizedWeights) -> Iterator[_FusedNorm]:
    """Yields the norms whose linears are quantized and have one prequant."""
    if not weights.format.is_awq:
        return
    config = weights.config
    quantized = set(weights.modules.values())
    before_mlp = "pre_feedforward_layernorm" if config.has_branch_norms else "post_layernorm"
    linears = {"input_layernorm": ("attention.qkv",), before_mlp: ("mlp.fc", "mlp.gate")}
    for rule, layer in tensor_rules(config):
        prefix = f"transformer.layers.{layer}."
        kind = rule.name.format(n=layer).removeprefix(prefix).removesuffix(".weight")
        modules = tuple(
            prefix + linear for linear in linears.get(kind, ()) if prefix + linear in quantized
        )
        prequants = [weights.shared(module, "prequant_scaling_factor") for module in modules]
        if modules and all(torch.equal(prequant, prequants[0]) for prequant in prequants):
            part = rule.parts[0]
            yield _FusedNorm(part.source.format(n=layer), modules, part.one_plus, prequants[0])


def _fused_rows(
    weights: QuantizedWeights, norm: _FusedNorm, start: int, stop: int
) -> Iterator[RawArray]:
    """Yields the weight times prequant; where the norm adds 1 to a weight, it still does."""
    weight = weights.read(norm.name, start, stop - start)
    factor = norm.prequant[start:stop].float()
    product = (weight + 1) * factor - 1 if norm.one_plus else weight * factor
    yield as_raw(product.to(weights.dtype))


def _quantization(weights: QuantizedWeights) -> dict[str, Any]:
    """Returns the `quantization` of hf_quant_config.json."""
    ours = weights.config.quantization
    quantization: dict[str, Any] = {
        "quant_algo": ours.quant_algo,
        "kv_cache_quant_algo": ours.kv_cache_quant_algo,
    }
    if ours.block_size is not None:
        quantization["group_size"] = ours.block_size
    if weights.format.is_awq:
        quantization |= {"has_zero_point": False, "pre_quant_scale": True}
    linears = {
        part.source.format(n=layer)
        for rule, layer in tensor_rules(weights.plain.config)
        for part in rule.parts
        if len(part.shape) == 2
    }
    plain = sorted(name.removesuffix(".weight") for name in linears - weights.modules.keys())
    return {**quantization, "exclude_modules": plain}


def _as_section(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same as config.json says it, in the words of compressed-tensors."""
    algo = quantization["quant_algo"]
    section: dict[str, Any] = {}
    numbers: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}
    if algo == "NVFP4":
        numbers |= {"num_bits": 4, "group_size": quantization["group_size"]}
    if algo in ("FP8", "NVFP4"):  # for others, the name says it all
        group = {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}
        section["config_groups"] = {"group_0": group}
    section |= {"ignore": quantization["exclude_modules"], "quant_algo": algo}
    if quantization["kv_cache_quant_algo"] is not None:
        section["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return {**section, "producer": _PRODUCER, "quant_method": "modelopt"}
