"""Backend `pytorch`: TensorRT-LLM's LLM API runs the draft-verify loop on two checkpoints.

No engine is built. The checkpoints go into the Triton repository in Hugging Face's layout, as they
are or quantized by specpipe, beside a `model.yaml` that says how to load them:

speculative/1/  model.yaml  draft/  target/
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specpipe.checkpoints.checkpoint import (
    QUANT_CONFIG_NAME,
    TensorInfo,
    checkpoint_files,
    open_checkpoint,
    read_blocks,
)
from specpipe.checkpoints.files import check_file, is_there
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.row_jobs import in_threads
from specpipe.checkpoints.weight_values import check_finite, in_tensor
from specpipe.config.tensorrt_llm_versions import release
from specpipe.errors import EngineMismatch, RuntimeUnavailable, SpecpipeError
from specpipe.roles import Role
from specpipe.runtimes.plan import EngineStages
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION, link_file, link_folder
from specpipe.runtimes.tensorrt_llm import model_yaml
from specpipe.stage import PlannedStage, StageInputs
from specpipe.text.files import TOKENIZER_FILES

if TYPE_CHECKING:
    from specpipe.runtimes.pair.pair import DetokenizerFactory, PairOptions
    from specpipe.runtimes.plan import PairPlan, Side
    from specpipe.runtimes.tensorrt_llm.llm_pair import LlmPair


@dataclass(frozen=True)
class CollectCheckpoint:
    """Puts a Hugging Face checkpoint into a folder of its own: safetensors, configs, tokenizer.

    Pickles and code stay behind, so that nothing of the kind is there to be loaded. Weights are
    read once, since NaN and infinity are refused, and linked where the file system allows it.
    """

    role: Role  # for messages only
    checkpoint: Path
    limits: FileLimits = FILE_LIMITS

    @property
    def name(self) -> str:
        return f"{self.role}/collect"

    def inputs(self) -> StageInputs:
        return StageInputs(files=_collected_files(self.checkpoint), settings={})

    def run(self, out: Path) -> None:
        try:
            opened = open_checkpoint(self.checkpoint, allow_quantized=True, limits=self.limits)
            in_threads(_check_values, opened.tensors.items())
        except SpecpipeError as exc:
            raise type(exc)(f"{self.role}: {exc}") from exc
        for path in _collected_files(self.checkpoint):
            check_file(path)
            # The hub's cache holds symbolic links, and a link to one would be as good as its cache.
            link_file(path.resolve(), out / path.name)


def _check_values(tensor: tuple[str, TensorInfo]) -> None:
    name, info = tensor
    row = 0
    for block in read_blocks(info) if info.shape else ():
        check_finite(block, info.dtype, in_tensor(f"{info.file}: {name}", row))
        row += len(block)


def _collected_files(folder: Path) -> tuple[Path, ...]:
    small = (folder / name for name in (*TOKENIZER_FILES, QUANT_CONFIG_NAME))
    # By name, since config.json is in both lists; in order.
    files = {path.name: path for path in (*checkpoint_files(folder), *small) if is_there(path)}
    return tuple(files.values())


def engine_stages(
    pair: PairPlan,
) -> tuple[EngineStages, EngineStages]:
    """Collects or quantizes both checkpoints; raises EngineBuildError for what cannot work."""
    model_yaml.check_plan(pair)
    return _stages(pair, pair.draft), _stages(pair, pair.target)


def _stages(pair: PairPlan, side: Side) -> EngineStages:
    if side.checkpoint.quantization is not None:
        return EngineStages(reads="huggingface")
    stage = CollectCheckpoint(side.role, side.folder, side.limits)
    return EngineStages(
        reads="folder", stages=(PlannedStage(stage, side.artifacts.checkpoint, side.fetch),)
    )


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
    }


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


def load_pair(
    draft: Path, target: Path, options: PairOptions, detokenizer: DetokenizerFactory
) -> LlmPair:
    """Starts TensorRT-LLM on the two checkpoints; `model.yaml` lies beside them.

    Raises RuntimeUnavailable where TensorRT-LLM is missing or cannot load them, EngineMismatch
    where it is of another release line than the YAML was spelled for, or refuses it.
    """
    from specpipe.runtimes.tensorrt_llm.llm_pair import LlmPair

    settings = options.runtime_settings
    version: str = settings["tensorrt_llm"]
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise RuntimeUnavailable(
            "runtime 'tensorrt_llm' needs 'tensorrt_llm', which comes with NVIDIA's image "
            f"{release(version).image}"
        )
    if settings["target_gpu_ids"] is not None:
        # TensorRT-LLM opens the devices when it is imported, and its workers inherit that:
        # NVIDIA's own Triton model for the LLM API sets the variable before, too.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings["target_gpu_ids"]))
    tensorrt_llm: Any = importlib.import_module("tensorrt_llm")
    llmapi: Any = importlib.import_module("tensorrt_llm.llmapi")
    installed = str(tensorrt_llm.__version__)
    if model_yaml.release_line(installed) != model_yaml.release_line(version):
        raise EngineMismatch(
            f"the repository was written for TensorRT-LLM {version}, and {installed} is "
            "installed; set engine.tensorrt_llm.version to the one that serves, and build again"
        )
    path = target.parent / model_yaml.MODEL_YAML
    arguments = model_yaml.resolve_paths(
        yaml.safe_load(path.read_text(encoding="utf-8")), draft=draft, target=target
    )
    try:
        if model_yaml.SPECULATIVE_CONFIG in arguments:
            fields = dict(arguments[model_yaml.SPECULATIVE_CONFIG])
            del fields[model_yaml.DECODING_TYPE]  # the class says it, whatever its name is
            arguments[model_yaml.SPECULATIVE_CONFIG] = llmapi.DraftTargetDecodingConfig(**fields)
        if "kv_cache_config" in arguments:
            arguments["kv_cache_config"] = llmapi.KvCacheConfig(**arguments["kv_cache_config"])
    except (TypeError, ValueError) as exc:
        raise EngineMismatch(f"TensorRT-LLM {installed} refuses {path}: {exc}") from exc
    try:
        llm = tensorrt_llm.LLM(**arguments)
    except Exception as exc:  # of PyTorch, CUDA, MPI or its own: it has no common class for them
        raise RuntimeUnavailable(
            f"TensorRT-LLM {installed} could not load {path}: {type(exc).__name__}: {exc}"
        ) from exc
    return LlmPair(llm, tensorrt_llm.SamplingParams, options, detokenizer)
