"""Backend `pytorch`: TensorRT-LLM's LLM API runs the draft-verify loop on two checkpoints.

No engine is built. The checkpoints go into the Triton repository in Hugging Face's layout, as they
are or quantized by specpipe, beside a `model.yaml` that says how to load them:

speculative/1/  model.yaml  draft/  target/
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specpipe.config.tensorrt_llm_versions import serving_image
from specpipe.errors import ConfigError, EngineMismatch, RuntimeUnavailable
from specpipe.runtimes.launch import Launch
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION, link_folder
from specpipe.runtimes.requirements import EngineGpus, Requirements
from specpipe.runtimes.tensorrt_llm.kv_plan import estimate_memory as estimate_memory
from specpipe.runtimes.tensorrt_llm.llmapi import model_yaml
from specpipe.runtimes.tensorrt_llm.llmapi.collect import engine_stages as engine_stages
from specpipe.runtimes.tensorrt_llm.llmapi.describe import describe as describe
from specpipe.runtimes.tensorrt_llm.llmapi.lint import lint as lint
from specpipe.runtimes.tensorrt_llm.llmapi.refusals import (
    parallel_draft_fault as parallel_draft_fault,
)

if TYPE_CHECKING:
    from specpipe.config.engine import TensorRTLLMEngineConfig
    from specpipe.runtimes.launch import LaunchMode
    from specpipe.runtimes.pair.pair import DetokenizerFactory, PairOptions
    from specpipe.runtimes.tensorrt_llm.llmapi.llm_pair import LlmPair
    from specpipe.runtimes.tensorrt_llm.plan import PairPlan
    from specpipe.speculative.guide import Guides


def reads_quantized(engine: TensorRTLLMEngineConfig) -> bool:
    """Hugging Face's layout is all that the LLM API reads."""
    return True


def serving_settings(pair: PairPlan) -> Mapping[str, Any]:
    """What `write_models` and `load_pair` need, and what decides which requests are refused."""
    settings = pair.engine.tensorrt_llm
    gpu_ids = settings.target_gpu_ids
    return {
        "backend": settings.backend,
        "tensorrt_llm": settings.version,
        "acceptance": settings.acceptance,
        "target_gpu_ids": list(gpu_ids) if gpu_ids else None,
        "draft_vocab_size": pair.draft.unified.vocab_size,
        "target_vocab_size": pair.target.unified.vocab_size,
        "llm": model_yaml.llm_arguments(pair),
        # Only where it is on, so that what was packaged before stays up to date.
        **({"enable_penalty": True} if settings.enable_penalty else {}),
    }


def plan_notes(pair: PairPlan) -> Iterable[str]:
    """Returns none."""
    return ()


def write_models(
    out: Path, *, draft_engine: Path, target_engine: Path, options: PairOptions
) -> None:
    """Puts the checkpoints and `model.yaml` into the Triton repository."""
    version = out / SPECULATIVE / VERSION
    link_folder(draft_engine, version / model_yaml.DRAFT_FOLDER)
    link_folder(target_engine, version / model_yaml.TARGET_FOLDER)
    settings = options.runtime_settings
    (version / model_yaml.MODEL_YAML).write_text(
        model_yaml.to_text(settings["llm"], settings["tensorrt_llm"]), encoding="utf-8"
    )


def launch(
    repository: Path,
    *,
    mode: LaunchMode = "auto",
    allow_unknown_facts: bool = False,
    build_command: str = "specpipe build",
) -> Launch:
    """Nothing to compare: no engine was built for a GPU, and TensorRT-LLM starts its ranks."""
    if mode != "auto":
        raise ConfigError(
            f"--mpi-mode {mode} has no effect: backend 'pytorch' starts its ranks itself"
        )
    return Launch()


def requirements(repository: Path, *, driver: str | None) -> Requirements:
    """Returns the release line that the YAML was written for, and as many GPUs as there are ranks.

    TensorRT-LLM runs draft and target in the same processes.
    """
    settings = read_pair(repository).options.runtime_settings
    llm = settings["llm"]
    num_gpus = llm["tensor_parallel_size"] * llm["pipeline_parallel_size"]
    line = model_yaml.release_line(settings["tensorrt_llm"])
    return Requirements(
        runtime="tensorrt_llm",
        libraries={"tensorrt_llm": ".".join(map(str, line))},
        engines={
            "target": EngineGpus(gpu_ids=tuple(settings["target_gpu_ids"] or range(num_gpus)))
        },
    )


def load_pair(
    draft: Path,
    target: Path,
    options: PairOptions,
    detokenizer: DetokenizerFactory,
    guides: Guides | None = None,  # which it cannot follow
) -> LlmPair:
    """Starts TensorRT-LLM on the two checkpoints; `model.yaml` lies beside them.

    Raises RuntimeUnavailable where TensorRT-LLM is missing or cannot load them, EngineMismatch
    where it is of another release line than the YAML was spelled for, or refuses it.
    """
    from specpipe.runtimes.tensorrt_llm.llmapi.llm_pair import LlmPair

    settings = options.runtime_settings
    version: str = settings["tensorrt_llm"]
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise RuntimeUnavailable(
            "runtime 'tensorrt_llm' needs 'tensorrt_llm', which comes with NVIDIA's image "
            f"{serving_image(version)}"
        )
    if settings["target_gpu_ids"] is not None:
        # TensorRT-LLM opens the devices when it is imported, and its workers inherit that:
        # NVIDIA's own Triton model for the LLM API sets the variable before, too.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings["target_gpu_ids"]))
    tensorrt_llm: Any = importlib.import_module("tensorrt_llm")
    llmapi: Any = importlib.import_module("tensorrt_llm.llmapi")
    installed = str(tensorrt_llm.__version__)
    if not model_yaml.serves(installed, version):
        raise EngineMismatch(
            f"the repository was written for TensorRT-LLM {version}, and {installed} is "
            "installed; set engine.tensorrt_llm.version to the one that serves, and build again"
        )
    path = target.parent / model_yaml.MODEL_YAML
    arguments = model_yaml.resolve(
        yaml.safe_load(path.read_text(encoding="utf-8")), draft=draft, target=target
    )
    try:
        if model_yaml.SPECULATIVE_CONFIG in arguments:
            fields = dict(arguments[model_yaml.SPECULATIVE_CONFIG])
            drafting = getattr(llmapi, model_yaml.drafting_class(fields))
            del fields[model_yaml.DECODING_TYPE]  # the class says it, whatever its name is
            arguments[model_yaml.SPECULATIVE_CONFIG] = drafting(**fields)
        if model_yaml.KV_CACHE_CONFIG in arguments:
            kv_cache = llmapi.KvCacheConfig(**arguments[model_yaml.KV_CACHE_CONFIG])
            arguments[model_yaml.KV_CACHE_CONFIG] = kv_cache
    except (AttributeError, TypeError, ValueError) as exc:
        raise EngineMismatch(f"TensorRT-LLM {installed} refuses {path}: {exc}") from exc
    try:
        llm = tensorrt_llm.LLM(**arguments)
    except Exception as exc:  # of PyTorch, CUDA, MPI or its own: it has no common class for them
        raise RuntimeUnavailable(
            f"TensorRT-LLM {installed} could not load {path}: {type(exc).__name__}: {exc}"
        ) from exc
    return LlmPair(llm, tensorrt_llm.SamplingParams, options, detokenizer)
