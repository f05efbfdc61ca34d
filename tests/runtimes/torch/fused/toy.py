"""Small random decoders, as the fused engine and the plain one both take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specpipe.machine.memory import MemoryEstimate
from specpipe.runtimes.torch.engine import TorchEngine, TorchEngineSpec
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.weights import load_weights
from specpipe.runtimes.torch.model import Model
from specpipe.runtimes.torch.model_shape import ModelConfig
from specpipe.runtimes.torch.rotary import Rotary

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 16,
}
"""Few programs in each launch: the interpreter takes milliseconds for one."""

MISTRAL_7B: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_size": 128,
}
QWEN_05B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_heads": 14,
    "num_kv_heads": 2,
    "head_size": 64,
}


def toy_config(**settings: Any) -> ModelConfig:
    """A model of TINY's shape, less what the settings say otherwise."""
    shape = {**TINY, **settings}
    plain: dict[str, Any] = {
        "norm_epsilon": 1e-5,
        "has_qk_norm": False,
        "rotary": Rotary(shape["head_size"], shape["head_size"], 10000.0),
        "activation": "silu",
        "windows": (None,) * shape["num_layers"],
        "has_branch_norms": False,
        "attention_scale": None,
        "attention_cap": None,
        "logits_cap": None,
        "embedding_scale": None,
        "formats": {},
    }
    return ModelConfig(**{**plain, **shape})


def toy_shapes(
    config: ModelConfig, *, has_bias: bool = False, is_tied: bool = False
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of an engine: layout.py."""
    hidden, inter, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    linears = {
        "qkv": (hidden, config.query_size + 2 * config.key_size),
        "dense": (config.query_size, hidden),
        "mlp_in": (hidden, 2 * inter),
        "mlp_out": (inter, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {"head.weight": (hidden, vocab), "norm.weight": (hidden,)}
    if not is_tied:
        shapes["embedding.weight"] = (vocab, hidden)
    for n in range(config.num_layers):
        for name, shape in linears.items():
            shapes[f"layers.{n}.{name}.weight"] = shape
            if has_bias:
                shapes[f"layers.{n}.{name}.bias"] = shape[1:]
        for name in ("attention_norm", "mlp_norm"):
            shapes[f"layers.{n}.{name}.weight"] = (hidden,)
        if config.has_qk_norm:
            for name in ("q_norm", "k_norm"):
                shapes[f"layers.{n}.{name}.weight"] = (config.head_size,)
    return shapes


def toy_weights(config: ModelConfig, *, seed: int = 0, **shapes: bool) -> dict[str, Tensor]:
    """Float32; logits differ by far more than rounding does, whatever the tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in toy_shapes(config, **shapes).items():
        x = torch.randn(shape, generator=generator)
        if "norm" in name:
            x = 1 + 0.2 * x
        elif name == "head.weight":
            x *= 3 * shape[0] ** -0.5
        elif name != "embedding.weight" and len(shape) == 2:
            x *= shape[0] ** -0.5
        weights[name] = x.to(DEVICE)
    return weights


def toy_spec(config: ModelConfig, **limits: int) -> TorchEngineSpec:
    sizes: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 100, "max_draft_len": 4, **limits}
    memory = MemoryEstimate(weights_bytes=0, kv_cache_bytes=0, workspace_bytes=0)
    return TorchEngineSpec(model=config, dtype=torch.float32, device=DEVICE, memory=memory, **sizes)


def toy_engines(
    config: ModelConfig,
    *,
    seed: int = 0,
    limits: dict[str, int] | None = None,
    short_prompt: int = 0,
    **shapes: bool,
) -> tuple[FusedEngine, TorchEngine]:
    """The same model, fused and plain; prompts go through the kernels for them, if not said so."""
    weights = toy_weights(config, seed=seed, **shapes)
    spec = toy_spec(config, **(limits or {}))
    with torch.inference_mode():
        return (
            FusedEngine(spec, load_weights(config, weights.get), short_prompt=short_prompt),
            TorchEngine(spec, Model(config, weights)),
        )
