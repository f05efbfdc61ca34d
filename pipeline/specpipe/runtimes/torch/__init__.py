"""The torch runtime: builds and runs pairs on a CPU or a CUDA GPU; the yardstick of the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.provenance import gpus
from specpipe.runtimes.base import require_library
from specpipe.runtimes.memory import MemoryEstimate
from specpipe.runtimes.torch.build import BuildTorchEngine, compute_dtype
from specpipe.runtimes.torch.memory import estimate_memory

if TYPE_CHECKING:
    from specpipe.config import EngineConfig
    from specpipe.runtimes.base import DetokenizerFactory, Pair, PairOptions
    from specpipe.stages.base import Role, Stage


class TorchRuntime:
    """Importing this imports no torch; building and loading do."""

    name = "torch"

    def require(self) -> None:
        require_library(self.name, "torch", extra="torch")

    def build_stage(
        self,
        *,
        role: Role,
        checkpoint: Path,
        engine: EngineConfig,
        max_seq_len: int,
        max_draft_len: int,
    ) -> Stage:
        return BuildTorchEngine(
            role=role,
            checkpoint=checkpoint,
            max_batch_size=engine.max_batch_size,
            max_seq_len=max_seq_len,
            max_draft_len=max_draft_len,
            max_num_tokens=engine.max_num_tokens,
            dtype=engine.dtype,
            device=engine.device,
        )

    def estimate_memory(
        self,
        unified: Mapping[str, Any],
        *,
        engine: EngineConfig,
        max_seq_len: int,
        max_draft_len: int,
    ) -> MemoryEstimate:
        has_gpu = engine.device == "cuda" or (engine.device == "auto" and bool(gpus()))
        return estimate_memory(
            unified,
            dtype=compute_dtype(engine.dtype, "cuda" if has_gpu else "cpu", unified["dtype"]),
            max_batch_size=engine.max_batch_size,
            max_seq_len=max_seq_len,
            max_draft_len=max_draft_len,
            max_num_tokens=engine.max_num_tokens,
        )

    def load_pair(
        self, draft: Path, target: Path, options: PairOptions, detokenizer: DetokenizerFactory
    ) -> Pair:
        self.require()
        from specpipe.runtimes.torch.pair import load_pair

        return load_pair(draft, target, options, detokenizer)
