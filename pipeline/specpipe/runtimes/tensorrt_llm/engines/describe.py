"""What an engine of TensorRT-LLM is, from its folder; with backend `pytorch` it is a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from specpipe.checkpoints.checkpoint import (
    ELEMENT_BYTES,
    QUANT_CONFIG_NAME,
    QUANTIZATION_KEYS,
    open_checkpoint,
)
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.unified_config import DTYPES
from specpipe.errors import CheckpointError, EngineMismatch
from specpipe.machine.manifest import read_manifest
from specpipe.runtimes.engine_description import (
    EngineDescription,
    EngineMemory,
    RecordedFile,
    quantization_of,
    read_engine_config,
    reading_config,
)
from specpipe.runtimes.tensorrt_llm.engines.engine_config import read_engine
from specpipe.runtimes.tensorrt_llm.engines.serve import EngineFacts
from specpipe.runtimes.tensorrt_llm.llmapi.model_yaml import MODEL_YAML, SPECULATIVE_CONFIG

_ENGINE_LIMITS = (
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_num_tokens",
    "max_draft_len",
)
_LLM_LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens")
_SETTINGS = (
    "world_size",
    "tp_size",
    "pp_size",
    "speculative_decoding_mode",
    "kv_cache_type",
    "tokens_per_block",
    "use_paged_context_fmha",
    "gather_context_logits",
    "gather_generation_logits",
)
_KV_ALGORITHM_BYTES = {"FP8": 1, "INT8": 1}


def describe(engine: Path) -> EngineDescription | None:
    """Describes an engine; None for a folder that is none of this runtime's."""
    config = read_engine_config(engine)
    if config is None or "runtime" in config:
        return None
    if "build_config" in config and "pretrained_config" in config:
        return _describe_engine(engine, config)
    return _describe_checkpoint(engine) if _is_collected(engine) else None


def _describe_engine(engine: Path, config: Mapping[str, Any]) -> EngineDescription:
    built, built_with = read_engine(engine), EngineFacts.read(engine)
    pretrained = config["pretrained_config"]
    versions = {"tensorrt_llm": built.version, "tensorrt": built_with.tensorrt}
    capability = built_with.compute_capability
    with reading_config(engine):
        return EngineDescription(
            runtime="tensorrt_llm",
            versions={name: found for name, found in versions.items() if found is not None},
            architecture=built.architecture,
            num_layers=pretrained.get("num_hidden_layers"),
            dtype=pretrained["dtype"],
            limits={name: getattr(built, name) for name in _ENGINE_LIMITS},
            settings={
                "backend": "tensorrt",
                "logits_dtype": built.logits_dtype,
                **{name: getattr(built, name) for name in _SETTINGS},
            },
            memory=EngineMemory(
                kv_bytes_per_token=_kv_bytes_per_token(pretrained, tp_size=built.tp_size)
            ),
            files=tuple(RecordedFile(f"rank{rank}.engine") for rank in range(built.world_size)),
            quantization=quantization_of(pretrained),
            compute_capabilities=() if capability is None else (capability,),
        )


def _is_collected(folder: Path) -> bool:
    """A checkpoint is an engine where a build put it: by its manifest, or in a repository."""
    manifest = read_manifest(folder)
    if manifest is not None:
        return manifest.stage.endswith("/collect")
    return (folder.parent / MODEL_YAML).is_file()


def _describe_checkpoint(folder: Path) -> EngineDescription:
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
            kv_bytes_per_token=_kv_bytes_per_token(
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
    limits = {name: arguments[name] for name in _LLM_LIMITS if name in arguments}
    speculation = arguments.get(SPECULATIVE_CONFIG, {})
    return limits | {name: speculation[name] for name in ("max_draft_len",) if name in speculation}


def _kv_bytes_per_token(config: Mapping[str, Any], *, tp_size: int = 1) -> int | None:
    """Bytes on all GPUs together: ranks that outnumber the heads hold copies."""
    algorithm = quantization_of(config).get("kv_cache_quant_algo")
    element = (
        ELEMENT_BYTES.get(DTYPES.get(str(config.get("dtype")), ""))
        if algorithm is None
        else _KV_ALGORITHM_BYTES.get(algorithm)
    )
    sizes = [config.get(k) for k in ("num_hidden_layers", "num_key_value_heads", "head_size")]
    if element is None or None in sizes:
        return None
    num_layers, num_kv_heads, head_size = map(int, sizes)  # type: ignore[arg-type]
    return 2 * element * num_layers * -(-num_kv_heads // tp_size) * tp_size * head_size
