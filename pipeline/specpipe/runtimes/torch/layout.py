"""The weights of an engine: what each tensor is made of, and the order of its rows and columns.

model.py says why this layout. Letters beyond style: G query heads per key-value head, C channels
(hidden_size), I channels of the MLP (intermediate_size).

| tensor | shape | of the unified checkpoint |
|---|---|---|
| embedding.weight | [V, C] | transformer.vocab_embedding; absent where the head equals it |
| layers.n.attention_norm.weight | [C] | input_layernorm |
| layers.n.qkv.weight, .bias | [C, (H + 2 H_kv) D] | attention.qkv |
| layers.n.q_norm.weight, k_norm.weight | [D] | attention.q_layernorm, k_layernorm |
| layers.n.dense.weight, .bias | [H D, C] | attention.dense |
| layers.n.dense_norm.weight | [C] | post_layernorm, where branches have norms |
| layers.n.mlp_norm.weight | [C] | post_layernorm, else pre_feedforward_layernorm |
| layers.n.mlp_in.weight, .bias | [C, 2 I] | mlp.fc, then mlp.gate; the halves of a fused mlp.fc |
| layers.n.mlp_out.weight, .bias | [I, C] | mlp.proj |
| layers.n.mlp_out_norm.weight | [C] | post_feedforward_layernorm |
| norm.weight | [C] | transformer.ln_f |
| head.weight | [C, V] | lm_head |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specpipe.checkpoint import SafetensorsWriter, create_safetensors, raw_dtype
from specpipe.families import DTYPES
from specpipe.runtimes.torch.model import ModelConfig
from specpipe.unified import UnifiedCheckpoint

_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_BLOCK_BYTES = 16 << 20  # of float32; rows enough to read whole cache lines where it transposes

_EMBEDDING, _HEAD = "transformer.vocab_embedding.weight", "lm_head.weight"


@dataclass(frozen=True)
class _Rule:
    """One tensor of the engine.

    sources  the unified tensors that it is joined from, along their output channels
    arrange  what is done to the joined tensor, a matrix already being [in, out]; keeps its shape
    """

    name: str
    sources: tuple[str, ...]
    arrange: Callable[[Tensor], Tensor]


def write_weights(path: Path, checkpoint: UnifiedCheckpoint, dtype: str) -> None:
    """Writes the engine's weights in `dtype` ("float32" …), one tensor at a time."""
    names = set(checkpoint.names())
    if checkpoint.config["tie_word_embeddings"] and checkpoint.holds(
        _HEAD, checkpoint.tensor(_EMBEDDING).data
    ):
        names.remove(_EMBEDDING)
    rules = [
        rule
        for rule in _rules(ModelConfig.from_unified(checkpoint.config))
        if names.issuperset(rule.sources)  # biases and q/k norms: where the family has them
    ]
    dtypes = {
        rule.name: "float32" if checkpoint.keeps_float32(rule.sources[0]) else dtype
        for rule in rules
    }
    header = {rule.name: (DTYPES[dtypes[rule.name]], _shape(checkpoint, rule)) for rule in rules}
    with create_safetensors(path, header) as writer:
        for rule in rules:
            _write(writer, rule.name, _arranged(checkpoint, rule), dtypes[rule.name])


def _rules(config: ModelConfig) -> Iterator[_Rule]:
    """Yields every tensor that an engine can have, in the order of the forward pass."""
    num_kv_heads, group_size, head_size = config.num_kv_heads, config.group_size, config.head_size
    rotary_size = config.rotary.size

    def as_is(x: Tensor) -> Tensor:
        return x

    def pair(x: Tensor) -> Tensor:
        """Puts the two channels that rope turns together next to each other.

        Of the first R channels of a head they are i and i + R / 2; the others stay where they are.
        """
        turned, kept = x.split([rotary_size, head_size - rotary_size], dim=-1)
        pairs = turned.unflatten(-1, (2, rotary_size // 2)).transpose(-1, -2).flatten(-2)
        return torch.cat([pairs, kept], dim=-1)

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

    yield _Rule("embedding.weight", (_EMBEDDING,), as_is)
    for n in range(config.num_layers):
        of, to = f"transformer.layers.{n}", f"layers.{n}"
        yield _Rule(f"{to}.attention_norm.weight", (f"{of}.input_layernorm.weight",), as_is)
        yield _Rule(f"{to}.qkv.weight", (f"{of}.attention.qkv.weight",), qkv)
        yield _Rule(f"{to}.qkv.bias", (f"{of}.attention.qkv.bias",), qkv)
        yield _Rule(f"{to}.q_norm.weight", (f"{of}.attention.q_layernorm.weight",), pair)
        yield _Rule(f"{to}.k_norm.weight", (f"{of}.attention.k_layernorm.weight",), pair)
        yield _Rule(f"{to}.dense.weight", (f"{of}.attention.dense.weight",), dense)
        yield _Rule(f"{to}.dense.bias", (f"{of}.attention.dense.bias",), as_is)
        if config.has_branch_norms:
            norms = {
                "dense_norm": "post_layernorm",
                "mlp_norm": "pre_feedforward_layernorm",
                "mlp_out_norm": "post_feedforward_layernorm",
            }
        else:
            norms = {"mlp_norm": "post_layernorm"}
        for name, source in norms.items():
            yield _Rule(f"{to}.{name}.weight", (f"{of}.{source}.weight",), as_is)
        for kind in ("weight", "bias"):
            if config.activation == "swiglu":  # fc has both halves, the activated one last
                yield _Rule(f"{to}.mlp_in.{kind}", (f"{of}.mlp.fc.{kind}",), swap_halves)
            else:
                sources = (f"{of}.mlp.fc.{kind}", f"{of}.mlp.gate.{kind}")
                yield _Rule(f"{to}.mlp_in.{kind}", sources, as_is)
            yield _Rule(f"{to}.mlp_out.{kind}", (f"{of}.mlp.proj.{kind}",), as_is)
    yield _Rule("norm.weight", ("transformer.ln_f.weight",), as_is)
    yield _Rule("head.weight", (_HEAD,), as_is)


def _is_transposed(rule: _Rule, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and rule.sources != (_EMBEDDING,)  # rows of the embedding are looked up


def _shape(checkpoint: UnifiedCheckpoint, rule: _Rule) -> tuple[int, ...]:
    shapes = [checkpoint.shape(source) for source in rule.sources]
    joined = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return joined[::-1] if _is_transposed(rule, joined) else joined


def _arranged(checkpoint: UnifiedCheckpoint, rule: _Rule) -> Tensor:
    """Reads a tensor of the engine: a view of what was read, where nothing is to be moved."""
    tensors = [_read(checkpoint, source) for source in rule.sources]
    joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    return rule.arrange(joined.t() if _is_transposed(rule, joined.shape) else joined)


def _write(writer: SafetensorsWriter, name: str, tensor: Tensor, dtype: str) -> None:
    """Writes a tensor in blocks of rows, so that it is not held a second time as `dtype`."""
    row = 0
    for rows in tensor.split(max(1, _BLOCK_BYTES // (4 * tensor[0].numel()))):
        block = torch.empty(rows.shape, dtype=getattr(torch, dtype)).copy_(rows)
        bits = block.view(_BITS[block.dtype]).numpy()
        writer.write_rows(name, row, bits.view(raw_dtype(DTYPES[dtype])))
        row += len(rows)


def _read(checkpoint: UnifiedCheckpoint, name: str) -> Tensor:
    raw = checkpoint.tensor(name)
    bits = {2: np.int16, 4: np.int32}[raw.data.itemsize]
    return torch.from_numpy(raw.data.view(bits)).view(_TORCH_DTYPES[raw.dtype])
