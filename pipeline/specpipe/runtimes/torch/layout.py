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
| layers.n.mlp_norm.weight | [C] | post_layernorm |
| layers.n.mlp_in.weight, .bias | [C, 2 I] | mlp.fc, then mlp.gate |
| layers.n.mlp_out.weight, .bias | [I, C] | mlp.proj |
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

from specpipe.checkpoint import create_safetensors, raw_dtype
from specpipe.families import DTYPES
from specpipe.runtimes.torch.model import ModelConfig
from specpipe.unified import UnifiedCheckpoint

_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


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
    if checkpoint.config["tie_word_embeddings"] and _are_equal(checkpoint, _EMBEDDING, _HEAD):
        names.remove(_EMBEDDING)
    rules = [
        rule
        for rule in _rules(ModelConfig.from_unified(checkpoint.config))
        if names.issuperset(rule.sources)  # biases and q/k norms: where the family has them
    ]
    header = {rule.name: (DTYPES[dtype], _shape(checkpoint, rule)) for rule in rules}
    with create_safetensors(path, header) as writer:
        for rule in rules:
            joined = torch.cat([_read(checkpoint, source) for source in rule.sources])
            matrix_in_out = joined.t() if _is_transposed(rule, joined.shape) else joined
            tensor = rule.arrange(matrix_in_out).to(getattr(torch, dtype)).contiguous()
            bits = tensor.view(_BITS[tensor.dtype]).numpy()
            writer.write(rule.name, bits.view(raw_dtype(DTYPES[dtype])))


def _rules(config: ModelConfig) -> Iterator[_Rule]:
    """Yields every tensor that an engine can have, in the order of the forward pass."""
    num_kv_heads, group_size, head_size = config.num_kv_heads, config.group_size, config.head_size

    def as_is(x: Tensor) -> Tensor:
        return x

    def pair(x: Tensor) -> Tensor:
        """Puts channels i and i + D / 2, which rope turns together, next to each other."""
        halves: Tensor = x.unflatten(-1, (2, head_size // 2))
        return halves.transpose(-1, -2).flatten(-2)

    def qkv(x: Tensor) -> Tensor:
        sizes = [config.query_size, config.key_size, config.key_size]
        query, key, value = x.split(sizes, dim=-1)
        query = pair(query.unflatten(-1, (num_kv_heads, group_size, head_size)))
        key = pair(key.unflatten(-1, (num_kv_heads, head_size)))
        return torch.cat([query.transpose(-3, -2).flatten(-3), key.flatten(-2), value], dim=-1)

    def dense(x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(0, (num_kv_heads, group_size, head_size))
        return heads.transpose(0, 1).flatten(0, 2)

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
        yield _Rule(f"{to}.mlp_norm.weight", (f"{of}.post_layernorm.weight",), as_is)
        for kind in ("weight", "bias"):
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


def _are_equal(checkpoint: UnifiedCheckpoint, one: str, other: str) -> bool:
    return np.array_equal(checkpoint.tensor(one).data, checkpoint.tensor(other).data)


def _read(checkpoint: UnifiedCheckpoint, name: str) -> Tensor:
    raw = checkpoint.tensor(name)
    bits = {2: np.int16, 4: np.int32}[raw.data.itemsize]
    return torch.from_numpy(raw.data.view(bits)).view(_TORCH_DTYPES[raw.dtype])
