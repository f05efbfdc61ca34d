"""The Triton models `draft` and `target` of the backend `tensorrt`: their plan and their files.

draft/   config.pbtxt  1/engine/{config.json, rank0.engine, ...}
target/  config.pbtxt  1/engine/{config.json, rank0.engine, ...}

`speculative` calls both, by the names in its parameters, and has only the engines' `config.json`.
The target is decoupled, so that a request without draft tokens streams out of one call; the draft's
answers come whole. The C++ backend takes both for draft tokens (contract.py says where that was
read).

`gpt_model_path` is relative to the repository: the backend opens it as it stands, and the server
runs in the repository's folder, wherever that lies.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.runtimes.engine_description import ENGINE_CONFIG
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION, link_folder
from specpipe.runtimes.tensorrt_llm import kv_plan
from specpipe.runtimes.tensorrt_llm.engines.contract import (
    DRAFT,
    ENGINE_DIR,
    MODEL_NAMES,
    TARGET,
)
from specpipe.runtimes.tensorrt_llm.engines.engine_config import read_engine
from specpipe.runtimes.tensorrt_llm.engines.refusals import check_window, holds_longest_round

if TYPE_CHECKING:
    from specpipe.runtimes.pair.pair import PairOptions
    from specpipe.runtimes.tensorrt_llm.plan import PairPlan

_TIMING_CACHE = "model.cache"  # trtllm-build leaves it in the engine's folder; no server reads it


def serving_settings(pair: PairPlan) -> Mapping[str, Any]:
    """Returns what the pair's options keep for packaging, serving and the pair itself.

    Raises EngineBuildError for what the engines could not serve.
    """
    settings = pair.engine.tensorrt_llm
    planned: dict[str, Any] = {}
    for side in (pair.draft, pair.target):
        check_window(pair, side)
        world_size = side.checkpoint.world_size
        planned |= {
            f"{side.role}_world_size": world_size,
            f"{side.role}_gpu_ids": list(settings.gpu_ids(side.role, world_size)),
            f"{side.role}_kv_cache_tokens": kv_plan.plan_cache(pair, side).tokens,
            f"{side.role}_attention_windows": _windows(side.unified),
        }
    kv_plan.check_gpus(pair)
    return {
        "backend": "tensorrt",
        "tensorrt_llm": settings.version,
        "acceptance": settings.acceptance,
        "kv_cache_free_gpu_mem_fraction": kv_plan.cache_fraction(pair),
        **planned,
        "parameters": _parameters(pair),
    }


def _parameters(pair: PairPlan) -> dict[str, Any]:
    """The section `parameters`, with what follows from other settings where it says nothing.

    How the engine keeps the rows of draft logits when it cuts draft tokens was not found in its
    sources; it cuts them only where contexts are chunked.
    """
    settings = pair.engine.tensorrt_llm
    parameters = settings.parameters.model_dump()
    is_left_out = "enable_chunked_context" not in settings.parameters.model_fields_set
    if settings.acceptance == "logits" and is_left_out and holds_longest_round(pair):
        parameters["enable_chunked_context"] = False
    return parameters


def _windows(config: UnifiedConfig) -> list[int | None] | None:
    return None if config.sliding_window is None else list(config.windows)


def write_models(
    out: Path, *, draft_engine: Path, target_engine: Path, options: PairOptions
) -> None:
    """Puts both engines into the repository `out` by hard links, each in a model of its own."""
    # Protocol buffers come with gRPC, whose import would slow down every plan.
    from specpipe.runtimes.config_pbtxt import read_config, to_text
    from specpipe.runtimes.tensorrt_llm.engines.pbtxt import engine_model

    for role, engine in ((DRAFT, draft_engine), (TARGET, target_engine)):
        built = read_engine(engine)
        version = out / role / VERSION
        version.mkdir(parents=True)
        link_folder(engine, version / ENGINE_DIR)
        (version / ENGINE_DIR / _TIMING_CACHE).unlink(missing_ok=True)
        text = to_text(engine_model(role, built, options))
        (out / role / "config.pbtxt").write_text(text, encoding="utf-8")
        described = out / SPECULATIVE / VERSION / role
        described.mkdir(parents=True)
        shutil.copyfile(engine / ENGINE_CONFIG, described / ENGINE_CONFIG)
    caller = out / SPECULATIVE / "config.pbtxt"
    config = read_config(caller)
    for role, parameter in MODEL_NAMES.items():
        config.parameters[parameter].string_value = role
    caller.write_text(to_text(config), encoding="utf-8")
