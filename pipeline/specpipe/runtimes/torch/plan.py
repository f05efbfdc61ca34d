"""How the engines of runtime torch come to be, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from specpipe.checkpoints.checkpoint import ELEMENT_BYTES
from specpipe.checkpoints.unified_config import DTYPES
from specpipe.config.engine import TorchEngineConfig
from specpipe.errors import EngineBuildError
from specpipe.machine.gpus import gpus_here
from specpipe.machine.memory import MemoryEstimate, format_bytes
from specpipe.runtimes.plan import EngineStages, PlanFor, Side, checkpoint_dtype
from specpipe.runtimes.torch import memory
from specpipe.runtimes.torch.build import BuildTorchEngine, compute_dtype
from specpipe.runtimes.torch.fused_sizes import PAGE, paged_capacity
from specpipe.runtimes.torch.kernel_choice import kernel_for
from specpipe.runtimes.torch.round_sizes import beyond_rounds
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
        kv_cache_tokens=kv_cache_tokens(pair),
    )
    return EngineStages(stages=(PlannedStage(build, side.artifacts.engine, require=require),))


def kv_cache_tokens(pair: PairPlan) -> int | None:
    """Returns how many positions each KV cache has for all requests together, both the same.

    None where `engine.kv_cache_memory` is not set. Raises EngineBuildError where it is too little
    for one request of the full length.
    """
    engine = pair.engine
    if engine.kv_cache_bytes is None:
        return None
    token_bytes = sum(
        ELEMENT_BYTES[DTYPES[compute_dtype(engine.dtype, "cuda", checkpoint_dtype(side))]]
        * side.unified.kv_size
        for side in (pair.draft, pair.target)
    )
    num_tokens = PAGE * (engine.kv_cache_bytes // (PAGE * token_bytes))
    if num_tokens < (least := paged_capacity(pair.max_seq_len, pair.num_draft_tokens)):
        raise EngineBuildError(
            f"engine.kv_cache_memory is {engine.kv_cache_memory}, which holds {num_tokens} tokens "
            f"of both models, but one request of engine.max_seq_len {pair.max_seq_len} needs "
            f"{least}, {format_bytes(least * token_bytes)}: raise it, or lower engine.max_seq_len"
        )
    return num_tokens


def notes(pair: PairPlan) -> Iterator[str]:
    """Yields what `engine.kv_cache_memory` comes to, and which draft lengths rounds lack."""
    beyond = beyond_rounds(pair.num_draft_tokens)
    if beyond is not None and pair.engine.kernels != "plain" and _has_gpu(pair):
        yield beyond
    if (num_tokens := kv_cache_tokens(pair)) is not None:
        num_requests = num_tokens // paged_capacity(pair.max_seq_len, pair.num_draft_tokens)
        yield (
            f"engine.kv_cache_memory {pair.engine.kv_cache_memory} holds {num_tokens} tokens of "
            f"both models: {num_requests} requests of {pair.max_seq_len} tokens at once"
        )


def estimate_memory(pair: PairPlan, side: Side) -> MemoryEstimate:
    """Returns what an engine takes on this machine."""
    gpus = () if pair.engine.device == "cpu" else gpus_here()
    sm = gpus[0].sm if gpus else None
    return _estimate(pair, side, "cuda" if _has_gpu(pair) else "cpu", sm)


def _has_gpu(pair: PairPlan) -> bool:
    device = pair.engine.device
    return device == "cuda" or (device == "auto" and bool(gpus_here()))


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
        kv_cache_tokens=kv_cache_tokens(pair) if device == "cuda" else None,
    )
