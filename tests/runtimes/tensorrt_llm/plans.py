"""Plans of pairs with the published shapes of real models, without their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specpipe.checkpoints.family_config import unified_config
from specpipe.config.engine import TensorRTLLMEngineConfig
from specpipe.config.sections import CheckpointConfig
from specpipe.machine.artifacts import SideArtifacts
from specpipe.quantization.quantized_config import quantized_config
from specpipe.roles import Role
from specpipe.runtimes.plan import PairPlan, Side

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
LLAMA_1B = LLAMA_70B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
MISTRAL_7B = LLAMA_70B | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}


def side(folder: Path, role: Role, config: Mapping[str, Any], **checkpoint: Any) -> Side:
    """One side of a plan; `checkpoint` are fields of CheckpointConfig."""
    path = folder / role
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    wanted = CheckpointConfig.model_validate({"checkpoint": role, **checkpoint})
    unified = unified_config(
        {**config, "dtype": "float32"}, tp_size=wanted.tp_size, pp_size=wanted.pp_size
    )
    if wanted.quantization is not None:
        unified = quantized_config(unified, wanted.quantization)
    return Side(
        role=role,
        checkpoint=wanted,
        folder=path,
        unified=unified,
        context_length=config["max_position_embeddings"],
        base_dir=folder,
        artifacts=SideArtifacts(folder / "engines" / role),
    )


def plan(
    folder: Path,
    *,
    draft: Mapping[str, Any] = LLAMA_1B,
    target: Mapping[str, Any] = LLAMA_70B,
    draft_checkpoint: Mapping[str, Any] | None = None,
    target_checkpoint: Mapping[str, Any] | None = None,
    max_seq_len: int = 4096,
    num_draft_tokens: int = 4,
    tensorrt_llm: Mapping[str, Any] | None = None,
    **engine: Any,
) -> PairPlan:
    """A plan with 8 requests at once; `engine` and `tensorrt_llm` are fields of these sections."""
    section = {"runtime": "tensorrt_llm", "tensorrt_llm": dict(tensorrt_llm or {}), **engine}
    return PairPlan(
        draft=side(folder, "draft", draft, **(draft_checkpoint or {})),
        target=side(folder, "target", target, **(target_checkpoint or {})),
        engine=TensorRTLLMEngineConfig.model_validate(section),
        max_seq_len=max_seq_len,
        num_draft_tokens=num_draft_tokens,
    )
