"""The TensorRT runtime: engines from the network API, built from the unified checkpoint.

Importing this imports no TensorRT; building and loading do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.checkpoints.formats import FORMATS
from specpipe.errors import EngineBuildError, RuntimeUnavailable
from specpipe.machine.libraries import with_extras
from specpipe.runtimes.plan import EngineStages, checkpoint_dir, checkpoint_dtype
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION, link_folder
from specpipe.runtimes.runtime import require_library
from specpipe.runtimes.tensorrt import library
from specpipe.runtimes.tensorrt.build import BuildTensorRTEngine, PlaceWeights
from specpipe.runtimes.tensorrt.network import check_supported
from specpipe.stage import PlannedStage

if TYPE_CHECKING:
    from specpipe.config.sections import EngineConfig
    from specpipe.machine.memory import MemoryEstimate
    from specpipe.runtimes.engine_description import EngineDescription
    from specpipe.runtimes.launch import Launch, LaunchMode
    from specpipe.runtimes.pair.pair import DetokenizerFactory, Pair, PairOptions
    from specpipe.runtimes.plan import PairPlan, Side


class TensorRTRuntime:
    """Draft and target are engines on one GPU; specpipe's own loop drives them."""

    name = "tensorrt"
    runs_own_loop = True

    def require(self) -> None:
        if not library.is_installed("tensorrt"):  # either will do
            library.require("tensorrt_rtx")

    def require_serving(self) -> None:
        from specpipe.machine import provenance
        from specpipe.runtimes.tensorrt.fit import Gpu, buildable

        gpus = [Gpu(gpu["name"], gpu["compute_cap"]) for gpu in provenance.gpus()]
        if not gpus:
            raise RuntimeUnavailable("engines run on a GPU, and nvidia-smi names none")
        if not library.is_installed("tensorrt") and not buildable(gpus):
            raise RuntimeUnavailable(
                f"tensorrt_rtx runs on none of {', '.join(map(str, gpus))}: set engine.library to "
                f"tensorrt, and {with_extras('tensorrt')}"
            )

    def engine_stages(self, pair: PairPlan) -> tuple[EngineStages, EngineStages]:
        return self._stages(pair, pair.draft), self._stages(pair, pair.target)

    def _stages(self, pair: PairPlan, side: Side) -> EngineStages:
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
            checkpoint=checkpoint_dir(side),
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
            return EngineStages(
                stages=(PlannedStage(build, side.artifacts / "engine", require=require),)
            )
        plan = PlannedStage(build, side.artifacts / "plan", require=require)
        place = PlaceWeights(role=side.role, plan=plan.artifact, checkpoint=checkpoint_dir(side))
        return EngineStages(stages=(plan, PlannedStage(place, side.artifacts / "engine")))

    def reads_quantized(self, engine: EngineConfig) -> bool:
        return False

    def serving_settings(self, pair: PairPlan) -> Mapping[str, Any]:
        return {}

    def estimate_memory(self, pair: PairPlan, side: Side) -> MemoryEstimate:
        from specpipe.runtimes.tensorrt.memory import estimate_memory

        return estimate_memory(
            side.unified,
            dtype=checkpoint_dtype(side) if pair.engine.dtype == "auto" else pair.engine.dtype,
            max_batch_size=pair.engine.max_batch_size,
            max_seq_len=pair.max_seq_len_of(side),
            max_draft_len=pair.num_draft_tokens,
            max_num_tokens=pair.engine.max_num_tokens,
        )

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

    def load_pair(
        self, draft: Path, target: Path, options: PairOptions, detokenizer: DetokenizerFactory
    ) -> Pair:
        require_library(self.name, "torch", extra="torch")
        from specpipe.runtimes.tensorrt.pair import load_pair

        return load_pair(draft, target, options, detokenizer)

    def describe(self, engine: Path) -> EngineDescription | None:
        from specpipe.runtimes.tensorrt import describe

        return describe.describe(engine)


def _capabilities(side: Side, engine: EngineConfig) -> tuple[str, ...]:
    """Returns the capabilities that an engine is built for, without those that lack its format."""
    if engine.library != "tensorrt_rtx":
        return ()
    name = side.unified.format
    return tuple(
        capability
        for capability in engine.compute_capabilities
        if name is None or FORMATS[name].runs_on(int(capability.replace(".", "")))
    )
