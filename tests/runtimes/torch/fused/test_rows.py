"""What a row computes, bit for bit, in launches of every width; on a GPU, whose bits they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.linear import ROUNDED, Kind, Linear, int4_block
from specpipe.runtimes.torch.fused.weights import Layer, Weights
from specpipe.runtimes.torch.fused_sizes import WIDTHS
from specpipe.runtimes.torch.model_shape import ModelConfig
from tests.runtimes.torch.fused.toy import DEVICE, toy_config, toy_spec

pytestmark = pytest.mark.gpu

MOST = WIDTHS[-1]

SHAPES: dict[str, dict[str, Any]] = {
    "large": {
        "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32,
        "num_kv_heads": 8, "head_size": 128,
    },
    "uneven": {  # columns in parts of channels, and heads that are normed by themselves
        "vocab_size": 20000, "hidden_size": 5120, "intermediate_size": 9728, "num_heads": 16,
        "num_kv_heads": 4, "head_size": 64, "has_qk_norm": True,
    },
    "small": {  # most matrices are held in the chip
        "vocab_size": 4096, "hidden_size": 896, "intermediate_size": 4864, "num_heads": 14,
        "num_kv_heads": 2, "head_size": 64,
    },
    "tiny": {  # those that are not have 16 columns a program, where launches of many rows have 64
        "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4,
        "num_kv_heads": 2, "head_size": 32,
    },
}  # fmt: skip


def random_linear(
    kind: Kind, group: int, columns: int, channels: int, dtype: torch.dtype
) -> Linear:
    """With a bias; numbers of a wide range, so that the order of additions shows."""
    shape = columns, channels
    bias = torch.randn(columns, device=DEVICE).to(dtype)
    wide = torch.randn(shape, device=DEVICE) * torch.randn(shape, device=DEVICE).exp()
    if kind == "plain":
        return Linear((wide / (3 * channels**0.5)).to(dtype), bias)
    scale = 0.5 + torch.rand((channels // group, columns) if group else columns, device=DEVICE)
    scale /= channels**0.5
    if kind in ROUNDED:
        codes = wide.clamp(-448, 448).to(torch.float8_e4m3fn)
        return Linear(codes, bias, kind, scale * 0.1, input_scale=0.05)
    if kind == "int8":
        return Linear((30 * wide).clamp(-127, 127).to(torch.int8), bias, kind, scale / 50)
    codes = torch.randint(0, 256, (columns, channels // 2), device=DEVICE, dtype=torch.uint8)
    return Linear(codes, bias, kind, scale / 5, block=int4_block(channels, group))


def random_engine(
    config: ModelConfig,
    kind: Kind,
    group: int,
    dtype: torch.dtype,
    *,
    max_batch_size: int = MOST,
    max_seq_len: int = 16,
) -> FusedEngine:
    torch.manual_seed(0)
    hidden, inter, queries = config.hidden_size, config.intermediate_size, config.query_size

    def norm(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size, device=DEVICE)).to(dtype)

    def linear(columns: int, channels: int) -> Linear:
        return random_linear(kind, group, columns, channels, dtype)

    head_norm = norm(config.head_size) if config.has_qk_norm else None
    layers = [
        Layer(
            attention_norm=norm(hidden), qkv=linear(queries + 2 * config.key_size, hidden),
            query_norm=head_norm, key_norm=head_norm, dense=linear(hidden, queries),
            mlp_norm=norm(hidden), mlp_in=linear(2 * inter, hidden), mlp_out=linear(hidden, inter),
        )
        for _ in range(config.num_layers)
    ]  # fmt: skip
    embedding = torch.randn(config.vocab_size, hidden, device=DEVICE).to(dtype)
    head = replace(linear(config.vocab_size, hidden), bias=None)
    spec = toy_spec(config, max_batch_size=max_batch_size, max_seq_len=max_seq_len, max_draft_len=0)
    weights = Weights(embedding, tuple(layers), norm(hidden), head)
    return FusedEngine(replace(spec, dtype=dtype), weights)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("shape", "kind", "group"),
    [
        ("large", "plain", 0), ("uneven", "plain", 0), ("small", "plain", 0),
        ("tiny", "plain", 0),
        ("large", "fp8", 0), ("small", "fp8", 0),
        ("large", "fp8_per_token", 0), ("uneven", "fp8_per_token", 0),
        ("small", "fp8_per_token", 0),
        ("large", "int8", 0), ("small", "int8", 0),
        ("small", "int4", 0), ("small", "int4", 32), ("large", "int4", 128),
    ],
)  # fmt: skip
def test_a_row_is_the_same_in_launches_of_every_width(shape: str, kind: Kind, group: int) -> None:
    engine = random_engine(toy_config(**SHAPES[shape]), kind, group, torch.bfloat16)
    sequences = [engine.allocate(prompt_length=1, max_tokens=10) for _ in range(MOST)]
    texts = torch.randint(0, 1024, (MOST, 2)).tolist()

    def run(chosen: Sequence[int]) -> Tensor:
        """Logits [chosen, 2, V] after the tokens of some texts, one of each in a launch."""
        for sequence in sequences:
            engine.truncate(sequence, 0)
        steps = []
        for position in range(2):
            batch = [(sequences[i], [texts[i][position]]) for i in chosen]
            steps.append(engine.forward(batch, [1] * len(batch)))
        return torch.stack(steps, dim=1)

    alone = {i: run([i])[0] for i in range(MOST - 1, -1, -9)}
    assert all(logits.isfinite().all() for logits in alone.values())
    assert len({float(logits[1].max()) for logits in alone.values()}) == len(alone)
    for num_rows in (2, 16, 17, 32, 64, MOST):
        chosen = range(MOST - 1, MOST - 1 - num_rows, -1)  # in other places than their own
        together = dict(zip(chosen, run(chosen), strict=True))
        for i in alone.keys() & together.keys():
            assert torch.equal(together[i], alone[i]), (num_rows, i)
    for sequence in sequences:
        engine.truncate(sequence, 0)
    half = range(MOST // 2, MOST)
    both = engine.forward([(sequences[i], texts[i]) for i in half], [2] * len(half))
    for i, logits in zip(half, both.unflatten(0, (-1, 2)), strict=True):
        assert i not in alone or torch.equal(logits, alone[i]), i
