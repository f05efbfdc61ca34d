"""The weights of an engine: what each tensor is made of, and the order of its rows and columns.

model.py says why this layout. Letters beyond style: G query heads per key-value head, C channels
(hidden_size), I channels of the MLP (intermediate_size).

| tensor | shape | of the unified checkpoint |
|---|---|---|
| embedding.weight | [V, C] | transformer.vocab_embedding; absent where the head equals it |
| layers.n.attention_norm.weight | [C] | input_layernorm |
| layers.n.qkv.weight, .bias | [C, (H + 2 H_kv) D] | attention.qkv |
| layers.n.q_norm.weight, k_norm.weight | [D] | attention.q_layernorm, k_layernorm |
| layers.n.kv_cache.scale | [1] | attention.kv_cache_scaling_factor |
| layers.n.dense.weight, .bias | [H D, C] | attention.dense |
| layers.n.dense_norm.weight | [C] | post_layernorm, where branches have norms |
| layers.n.mlp_norm.weight | [C] | post_layernorm, else pre_feedforward_layernorm |
| layers.n.mlp_in.weight, .bias | [C, 2 I] | mlp.fc, then mlp.gate; the halves of a fused mlp.fc |
| layers.n.mlp_out.weight, .bias | [I, C] | mlp.proj |
| layers.n.mlp_out_norm.weight | [C] | post_feedforward_layernorm |
| norm.weight | [C] | transformer.ln_f |
| head.weight | [C, V] | lm_head |

Quantized linears: quantized_layout.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specpipe.checkpoints.checkpoint import (
    ELEMENT_BYTES,
    SafetensorsWriter,
    create_safetensors,
)
from specpipe.checkpoints.quantized_rules import is_quantized, shares_embedding
from specpipe.checkpoints.unified import UnifiedCheckpoint
from specpipe.checkpoints.unified_config import DTYPES
from specpipe.checkpoints.weight_values import check_finite, in_tensor
from specpipe.errors import CheckpointError
from specpipe.progress import counted
from specpipe.quantization.tensors import TORCH_DTYPES, as_raw
from specpipe.runtimes.torch.kernel_choice import Kernel
from specpipe.runtimes.torch.model_shape import ModelConfig
from specpipe.runtimes.torch.quantized_layout import Arrangement, Entry, quantized_entries
from specpipe.runtimes.torch.quantized_source import QuantizedSource

_BLOCK_BYTES = 16 << 20  # of float32; rows enough to read whole cache lines where it transposes

_EMBEDDING, _HEAD = "transformer.vocab_embedding.weight", "lm_head.weight"


@dataclass(frozen=True)
class LayoutRule:
    """One tensor of the engine.

    sources       the unified tensors that it is joined from, along their output channels
    arrange       what is done to the joined tensor, a matrix already being [in, out]; keeps its
                  shape
    moves_inputs  whether that changes the order of its inputs, and not that of its outputs
    """

    name: str
    sources: tuple[str, ...]
    arrange: Callable[[Tensor], Tensor]
    moves_inputs: bool = False


def write_weights(
    path: Path, checkpoint: UnifiedCheckpoint, dtype: str, kernel: Kernel | None = None
) -> None:
    """Writes the engine's weights in `dtype` ("float32" …), one tensor at a time.

    Raises CheckpointError for a number that this dtype cannot hold.

    kernel  what multiplies by quantized weights, where it fits; None: all of them are emulated
    """
    entries = list(_entries(checkpoint, dtype, kernel))
    with create_safetensors(path, {e.name: (e.dtype, e.shape) for e in entries}) as writer:
        for entry in counted(entries, sum(map(_num_bytes, entries)), "bytes", _num_bytes):
            try:
                _write(writer, entry)
            except CheckpointError:
                _check_sources(checkpoint, dtype)  # names the weight as its owner knows it
                raise


def _num_bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * ELEMENT_BYTES[entry.dtype]


def _entries(checkpoint: UnifiedCheckpoint, dtype: str, kernel: Kernel | None) -> Iterator[Entry]:
    config = checkpoint.config
    names = set(checkpoint.names())
    if shares_embedding(config) and checkpoint.holds(_HEAD, checkpoint.tensor(_EMBEDDING).data):
        names.remove(_EMBEDDING)
    source = QuantizedSource(checkpoint, dtype, kernel)
    for rule in engine_rules(ModelConfig.from_unified(config), source):
        if not names.issuperset(rule.sources):  # biases and q/k norms: where the family has them
            continue
        linear, _, kind = rule.name.rpartition(".")
        modules = tuple(name.rpartition(".")[0] for name in rule.sources)
        if kind == "weight" and any(is_quantized(config, module) for module in modules):
            arrangement = Arrangement(rule.arrange, rule.moves_inputs)
            yield from quantized_entries(source, linear, modules, arrangement)
            continue
        is_float32 = kind == "scale" or checkpoint.keeps_float32(rule.sources[0])
        yield Entry(
            rule.name,
            "F32" if is_float32 else DTYPES[dtype],
            _shape(checkpoint, rule),
            partial(arranged, source, rule),
        )


def engine_rules(config: ModelConfig, source: QuantizedSource) -> Iterator[LayoutRule]:
    """Yields every tensor that an engine can have, in the order of the forward pass."""
    num_kv_heads, group_size, head_size = config.num_kv_heads, config.group_size, config.head_size
    rotary_size = config.rotary.size

    def as_is(x: Tensor) -> Tensor:
        return x

    def pair(x: Tensor) -> Tensor:
        """Puts the two channels that rope turns together next to each other.

        Of the first R channels of a head they are i and i + R / 2; the others stay where they are.
        """
        turned, unturned = x.split([rotary_size, head_size - rotary_size], dim=-1)
        pairs = turned.unflatten(-1, (2, rotary_size // 2)).transpose(-1, -2).flatten(-2)
        return torch.cat([pairs, unturned], dim=-1)

    def qkv(x: Tensor) -> Tensor:
        sizes = [config.query_size, config.key_size, config.key_size]
        query, key, value = x.split(sizes, dim=-1)
        query = pair(query.unflatten(-1, (num_kv_heads, group_size, head_size)))
        key = pair(key.unflatten(-1, (num_kv_heads, head_size)))
        return torch.cat([query.transpose(-3, -2).flatten(-3), key.flatten(-2), value], dim=-1)

    def dense(x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(0, (num_kv_heads, group_size, head_size))
        return heads.transpose(0, 1).flatten(0, 2)

    def swap_halves(x: Tensor) -> Tensor:
        return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)

    yield LayoutRule("embedding.weight", (_EMBEDDING,), as_is)
    for n in range(config.num_layers):
        of, to = f"transformer.layers.{n}", f"layers.{n}"
        yield LayoutRule(f"{to}.attention_norm.weight", (f"{of}.input_layernorm.weight",), as_is)
        yield LayoutRule(f"{to}.qkv.weight", (f"{of}.attention.qkv.weight",), qkv)
        yield LayoutRule(f"{to}.qkv.bias", (f"{of}.attention.qkv.bias",), qkv)
        yield LayoutRule(f"{to}.q_norm.weight", (f"{of}.attention.q_layernorm.weight",), pair)
        yield LayoutRule(f"{to}.k_norm.weight", (f"{of}.attention.k_layernorm.weight",), pair)
        kv_cache_scale = f"{of}.attention.kv_cache_scaling_factor"
        yield LayoutRule(f"{to}.kv_cache.scale", (kv_cache_scale,), as_is)
        yield LayoutRule(f"{to}.dense.weight", (f"{of}.attention.dense.weight",), dense, True)
        yield LayoutRule(f"{to}.dense.bias", (f"{of}.attention.dense.bias",), as_is)
        if config.has_branch_norms:
            norms = {
                "dense_norm": "post_layernorm",
                "mlp_norm": "pre_feedforward_layernorm",
                "mlp_out_norm": "post_feedforward_layernorm",
            }
        else:
            norms = {"mlp_norm": "post_layernorm"}
        for name, norm in norms.items():
            yield LayoutRule(f"{to}.{name}.weight", (f"{of}.{norm}.weight",), as_is)
        for kind in ("weight", "bias"):
            fc, gate = f"{of}.mlp.fc.{kind}", f"{of}.mlp.gate.{kind}"
            if config.activation == "swiglu":  # fc has both halves, the activated one last
                yield LayoutRule(f"{to}.mlp_in.{kind}", (fc,), swap_halves)
            elif source.are_alike(f"{of}.mlp.fc", f"{of}.mlp.gate"):
                yield LayoutRule(f"{to}.mlp_in.{kind}", (fc, gate), as_is)
            else:
                yield LayoutRule(f"{to}.mlp_fc.{kind}", (fc,), as_is)
                yield LayoutRule(f"{to}.mlp_gate.{kind}", (gate,), as_is)
            yield LayoutRule(f"{to}.mlp_out.{kind}", (f"{of}.mlp.proj.{kind}",), as_is)
    yield LayoutRule("norm.weight", ("transformer.ln_f.weight",), as_is)
    yield LayoutRule("head.weight", (_HEAD,), as_is)


def _is_transposed(rule: LayoutRule, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and rule.sources != (_EMBEDDING,)  # rows of the embedding are looked up


def _shape(checkpoint: UnifiedCheckpoint, rule: LayoutRule) -> tuple[int, ...]:
    shapes = [checkpoint.shape(source) for source in rule.sources]
    joined = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return joined[::-1] if _is_transposed(rule, joined) else joined


def arranged(source: QuantizedSource, rule: LayoutRule) -> Tensor:
    """Reads a tensor of the engine: a view of what was read, where nothing is to be moved."""
    tensors = [source.read(name) for name in rule.sources]
    joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    return rule.arrange(joined.t() if _is_transposed(rule, joined.shape) else joined)


def _write(writer: SafetensorsWriter, entry: Entry) -> None:
    """Writes a tensor in blocks of rows, so that it is not held a second time in its dtype."""
    tensor = entry.make()
    row = 0
    for rows in tensor.split(max(1, _BLOCK_BYTES // (4 * tensor[0].numel()))):
        # FP8 comes as its bits.
        dtype = torch.uint8 if entry.dtype == "F8_E4M3" else TORCH_DTYPES[entry.dtype]
        bits = as_raw(torch.empty(rows.shape, dtype=dtype).copy_(rows))
        check_finite(bits, entry.dtype, in_tensor(entry.name, row))
        writer.write_rows(entry.name, row, bits)
        row += len(rows)


def _check_sources(checkpoint: UnifiedCheckpoint, dtype: str) -> None:
    """Refuses the first plain weight that the engine's dtype cannot hold."""
    for name in checkpoint.names():
        if checkpoint.fixed_dtype(name) is None:
            needed_dtype = "F32" if checkpoint.keeps_float32(name) else DTYPES[dtype]
            checkpoint.rounded(name, checkpoint.tensor(name), needed_dtype)
