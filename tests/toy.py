"""Toy checkpoints for tests: two layers of seeded random weights in Hugging Face's layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specpipe.checkpoints.checkpoint import (
    TensorInfo,
    create_safetensors,
    read_blocks,
    read_safetensors_header,
)

Raw = npt.NDArray[Any]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""What rope type llama3 has of its own, for a model of few positions."""
_STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def toy_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """Returns the toy's config.json as transformers 5 spells it; `key=...` leaves a key out."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "dtype": "bfloat16",
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "mistral":
        config["sliding_window"] = None
    if family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "max_window_layers": 2, "sliding_window": None}
    if family == "phi3":
        config |= {"original_max_position_embeddings": 512, "sliding_window": None}
    if family == "gemma2":
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 64,
            "tie_word_embeddings": True,
        }
    return {key: value for key, value in (config | overrides).items() if value is not ...}


def spelled_as_4_57(config: Mapping[str, Any]) -> dict[str, Any]:
    """Spells a toy's config as transformers 4.57 does."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if config["model_type"] == "phi3":
        rope["type"] = rope.pop("rope_type")
    is_plain = "default" in (rope.get("rope_type"), rope.get("type"))
    config["rope_scaling"] = None if is_plain else rope
    config["torch_dtype"] = config.pop("dtype")
    return config


def toy_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every Hugging Face tensor of a toy config."""
    family, hidden = config["model_type"], config["hidden_size"]
    inter, head = config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention_bias = bool(config.get("attention_bias"))
    mlp_bias = family == "llama" and bool(config.get("mlp_bias"))
    linears: dict[str, tuple[int, int, bool]] = {
        "self_attn.q_proj": (heads * head, hidden, attention_bias or family == "qwen2"),
        "self_attn.k_proj": (kv_heads * head, hidden, attention_bias or family == "qwen2"),
        "self_attn.v_proj": (kv_heads * head, hidden, attention_bias or family == "qwen2"),
        "self_attn.o_proj": (hidden, heads * head, attention_bias),
        "mlp.gate_proj": (inter, hidden, mlp_bias),
        "mlp.up_proj": (inter, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inter, mlp_bias),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family == "gemma2":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if family == "phi3":
        linears = {
            "self_attn.qkv_proj": ((heads + 2 * kv_heads) * head, hidden, False),
            "self_attn.o_proj": (hidden, heads * head, False),
            "mlp.gate_up_proj": (2 * inter, hidden, False),
            "mlp.down_proj": (hidden, inter, False),
        }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        shapes |= {f"{prefix}.{norm}.weight": (hidden,) for norm in norms}
        if family == "qwen3":
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def toy_tensors(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, Raw]:
    """Returns the toy's weights as raw bits, with a standard deviation of 0.1.

    Norms are near 1; those of Gemma 2 near 0, to which it adds 1.
    """
    generator = np.random.default_rng(seed)
    stored = _STORED[config["dtype"]]
    tensors: dict[str, Raw] = {}
    for name, shape in toy_shapes(config).items():
        values = 0.1 * generator.standard_normal(shape, np.float32)
        if name.endswith("norm.weight") and config["model_type"] != "gemma2":
            values += 1
        if stored == "F32":
            tensors[name] = values.view(np.uint32)
        elif stored == "F16":
            tensors[name] = values.astype(np.float16).view(np.uint16)
        else:
            tensors[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return tensors


def write_parallel_draft(
    source: Path, folder: Path, *, num_draft_tokens: int | None = 8, num_rows: int = 8
) -> Path:
    """Copies a checkpoint as if it had been trained to propose several tokens in one pass.

    Its vocabulary grows by some rows, of which the first is the mask's; all are those of id 0.
    """
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    mask = config["vocab_size"]
    config |= {
        "vocab_size": mask + num_rows,
        "pard_token": mask,
        "specpipe_num_draft_tokens": num_draft_tokens,
    }
    (folder / "config.json").write_text(json.dumps(config))
    path = source / "model.safetensors"
    header = read_safetensors_header(path)
    tensors = {name: read_tensor(info) for name, info in header.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            weight = tensors[name].reshape(header[name].shape)
            tensors[name] = np.concatenate([weight, weight[:1].repeat(num_rows, axis=0)])
    (folder / "model.safetensors").unlink()
    write_tensors(folder / "model.safetensors", tensors, dtype=next(iter(header.values())).dtype)
    return folder


def read_tensor(info: TensorInfo) -> Raw:
    """Reads a whole tensor as raw bits."""
    blocks = [block.copy() for block in read_blocks(info)]
    return np.concatenate(blocks) if blocks else np.empty(info.shape)


def write_tensors(path: Path, tensors: Mapping[str, Raw], *, dtype: str = "BF16") -> None:
    """Writes raw tensors of one dtype as a safetensors file."""
    with create_safetensors(
        path, {name: (dtype, array.shape) for name, array in tensors.items()}
    ) as writer:
        for name, array in tensors.items():
            writer.write(name, array)


def write_toy_checkpoint(
    folder: Path, family: str = "llama", *, seed: int = 0, num_shards: int = 1, **overrides: Any
) -> Path:
    """Writes a toy checkpoint and returns its folder.

    hidden 32, 2 layers, 4 heads, 2 KV heads, intermediate 64, 256 embedding rows, bf16. `overrides`
    replace keys of config.json; several shards come with an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = toy_config(family, **overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = toy_tensors(config, seed=seed)
    stored = _STORED[config["dtype"]]
    if num_shards == 1:
        write_tensors(folder / "model.safetensors", tensors, dtype=stored)
        return folder
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        held = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        write_tensors(folder / file, {name: tensors[name] for name in held}, dtype=stored)
        weight_map |= dict.fromkeys(held, file)
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in tensors.values())},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
