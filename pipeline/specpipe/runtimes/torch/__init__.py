"""The torch runtime: builds and runs pairs on a CPU or a CUDA GPU; the yardstick of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.errors import ConfigError
from specpipe.machine.provenance import library_versions
from specpipe.runtimes.engine_limits import limit_faults
from specpipe.runtimes.launch import Launch
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION, link_folder
from specpipe.runtimes.runtime import require_library

if TYPE_CHECKING:
    from specpipe.config.engine import TorchEngineConfig
    from specpipe.config.faults import Fault
    from specpipe.config.sections import PipelineConfig
    from specpipe.machine.memory import MemoryEstimate
    from specpipe.runtimes.engine_description import EngineDescription
    from specpipe.runtimes.launch import LaunchMode
    from specpipe.runtimes.pair.pair import DetokenizerFactory, Pair, PairOptions
    from specpipe.runtimes.plan import EngineStages, Side
    from specpipe.runtimes.repository_rule import Repository, ServedPair
    from specpipe.runtimes.requirements import Requirements
    from specpipe.runtimes.torch.plan import PairPlan
    from specpipe.speculative.guide import Guides


class TorchRuntime:
    """Importing this imports neither torch nor NumPy; building, loading and planning do."""

    name = "torch"
    runs_own_loop = True

    def setting_faults(self, config: PipelineConfig, engine: TorchEngineConfig) -> Iterable[Fault]:
        # It runs every format, and ranks as one.
        from specpipe.runtimes.torch import setting_faults

        return setting_faults.setting_faults(config, engine)

    def require(self) -> None:
        require_library(self.name, "torch", extra="torch")

    def require_serving(self) -> None:
        self.require()  # a CPU will do

    def machine_facts(self) -> Mapping[str, str]:
        return library_versions(("torch",))

    def settings_here(self) -> Mapping[str, str]:
        return {}

    def engine_stages(self, pair: PairPlan) -> tuple[EngineStages, EngineStages]:
        from specpipe.runtimes.torch import plan

        draft = plan.engine_stages(pair, pair.draft, self.require)
        return draft, plan.engine_stages(pair, pair.target, self.require)

    def reads_quantized(self, engine: TorchEngineConfig) -> bool:
        return False

    def parallel_draft_fault(self, pair: PairPlan) -> str | None:
        return None

    def serving_settings(self, pair: PairPlan) -> Mapping[str, Any]:
        kernels = pair.engine.kernels
        return {} if kernels == "auto" else {"kernels": kernels}

    def plan_notes(self, pair: PairPlan) -> Iterable[str]:
        from specpipe.runtimes.torch import plan

        return plan.notes(pair)

    def estimate_memory(self, pair: PairPlan, side: Side) -> MemoryEstimate:
        from specpipe.runtimes.torch import plan

        return plan.estimate_memory(pair, side)

    def memory_by_gpu(
        self, pair: PairPlan, side: Side, sm: int | None
    ) -> Mapping[int, MemoryEstimate]:
        from specpipe.runtimes.torch import plan

        return plan.memory_by_gpu(pair, side, sm)

    def write_models(
        self, out: Path, *, draft_engine: Path, target_engine: Path, options: PairOptions
    ) -> None:
        version = out / SPECULATIVE / VERSION
        link_folder(draft_engine, version / "draft")
        link_folder(target_engine, version / "target")

    def lint(self, repository: Repository, pair: ServedPair) -> Iterator[str]:
        return limit_faults(pair)

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

    def requirements(self, repository: Path, *, driver: str | None) -> Requirements:
        from specpipe.runtimes.requirements import Requirements

        return Requirements(runtime=self.name, libraries={"torch": ""})  # of any version

    def load_pair(
        self,
        draft: Path,
        target: Path,
        options: PairOptions,
        detokenizer: DetokenizerFactory,
        guides: Guides | None = None,
    ) -> Pair:
        self.require()
        from specpipe.runtimes.torch.pair import load_pair

        return load_pair(draft, target, options, detokenizer, guides)

    def describe(self, engine: Path) -> EngineDescription | None:
        from specpipe.runtimes.torch import describe

        return describe.describe(engine)
