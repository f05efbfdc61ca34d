"""Backend `tensorrt`: engines that `trtllm-build` makes, behind TensorRT-LLM's Triton backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specpipe.config.tensorrt_llm_versions import FIRST_WITHOUT_ENGINES
from specpipe.runtimes.tensorrt_llm import kv_plan
from specpipe.runtimes.tensorrt_llm.engines.bls import load_pair as load_pair
from specpipe.runtimes.tensorrt_llm.engines.build import engine_stages as engine_stages
from specpipe.runtimes.tensorrt_llm.engines.describe import describe as describe
from specpipe.runtimes.tensorrt_llm.engines.models import serving_settings as serving_settings
from specpipe.runtimes.tensorrt_llm.engines.models import write_models as write_models
from specpipe.runtimes.tensorrt_llm.engines.refusals import check_window
from specpipe.runtimes.tensorrt_llm.engines.refusals import plan_notes as plan_notes
from specpipe.runtimes.tensorrt_llm.engines.serve import launch as launch
from specpipe.runtimes.tensorrt_llm.engines.serve import requirements as requirements

if TYPE_CHECKING:
    from specpipe.config.engine import TensorRTLLMEngineConfig
    from specpipe.machine.memory import MemoryEstimate
    from specpipe.runtimes.plan import Side
    from specpipe.runtimes.repository_rule import Repository, ServedPair
    from specpipe.runtimes.tensorrt_llm.plan import PairPlan


def reads_quantized(engine: TensorRTLLMEngineConfig) -> bool:
    """`trtllm-build` reads the unified checkpoint."""
    return False


def parallel_draft_fault(pair: PairPlan) -> str | None:
    """An engine samples each token by itself, and gives the logits of the next one only."""
    return (
        "engines of TensorRT-LLM give them one by one: set engine.tensorrt_llm.backend to pytorch "
        f"with version {FIRST_WITHOUT_ENGINES} or later, engine.runtime to torch or tensorrt"
    )


def estimate_memory(pair: PairPlan, side: Side) -> MemoryEstimate:
    """As `kv_plan` has it, for sequences that stay within the model's window."""
    check_window(pair, side)
    return kv_plan.estimate_memory(pair, side)


def lint(repository: Repository, pair: ServedPair) -> Iterator[str]:
    """Yields the faults of both engines' models."""
    # Protocol buffers come with gRPC, whose import would slow down every plan.
    from specpipe.runtimes.tensorrt_llm.engines import lint as engines

    return engines.lint(repository, pair)
