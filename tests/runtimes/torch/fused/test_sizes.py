"""What engines are sized by, and that the memory estimate knows it."""

from __future__ import annotations

import pytest
import torch

from specpipe.checkpoints.family_config import unified_config
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.weights import load_weights
from specpipe.runtimes.torch.fused_sizes import max_parts, spare_positions
from specpipe.runtimes.torch.graph_memory import graph_bytes
from specpipe.runtimes.torch.memory import estimate_memory
from specpipe.runtimes.torch.model_shape import ModelConfig
from tests import toy
from tests.runtimes.torch.fused.toy import toy_spec, toy_weights


@pytest.mark.parametrize(
    ("capacity", "parts"),
    [(1, 1), (128, 1), (129, 2), (4096, 32), (4097, 32), (32768, 32), (32769, 33)],
)
def test_parts_of_attention(capacity: int, parts: int) -> None:
    assert max_parts(capacity) == parts


def test_spare_positions_are_for_three_rounds() -> None:
    assert [spare_positions(k) for k in (0, 4)] == [3, 15]


@pytest.mark.parametrize(("max_batch_size", "of_pages"), [(2, {}), (5, {"kv_cache_tokens": 640})])
def test_the_estimate_counts_what_an_engine_holds(
    max_batch_size: int, of_pages: dict[str, int]
) -> None:
    unified = unified_config(toy.toy_config(head_dim=16), tp_size=1, pp_size=1)
    limits = {"max_batch_size": max_batch_size, "max_seq_len": 500, "max_draft_len": 4, **of_pages}
    spec = toy_spec(ModelConfig.from_unified(unified), **limits)
    with torch.inference_mode():
        weights = load_weights(spec.model, toy_weights(spec.model).get)
        engine = FusedEngine(spec, weights)
    estimate = estimate_memory(unified, dtype="float32", max_num_tokens=0, on_gpu=True, **limits)
    cache, decoder, prompts = engine.cache, engine.decoder, engine.prompts
    assert engine.capacity_tokens == of_pages.get("kv_cache_tokens", 2 * 576)
    assert estimate.kv_cache_bytes == sum(x.nbytes for x in (*cache.keys, *cache.values))
    recorded = graph_bytes(
        spec.model.num_layers, capacity=engine.capacity, max_batch_size=max_batch_size,
        max_draft_len=4,
    )  # fmt: skip
    buffers = [decoder._sums, decoder._states, decoder.logits]
    buffers += [prompts._hidden, prompts._normed, prompts._qkv, prompts._query]
    buffers += [prompts._attended, prompts._mlp, prompts._unpacked, prompts._rounded]
    logits = 4 * 2 * engine.max_logits * engine.vocab_size  # of a forward, and as they are sampled
    assert estimate.workspace_bytes == sum(x.nbytes for x in buffers) + recorded + logits
