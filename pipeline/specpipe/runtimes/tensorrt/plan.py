"""How the engines of runtime tensorrt come to be, and the memory that they take."""

from __future__ import annotations

from specpipe.checkpoints.formats import FORMATS
from specpipe.config.engine import TensorRTEngineConfig
from specpipe.errors import EngineBuildError
from specpipe.machine.gpus import sm_of
from specpipe.machine.memory import MemoryEstimate
from specpipe.runtimes.plan import EngineStages, PlanFor, Side, checkpoint_dtype
from specpipe.runtimes.tensorrt import library, memory
from specpipe.runtimes.tensorrt.build import BuildTensorRTEngine, PlaceWeights
from specpipe.runtimes.tensorrt.network import check_supported
from specpipe.stage import PlannedStage

PairPlan = PlanFor[TensorRTEngineConfig]


def engine_stages(pair: PairPlan, side: Side) -> EngineStages:
    """Returns the stages from the unified checkpoint to the engine: two with weights beside it."""
    engine = pair.engine
    max_seq_len = pair.max_seq_len_of(side)
    check_supported(side.role, side.unified, max_seq_len=max_seq_len)
    if engine.weights == "beside" and side.unified.format is not None:
        raise EngineBuildError(
            f"{side.role}: quantized weights cannot be inputs of an engine; set engine.weights "
            "to inside"
        )
    build = BuildTensorRTEngine(
        role=side.role,
        checkpoint=side.artifacts.checkpoint,
        max_batch_size=engine.max_batch_size,
        max_seq_len=max_seq_len,
        max_draft_len=pair.num_draft_tokens,
        max_num_tokens=engine.max_num_tokens,
        dtype=engine.dtype,
        library=engine.library,
        compute_capabilities=_capabilities(side, engine),
        weights=engine.weights,
        weight_streaming=engine.weight_streaming,
    )

    def require() -> None:
        library.require(engine.library)

    if engine.weights == "inside":
        return EngineStages(stages=(PlannedStage(build, side.artifacts.engine, require=require),))
    plan = PlannedStage(build, side.artifacts.plan, require=require)
    place = PlaceWeights(role=side.role, plan=plan.artifact, checkpoint=side.artifacts.checkpoint)
    return EngineStages(stages=(plan, PlannedStage(place, side.artifacts.engine)))


def _capabilities(side: Side, engine: TensorRTEngineConfig) -> tuple[str, ...]:
    """Those that an engine is built for; a format that some lack the arithmetic for leaves these
    out.
    """
    if engine.library != "tensorrt_rtx":
        return ()
    name = side.unified.format
    return tuple(
        capability
        for capability in engine.compute_capabilities
        if name is None or FORMATS[name].runs_on(sm_of(capability))
    )


def estimate_memory(pair: PairPlan, side: Side) -> MemoryEstimate:
    """Returns what an engine takes on the GPU that runs it."""
    return memory.estimate_memory(
        side.unified,
        dtype=checkpoint_dtype(side) if pair.engine.dtype == "auto" else pair.engine.dtype,
        max_batch_size=pair.engine.max_batch_size,
        max_seq_len=pair.max_seq_len_of(side),
        max_draft_len=pair.num_draft_tokens,
        max_num_tokens=pair.engine.max_num_tokens,
    )
