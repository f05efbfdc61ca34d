"""What a checkpoint is that the LLM API is given, from its folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from specpipe.checkpoints.checkpoint import (
    QUANT_CONFIG_NAME,
    QUANTIZATION_KEYS,
    open_checkpoint,
)
from specpipe.checkpoints.family_config import unified_config
from specpipe.errors import CheckpointError, EngineMismatch
from specpipe.machine.manifest import read_manifest
from specpipe.runtimes.engine_description import (
    EngineDescription,
    EngineMemory,
    RecordedFile,
    quantization_of,
    read_engine_config,
)
from specpipe.runtimes.tensorrt_llm.kv_plan import kv_bytes_per_token
from specpipe.runtimes.tensorrt_llm.llmapi.model_yaml import MODEL_YAML, SPECULATIVE_CONFIG

_LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens")


def _is_collected(folder: Path) -> bool:
    """A checkpoint is an engine where a build put it: by its manifest, or in a repository."""
    manifest = read_manifest(folder)
    if manifest is not None:
        return manifest.stage.endswith("/collect")
    return (folder.parent / MODEL_YAML).is_file()


def describe(folder: Path) -> EngineDescription | None:
    """Describes a collected checkpoint; None for a folder that is none."""
    config = read_engine_config(folder)
    if config is None or "runtime" in config or not _is_collected(folder):
        return None
    try:
        found = open_checkpoint(folder, allow_quantized=True)
        plain = {key: found.config[key] for key in found.config if key not in QUANTIZATION_KEYS}
        unified = unified_config(plain)
    except CheckpointError as exc:
        raise EngineMismatch(f"{folder} cannot be read ({exc}): build it again") from exc
    quantization = _checkpoint_quantization(folder, found.config)
    arguments = _llm_arguments(folder.parent / MODEL_YAML)
    tensors = found.tensors.values()
    return EngineDescription(
        runtime="tensorrt_llm",
        versions={},
        architecture=unified.architecture,
        num_layers=unified.num_hidden_layers,
        dtype=unified.dtype,
        limits=_llm_limits(arguments),
        settings={"backend": "pytorch"},
        memory=EngineMemory(
            weights_bytes=sum(tensor.num_bytes for tensor in tensors),
            kv_bytes_per_token=kv_bytes_per_token(
                {**unified.plain(), "quantization": quantization}
            ),
        ),
        files=tuple(RecordedFile(name) for name in sorted({info.file.name for info in tensors})),
        quantization=quantization,
        weight_precisions=dict(Counter(tensor.dtype for tensor in tensors)),
    )


def _checkpoint_quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """What ModelOpt wrote beside the weights, or the method that config.json names."""
    path = folder / QUANT_CONFIG_NAME
    if path.is_file():
        try:
            return quantization_of(json.loads(path.read_bytes()))
        except (ValueError, AttributeError) as exc:
            raise EngineMismatch(f"{path} cannot be read ({exc}): build it again") from exc
    named = next((config[key] for key in QUANTIZATION_KEYS if config.get(key)), None)
    method = named.get("quant_method") if isinstance(named, dict) else None
    return {} if method is None else {"quant_method": str(method)}


def _llm_arguments(path: Path) -> dict[str, Any]:
    """What the repository's model.yaml says; nothing where the checkpoint lies in no repository."""
    if not path.is_file():
        return {}
    arguments = yaml.safe_load(path.read_text(encoding="utf-8"))
    return arguments if isinstance(arguments, dict) else {}


def _llm_limits(arguments: Mapping[str, Any]) -> dict[str, int]:
    limits = {name: arguments[name] for name in _LIMITS if name in arguments}
    speculation = arguments.get(SPECULATIVE_CONFIG, {})
    return limits | {name: speculation[name] for name in ("max_draft_len",) if name in speculation}
