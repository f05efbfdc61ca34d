"""Engine folders as trtllm-build leaves them, but for the engines: for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specpipe.build.stages.package import models_folder
from specpipe.config.tensorrt_llm_parameters import TritonParameters
from specpipe.roles import Role
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile
from specpipe.triton import repository

_TOKENIZER = Path(__file__).parents[4] / "models" / "python-code" / "target"


def engine_json(role: Role, **changes: Any) -> dict[str, Any]:
    """An engine's config.json, version 1.2.1; `changes` replace keys wherever they stand."""
    is_target = role == "target"
    config: dict[str, Any] = {
        "version": "1.2.1",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "logits_dtype": "float32",
            "vocab_size": 256,
            "max_position_embeddings": 512,
            "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        },
        "build_config": {
            "max_input_len": 516 if is_target else 512,
            "max_seq_len": 516 if is_target else 512,
            "max_batch_size": 8,
            "max_num_tokens": 8192,
            "max_beam_width": 1,
            "max_draft_len": 4 if is_target else 0,
            "speculative_decoding_mode": 2 if is_target else 1,
            "kv_cache_type": "PAGED",
            "gather_context_logits": False,
            "gather_generation_logits": False,
            "plugin_config": {"tokens_per_block": 32, "use_paged_context_fmha": True},
        },
    }
    unknown = dict(changes)
    _replace(config, changes, unknown)
    config["pretrained_config"] |= unknown
    return config


def _replace(section: dict[str, Any], changes: dict[str, Any], unknown: dict[str, Any]) -> None:
    for key, value in section.items():
        if key in changes:
            section[key] = changes[key]
            unknown.pop(key, None)
        elif isinstance(value, dict):
            _replace(value, changes, unknown)


def write_engine(folder: Path, role: Role, **changes: Any) -> Path:
    """Writes an engine folder, with an empty file for each rank."""
    folder.mkdir(parents=True)
    config = engine_json(role, **changes)
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(config["pretrained_config"]["mapping"]["world_size"]):
        (folder / f"rank{rank}.engine").write_bytes(b"")
    (folder / "specpipe.json").write_text("{}")
    (folder / "model.cache").write_bytes(b"timing")
    return folder


def pair_options(**changes: Any) -> PairOptions:
    """Options as a plan for these engines has them; `changes` go to the runtime's settings, those
    named `parameters` into its parameters."""
    parameters = {**TritonParameters().model_dump(), **changes.pop("parameters", {})}
    settings = {
        "backend": "tensorrt",
        "tensorrt_llm": "1.2.1",
        "acceptance": "exact",
        "kv_cache_free_gpu_mem_fraction": 0.9,
        "draft_world_size": 1,
        "draft_gpu_ids": [0],
        "draft_kv_cache_tokens": 4352,
        "draft_attention_windows": None,
        "target_world_size": 1,
        "target_gpu_ids": [0],
        "target_kv_cache_tokens": 4608,
        "target_attention_windows": None,
        "parameters": parameters,
        **changes,
    }
    return PairOptions(max_seq_len=512, runtime_settings=settings)


def package(folder: Path, options: PairOptions | None = None, **changes: Any) -> Path:
    """Writes a whole repository around two such engines; `changes` are those of both."""
    out = folder / "model_repo"
    out.mkdir()
    repository.write(
        out,
        models=models_folder(),
        draft_engine=write_engine(folder / "engines" / "draft", "draft", **changes),
        target_engine=write_engine(folder / "engines" / "target", "target", **changes),
        tokenizer=_TOKENIZER,
        pair=PairFile("tensorrt_llm", options or pair_options()),
    )
    return out
