"""The stages of a pair for the LLM API: checkpoints in Hugging Face's layout, as they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
from specpipe.errors import SpecpipeError
from specpipe.roles import Role
from specpipe.runtimes.plan import EngineStages
from specpipe.runtimes.repository_layout import link_file
from specpipe.runtimes.tensorrt_llm.llmapi import refusals
from specpipe.stage import PlannedStage, StageInputs
from specpipe.text.files import TOKENIZER_FILES

if TYPE_CHECKING:
    from specpipe.runtimes.plan import Side
    from specpipe.runtimes.tensorrt_llm.plan import PairPlan


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
            in_threads(_check_values, list(opened.tensors.items()), lambda job: job[1].num_bytes)
        except SpecpipeError as exc:
            raise type(exc)(f"{self.role}: {exc}") from exc
        for path in _collected_files(self.checkpoint):
            check_file(path)
            # The hub's cache holds symbolic links, and a link to one would be as good as its cache.
            link = out / path.relative_to(self.checkpoint)
            link.parent.mkdir(exist_ok=True)
            link_file(path.resolve(), link)


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
    refusals.check_plan(pair)
    return _stages(pair, pair.draft), _stages(pair, pair.target)


def _stages(pair: PairPlan, side: Side) -> EngineStages:
    if side.checkpoint.quantization is not None:
        return EngineStages(reads="huggingface")
    stage = CollectCheckpoint(side.role, side.folder, side.limits)
    return EngineStages(
        reads="folder", stages=(PlannedStage(stage, side.artifacts.checkpoint, side.fetch),)
    )
