"""What a runtime knows of a pair before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from specpipe.checkpoints.checkpoint import read_config
from specpipe.checkpoints.family_config import named_dtype
from specpipe.checkpoints.hf_config import context_length
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.config.engine import EngineConfig
from specpipe.errors import EngineBuildError
from specpipe.machine.artifacts import SideArtifacts
from specpipe.roles import Role
from specpipe.stage import PlannedStage

if TYPE_CHECKING:
    from specpipe.config.sections import CheckpointConfig
    from specpipe.speculative.adaptive import Schedule

EngineT = TypeVar("EngineT", bound=EngineConfig, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One checkpoint of a pair, as a plan knows it: from its small files.

    folder          the checkpoint; its weights may not be there before `fetch` was called
    unified         the config of the unified checkpoint that will be written, but for its dtype
    context_length  tokens that the checkpoint's positions reach
    base_dir        where relative paths of the YAML start
    artifacts       where what is made of it lies
    limits          what its files may hold
    """

    role: Role
    checkpoint: CheckpointConfig
    folder: Path
    unified: UnifiedConfig
    context_length: int
    base_dir: Path
    artifacts: SideArtifacts
    limits: FileLimits = FILE_LIMITS
    fetch: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True)
class EngineStages:
    """How one engine comes to be.

    reads               what it is made of: the unified checkpoint in `artifacts.checkpoint`; the
                        quantized weights in Hugging Face's layout in `artifacts.huggingface`; the
                        checkpoint's folder as it is
    is_by_trtllm_build  whether the unified checkpoint is for `trtllm-build` to read
    stages              from there to the engine, which is the artifact of the last one; none: what
                        is read is the engine already
    """

    reads: Literal["unified", "huggingface", "folder"] = "unified"
    is_by_trtllm_build: bool = False
    stages: tuple[PlannedStage, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlanFor(Generic[EngineT]):
    """What a runtime needs to plan its engines.

    engine       the YAML's section, which is that of the runtime it names
    max_seq_len  tokens of prompt and answer together, for the target
    measures     whether what quantization costs is measured, which reads unified checkpoints
    schedule     the most tokens that the draft drafts by load
    """

    draft: Side
    target: Side
    engine: EngineT
    max_seq_len: int
    num_draft_tokens: int
    measures: bool = False
    schedule: Schedule = ()

    def max_seq_len_of(self, side: Side) -> int:
        """A draft with a shorter context stops drafting there; the request goes on."""
        return min(self.max_seq_len, side.context_length)


PairPlan = PlanFor[EngineConfig]
"""The plan of a pair for whichever runtime its YAML names."""


def checkpoint_dtype(side: Side) -> str:
    """Returns the dtype that a side's config.json names; bfloat16 where the weights decide."""
    return named_dtype(read_config(side.folder, allow_quantized=True, limits=side.limits))


def check_context(role: Role, config: UnifiedConfig, max_seq_len: int) -> None:
    """Raises EngineBuildError where an engine is to have more positions than its model."""
    context = context_length(config.max_position_embeddings, config.rotary_scaling)
    if max_seq_len > context:
        raise EngineBuildError(
            f"{role}: engine.max_seq_len {max_seq_len} is more than the model's context of "
            f"{context} tokens; lower it"
        )
