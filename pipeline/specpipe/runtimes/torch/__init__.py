"""The torch runtime: builds and runs pairs on a CPU or a CUDA GPU; the yardstick of the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.errors import ConfigError
from specpipe.machine.memory import MemoryEstimate
from specpipe.machine.provenance import gpus
from specpipe.runtimes.launch import Launch
from specpipe.runtimes.plan import EngineStages, checkpoint_dir, checkpoint_dtype
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION, link_folder
from specpipe.runtimes.runtime import require_library
from specpipe.runtimes.torch.build import BuildTorchEngine, compute_dtype
from specpipe.runtimes.torch.kernel_choice import kernel_for
from specpipe.runtimes.torch.memory import estimate_memory
from specpipe.stage import PlannedStage

if TYPE_CHECKING:
    from specpipe.config.sections import EngineConfig
    from specpipe.runtimes.engine_description import EngineDescription
    from specpipe.runtimes.launch import LaunchMode
    from specpipe.runtimes.pair.pair import DetokenizerFactory, Pair, PairOptions
    from specpipe.runtimes.plan import PairPlan, Side


class TorchRuntime:
    """Importing this imports no torch; building and loading do."""

    name = "torch"
    runs_own_loop = True

    def require(self) -> None:
        require_library(self.name, "torch", extra="torch")

    def require_serving(self) -> None:
        self.require()  # a CPU will do

    def engine_stages(self, pair: PairPlan) -> tuple[EngineStages, EngineStages]:
        return self._stages(pair, pair.draft), self._stages(pair, pair.target)

    def _stages(self, pair: PairPlan, side: Side) -> EngineStages:
        build = BuildTorchEngine(
            role=side.role,
            checkpoint=checkpoint_dir(side),
            max_batch_size=pair.engine.max_batch_size,
            max_seq_len=pair.max_seq_len_of(side),
            max_draft_len=pair.num_draft_tokens,
            max_num_tokens=pair.engine.max_num_tokens,
            dtype=pair.engine.dtype,
            device=pair.engine.device,
        )
        engine = PlannedStage(build, side.artifacts / "engine", require=self.require)
        return EngineStages(stages=(engine,))

    def reads_quantized(self, engine: EngineConfig) -> bool:
        return False

    def serving_settings(self, pair: PairPlan) -> Mapping[str, Any]:
        kernels = pair.engine.kernels
        return {} if kernels == "auto" else {"kernels": kernels}

    def estimate_memory(self, pair: PairPlan, side: Side) -> MemoryEstimate:
        present = [] if pair.engine.device == "cpu" else gpus()
        has_gpu = pair.engine.device == "cuda" or bool(present)
        sm = int(present[0]["compute_cap"].replace(".", "")) if present else None
        return self._estimate(pair, side, "cuda" if has_gpu else "cpu", sm)

    def memory_by_gpu(
        self, pair: PairPlan, side: Side, sm: int | None
    ) -> Mapping[int, MemoryEstimate]:
        if pair.engine.device == "cpu":
            return {}
        return {0: self._estimate(pair, side, "cuda", sm)}

    def _estimate(self, pair: PairPlan, side: Side, device: str, sm: int | None) -> MemoryEstimate:
        engine = pair.engine
        return estimate_memory(
            side.unified,
            dtype=compute_dtype(engine.dtype, device, checkpoint_dtype(side)),
            on_gpu=device == "cuda",
            kernel=kernel_for(side.unified.quantization, sm),
            max_batch_size=engine.max_batch_size,
            max_seq_len=pair.max_seq_len_of(side),
            max_draft_len=pair.num_draft_tokens,
            max_num_tokens=engine.max_num_tokens,
        )

    def write_models(
        self, out: Path, *, draft_engine: Path, target_engine: Path, options: PairOptions
    ) -> None:
        version = out / SPECULATIVE / VERSION
        link_folder(draft_engine, version / "draft")
        link_folder(target_engine, version / "target")

    def launch(
        self,
        repository: Path,
        *,
        mode: LaunchMode = "auto",
        allow_unknown_facts: bool = False,
        build_command: str = "specpipe build",
    ) -> Launch:
        if mode != "auto":
            raise ConfigError(f"--mpi-mode {mode} has no effect: runtime 'torch' has no ranks")
        return Launch()  # its engines run wherever torch does

    def load_pair(
        self, draft: Path, target: Path, options: PairOptions, detokenizer: DetokenizerFactory
    ) -> Pair:
        self.require()
        from specpipe.runtimes.torch.pair import load_pair

        return load_pair(draft, target, options, detokenizer)

    def describe(self, engine: Path) -> EngineDescription | None:
        from specpipe.runtimes.torch import describe

        return describe.describe(engine)
