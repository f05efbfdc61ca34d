"""How the engines of runtime torch come to be, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specpipe.config.engine import TorchEngineConfig
from specpipe.machine.gpus import gpus_here
from specpipe.machine.memory import MemoryEstimate
from specpipe.runtimes.plan import EngineStages, PlanFor, Side, checkpoint_dtype
from specpipe.runtimes.torch import memory
from specpipe.runtimes.torch.build import BuildTorchEngine, compute_dtype
from specpipe.runtimes.torch.kernel_choice import kernel_for
from specpipe.stage import PlannedStage

PairPlan = PlanFor[TorchEngineConfig]


def engine_stages(pair: PairPlan, side: Side, require: Callable[[], None]) -> EngineStages:
    """Returns the stages from the unified checkpoint to the engine: one."""
    build = BuildTorchEngine(
        role=side.role,
        checkpoint=side.artifacts.checkpoint,
        max_batch_size=pair.engine.max_batch_size,
        max_seq_len=pair.max_seq_len_of(side),
        max_draft_len=pair.num_draft_tokens,
        max_num_tokens=pair.engine.max_num_tokens,
        dtype=pair.engine.dtype,
        device=pair.engine.device,
    )
    return EngineStages(stages=(PlannedStage(build, side.artifacts.engine, require=require),))


def estimate_memory(pair: PairPlan, side: Side) -> MemoryEstimate:
    """Returns what an engine takes on this machine."""
    gpus = () if pair.engine.device == "cpu" else gpus_here()
    has_gpu = pair.engine.device == "cuda" or bool(gpus)
    sm = gpus[0].sm if gpus else None
    return _estimate(pair, side, "cuda" if has_gpu else "cpu", sm)


def memory_by_gpu(pair: PairPlan, side: Side, sm: int | None) -> Mapping[int, MemoryEstimate]:
    """Returns what an engine takes on a GPU of a compute capability (times 10); none on a CPU."""
    return {} if pair.engine.device == "cpu" else {0: _estimate(pair, side, "cuda", sm)}


def _estimate(pair: PairPlan, side: Side, device: str, sm: int | None) -> MemoryEstimate:
    engine = pair.engine
    return memory.estimate_memory(
        side.unified,
        dtype=compute_dtype(engine.dtype, device, checkpoint_dtype(side)),
        on_gpu=device == "cuda",
        kernel=kernel_for(side.unified.quantization, sm),
        max_batch_size=engine.max_batch_size,
        max_seq_len=pair.max_seq_len_of(side),
        max_draft_len=pair.num_draft_tokens,
        max_num_tokens=engine.max_num_tokens,
    )
