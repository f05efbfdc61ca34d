from __future__ import annotations

from typing import Any

import pytest

from specpipe.runtimes.torch.fused.weights import unsupported
from specpipe.runtimes.torch.rotary import Rotary
from tests.runtimes.torch.fused.toy import MISTRAL_7B, QWEN_05B, toy_config

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"has_qk_norm": True},
        {"windows": (8, None)},
        {"activation": "swiglu"},
        {"activation": "gelu_pytorch_tanh", "embedding_scale": 5.7},
        {"attention_scale": 0.1},
        {"rotary": Rotary(16, 16, 1e4, LINEAR)},
        {"rotary": Rotary(16, 8, 1e4)},
        {"head_size": 128},
        {"vocab_size": 1001},
        {"num_heads": 7, "num_kv_heads": 1},
        {**MISTRAL_7B, "num_layers": 1},
        {**QWEN_05B, "num_layers": 1},
    ],
)
def test_they_run(settings: dict[str, Any]) -> None:
    assert unsupported(toy_config(**settings)) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"formats": {"layers.0.qkv": "w4a16", "layers.0.dense": "w4a16", "head": "int8"}},
            "linears in int8, w4a16",
        ),
        ({"has_branch_norms": True}, "norms behind attention and MLP"),
        ({"attention_cap": 50.0}, "capped scores"),
        ({"logits_cap": 30.0}, "capped scores"),
        (
            {"rotary": Rotary(16, 16, 1e4, DYNAMIC)},
            "rope type dynamic, whose table depends on the request",
        ),
        (
            {"rotary": Rotary(16, 16, 1e4, LONGROPE)},
            "rope type longrope, whose table depends on the request",
        ),
        ({"activation": "relu"}, "activation relu"),
        ({"head_size": 96}, "heads of 96 channels"),
        ({"head_size": 8}, "heads of 8 channels"),
        ({"head_size": 512}, "heads of 512 channels"),
        ({"hidden_size": 48}, "hidden_size 48, which 32 does not divide"),
        ({"intermediate_size": 100}, "intermediate_size 100, which 32 does not divide"),
    ],
)
def test_each_reason_is_told(settings: dict[str, Any], reason: str) -> None:
    assert unsupported(toy_config(**settings)) == reason
