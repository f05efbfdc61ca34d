"""What an engine of the TensorRT runtime is, from its config.json: without TensorRT and a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specpipe.checkpoints.checkpoint import ELEMENT_BYTES
from specpipe.checkpoints.unified_config import DTYPES, UnifiedConfig
from specpipe.runtimes.engine_description import (
    DescribedProfile,
    DescribedTensor,
    EngineDescription,
    EngineMemory,
    RecordedFile,
    is_built_by,
    read_engine_config,
    reading_config,
)
from specpipe.runtimes.tensorrt import shapes
from specpipe.runtimes.tensorrt.build import ENGINE_KIND, ENGINE_NAME, WEIGHTS_NAME
from specpipe.runtimes.tensorrt.memory import estimate_memory

_LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens", "max_draft_len")

_LETTERS = {
    shapes.INPUT_IDS: "BN",
    shapes.POSITION_IDS: "BN",
    shapes.WRITE_INDICES: "B",
    shapes.KEY_VALUE_LENGTHS: "B",
    shapes.LOGITS_INDICES: "R",
    shapes.LOGITS: "R",
}
"""The sizes that differ from call to call, in order; of what is not listed, KV caches: B."""

_DTYPES = {"float": "float32", "half": "float16", "bf16": "bfloat16"}
"""The library's names that others spell otherwise."""


def describe(engine: Path) -> EngineDescription | None:
    """Describes an engine; None for a folder that is none of this runtime's."""
    config = read_engine_config(engine)
    if config is None or not is_built_by(config, str(ENGINE_KIND["name"])):
        return None
    with reading_config(engine):
        pretrained = UnifiedConfig.from_json(config["pretrained_config"])
        build, builder = config["build_config"], config["builder"]
        dtype, limits = build["dtype"], {name: build[name] for name in _LIMITS}
        estimate = estimate_memory(pretrained, dtype=dtype, **limits)
        plan = builder["engine"]
        files = [RecordedFile(ENGINE_NAME, plan["bytes"], plan["sha256"])]
        if "weights_bytes" in builder:
            files.append(RecordedFile(WEIGHTS_NAME, builder["weights_bytes"]))
        return EngineDescription(
            runtime="tensorrt",
            versions={
                "specpipe": config["version"],
                builder["library"]: builder["library_version"],
            },
            architecture=pretrained.architecture,
            num_layers=pretrained.num_hidden_layers,
            dtype=dtype,
            limits=limits,
            settings={key: builder[key] for key in ("library", "weights", "weight_streaming")},
            compute_capabilities=tuple(builder["compute_capabilities"]),
            memory=EngineMemory(
                weights_bytes=estimate.weights_bytes,
                kv_bytes_per_token=ELEMENT_BYTES[DTYPES[dtype]] * pretrained.kv_size,
                kv_cache_bytes=estimate.kv_cache_bytes,
                workspace_bytes=estimate.workspace_bytes,
            ),
            files=tuple(files),
            inputs=_tensors(builder["inputs"]),
            outputs=_tensors(builder["outputs"]),
            profiles=tuple(map(_profile, builder["profiles"])),
            layers=builder["layers"],
            layer_precisions={_dtype(n): count for n, count in builder["precisions"].items()},
        )


def _tensors(described: Sequence[Mapping[str, Any]]) -> tuple[DescribedTensor, ...]:
    return tuple(
        DescribedTensor(
            tensor["name"], _dtype(tensor["dtype"]), _shape(tensor["name"], tensor["shape"])
        )
        for tensor in described
    )


def _dtype(name: str) -> str:
    return _DTYPES.get(name, name)


def _shape(name: str, sizes: Sequence[int]) -> tuple[int | str, ...]:
    letters = iter(_LETTERS.get(name, "B"))
    return tuple(next(letters) if size == -1 else size for size in sizes)


def _profile(described: Mapping[str, Any]) -> DescribedProfile:
    profile = shapes.Profile.from_json(described)
    return DescribedProfile(
        profile.name, {"B": profile.batch, "N": profile.tokens, "R": profile.logits}
    )
