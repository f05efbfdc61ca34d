"""The TensorRT runtime: engines from the network API, built from the unified checkpoint.

Importing this imports neither TensorRT nor NumPy; building, loading and planning do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.errors import RuntimeUnavailable
from specpipe.machine.gpus import gpus_here
from specpipe.machine.libraries import with_extras
from specpipe.machine.provenance import library_versions
from specpipe.runtimes.engine_limits import limit_faults
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION, link_folder
from specpipe.runtimes.runtime import require_library
from specpipe.runtimes.tensorrt import library

if TYPE_CHECKING:
    from specpipe.config.engine import TensorRTEngineConfig
    from specpipe.config.faults import Fault
    from specpipe.config.sections import PipelineConfig
    from specpipe.machine.memory import MemoryEstimate
    from specpipe.runtimes.engine_description import EngineDescription
    from specpipe.runtimes.launch import Launch, LaunchMode
    from specpipe.runtimes.pair.pair import DetokenizerFactory, Pair, PairOptions
    from specpipe.runtimes.plan import EngineStages, Side
    from specpipe.runtimes.repository_rule import Repository, ServedPair
    from specpipe.runtimes.requirements import Requirements
    from specpipe.runtimes.tensorrt.plan import PairPlan
    from specpipe.speculative.guide import Guides


class TensorRTRuntime:
    """Draft and target are engines on one GPU; specpipe's own loop drives them."""

    name = "tensorrt"
    runs_own_loop = True

    def setting_faults(
        self, config: PipelineConfig, engine: TensorRTEngineConfig
    ) -> Iterator[Fault]:
        from specpipe.runtimes.tensorrt import setting_faults

        return setting_faults.setting_faults(config, engine)

    def require(self) -> None:
        if not library.is_installed("tensorrt"):  # either will do
            library.require("tensorrt_rtx")

    def require_serving(self) -> None:
        from specpipe.runtimes.tensorrt.fit import buildable, named

        gpus = gpus_here()
        if not gpus:
            raise RuntimeUnavailable("engines run on a GPU, and NVIDIA's driver shows none")
        if not library.is_installed("tensorrt") and not buildable(gpus):
            raise RuntimeUnavailable(
                f"tensorrt_rtx runs on none of {', '.join(named(gpus))}: set engine.library to "
                f"tensorrt, and {with_extras('tensorrt')}"
            )

    def machine_facts(self) -> Mapping[str, str]:
        return library_versions((*library.DISTRIBUTIONS.values(), "cuda-bindings"))

    def settings_here(self) -> Mapping[str, str]:
        from specpipe.runtimes.tensorrt.fit import buildable

        is_rtx = library.is_installed("tensorrt_rtx") and bool(buildable(gpus_here()))
        return {"library": "tensorrt_rtx" if is_rtx else "tensorrt"}

    def engine_stages(self, pair: PairPlan) -> tuple[EngineStages, EngineStages]:
        from specpipe.runtimes.tensorrt import plan

        return plan.engine_stages(pair, pair.draft), plan.engine_stages(pair, pair.target)

    def reads_quantized(self, engine: TensorRTEngineConfig) -> bool:
        return False

    def parallel_draft_fault(self, pair: PairPlan) -> str | None:
        return None

    def serving_settings(self, pair: PairPlan) -> Mapping[str, Any]:
        return {}

    def plan_notes(self, pair: PairPlan) -> Iterable[str]:
        return ()

    def estimate_memory(self, pair: PairPlan, side: Side) -> MemoryEstimate:
        from specpipe.runtimes.tensorrt import plan

        return plan.estimate_memory(pair, side)

    def memory_by_gpu(
        self, pair: PairPlan, side: Side, sm: int | None
    ) -> Mapping[int, MemoryEstimate]:
        return {0: self.estimate_memory(pair, side)}

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
        from specpipe.runtimes.tensorrt.serve import launch

        return launch(
            repository,
            mode=mode,
            allow_unknown_facts=allow_unknown_facts,
            build_command=build_command,
        )

    def requirements(self, repository: Path, *, driver: str | None) -> Requirements:
        from specpipe.runtimes.tensorrt.serve import requirements

        return requirements(repository, driver=driver)

    def load_pair(
        self,
        draft: Path,
        target: Path,
        options: PairOptions,
        detokenizer: DetokenizerFactory,
        guides: Guides | None = None,
    ) -> Pair:
        require_library(self.name, "torch", extra="torch")
        from specpipe.runtimes.tensorrt.pair import load_pair

        return load_pair(draft, target, options, detokenizer, guides)

    def describe(self, engine: Path) -> EngineDescription | None:
        from specpipe.runtimes.tensorrt import describe

        return describe.describe(engine)
