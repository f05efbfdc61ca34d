"""What GPUs run which formats under TensorRT-LLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specpipe.checkpoints.formats import FORMATS, OFFERED
from specpipe.machine.gpus import gpus_here, sm_of
from specpipe.roles import Role

if TYPE_CHECKING:
    from specpipe.runtimes.plan import Side
    from specpipe.runtimes.tensorrt_llm.plan import PairPlan


MIN_SM = 80  # TensorRT-LLM, examples/draft_target_model/README.md
FP8_SM = 89


def capabilities(pair: PairPlan) -> dict[Role, str | None]:
    """Returns the compute capability of the GPUs that will serve each side, as "9.0".

    That of the config, else the lowest among the side's GPUs of this machine; None where nobody
    knows.
    """
    settings = pair.engine.tensorrt_llm
    if settings.compute_capability is not None:
        return {side.role: settings.compute_capability for side in (pair.draft, pair.target)}
    found = [gpu.compute_capability for gpu in gpus_here()]
    lowest: dict[Role, str | None] = {}
    for side in (pair.draft, pair.target):
        ids = settings.gpu_ids(side.role, side.checkpoint.world_size)
        used = [found[gpu_id] for gpu_id in ids if gpu_id < len(found)] or found
        lowest[side.role] = min(used, key=sm_of) if used else None
    return lowest


def formats_on(sm: int | None) -> list[str]:
    """Returns the formats that a GPU runs, or all of them where none is known."""
    return [name for name in OFFERED if sm is None or FORMATS[name].runs_on(sm)]


def what_is_quantized(side: Side, name: str) -> str:
    """Names the format of a side: that of its config, or the one that its checkpoint came in."""
    if side.checkpoint.quantization is not None:
        return f"{side.role}.quantization.format '{name}'"
    return f"{side.role}: the format of its checkpoint, {name},"


def instead(side: Side) -> str:
    """Says how to go without a side's format."""
    if side.checkpoint.quantization is not None:
        return "leave quantization out"
    return "use the checkpoint that it was quantized from"
