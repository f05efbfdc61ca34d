"""What an engine of the torch runtime is, from its config and the header of its weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

from specpipe.checkpoints.checkpoint import ELEMENT_BYTES, read_safetensors_header
from specpipe.checkpoints.unified_config import DTYPES, UnifiedConfig
from specpipe.errors import CheckpointError, EngineMismatch
from specpipe.runtimes.engine_description import (
    EngineDescription,
    EngineMemory,
    RecordedFile,
    is_built_by,
    read_engine_config,
    reading_config,
)
from specpipe.runtimes.torch.build import ENGINE_KIND, WEIGHTS_NAME
from specpipe.runtimes.torch.memory import estimate_memory

_LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens", "max_draft_len")


def _parallel_settings(config: UnifiedConfig) -> dict[str, int]:
    """Returns how a draft proposes several tokens in one pass; nothing of other models."""
    if config.parallel is None:
        return {}
    return {key: n for key, n in asdict(config.parallel).items() if n is not None}


def describe(engine: Path) -> EngineDescription | None:
    """Describes an engine; None for a folder that is none of this runtime's."""
    config = read_engine_config(engine)
    if config is None or not is_built_by(config, str(ENGINE_KIND["name"])):
        return None
    try:
        tensors = read_safetensors_header(engine / WEIGHTS_NAME).values()
    except CheckpointError as exc:
        raise EngineMismatch(f"{exc}: build the engine again") from exc
    with reading_config(engine):
        pretrained = UnifiedConfig.from_json(config["pretrained_config"])
        build = config["build_config"]
        dtype, limits = build["dtype"], {name: build[name] for name in _LIMITS}
        on_gpu = build["device"] == "cuda"
        estimate = estimate_memory(
            pretrained,
            dtype=dtype,
            on_gpu=on_gpu,
            kv_cache_tokens=build.get("kv_cache_tokens"),
            **limits,
        )
        if "kv_cache_tokens" in build:
            limits["kv_cache_tokens"] = build["kv_cache_tokens"]
        return EngineDescription(
            runtime="torch",
            versions={"specpipe": config["version"]},
            architecture=pretrained.architecture,
            num_layers=pretrained.num_hidden_layers,
            dtype=dtype,
            limits=limits,
            settings={"device": build["device"], **_parallel_settings(pretrained)},
            memory=EngineMemory(
                weights_bytes=sum(tensor.num_bytes for tensor in tensors),
                kv_bytes_per_token=ELEMENT_BYTES[DTYPES[dtype]] * pretrained.kv_size,
                kv_cache_bytes=estimate.kv_cache_bytes,
                workspace_bytes=estimate.workspace_bytes,
            ),
            files=(RecordedFile(WEIGHTS_NAME),),
            weight_precisions=dict(Counter(tensor.dtype for tensor in tensors)),
        )
