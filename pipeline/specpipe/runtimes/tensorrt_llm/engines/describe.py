"""What an engine of `trtllm-build` is, from its folder."""

from __future__ import annotations

from pathlib import Path

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
from specpipe.runtimes.tensorrt_llm.kv_plan import kv_bytes_per_token

_LIMITS = (
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_num_tokens",
    "max_draft_len",
)
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


def describe(engine: Path) -> EngineDescription | None:
    """Describes an engine; None for a folder that is none of `trtllm-build`'s."""
    config = read_engine_config(engine) or {}
    if "runtime" in config or not {"build_config", "pretrained_config"} <= config.keys():
        return None
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
            limits={name: getattr(built, name) for name in _LIMITS},
            settings={
                "backend": "tensorrt",
                "logits_dtype": built.logits_dtype,
                **{name: getattr(built, name) for name in _SETTINGS},
            },
            memory=EngineMemory(
                kv_bytes_per_token=kv_bytes_per_token(pretrained, tp_size=built.tp_size)
            ),
            files=tuple(RecordedFile(f"rank{rank}.engine") for rank in range(built.world_size)),
            quantization=quantization_of(pretrained),
            compute_capabilities=() if capability is None else (capability,),
        )
