"""The TensorRT-LLM runtime, for both of its backends: `tensorrt` (engines) and `pytorch` (LLM API).

Planning imports neither TensorRT-LLM nor Triton; a backend is imported by the method that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specpipe.config.engine import TensorRTLLMEngineConfig
    from specpipe.config.faults import Fault
    from specpipe.config.sections import PipelineConfig
    from specpipe.machine.memory import MemoryEstimate
    from specpipe.runtimes.engine_description import EngineDescription
    from specpipe.runtimes.launch import Launch, LaunchMode
    from specpipe.runtimes.pair.pair import DetokenizerFactory, Pair, PairOptions
    from specpipe.runtimes.plan import EngineStages, Side
    from specpipe.runtimes.repository_rule import Repository, ServedPair
    from specpipe.runtimes.requirements import Requirements
    from specpipe.runtimes.runtime import Backend
    from specpipe.runtimes.tensorrt_llm.plan import PairPlan
    from specpipe.speculative.guide import Guides


class TensorRTLLMRuntime:
    """Chooses the backend: for a plan by its config, for a built pair by what packaging wrote."""

    name = "tensorrt_llm"
    runs_own_loop = False

    def setting_faults(
        self, config: PipelineConfig, engine: TensorRTLLMEngineConfig
    ) -> Iterator[Fault]:
        from specpipe.runtimes.tensorrt_llm import refusals

        return refusals.setting_faults(config, engine.tensorrt_llm)

    def require(self) -> None:
        from specpipe.runtimes.engine_fit import installed
        from specpipe.runtimes.tensorrt_llm.engines import toolbox

        if installed("tensorrt_llm") is None:  # where it is, backend pytorch has all it needs
            toolbox.require()

    def require_serving(self) -> None:
        from specpipe.config.tensorrt_llm_versions import DEFAULT_VERSION, release
        from specpipe.errors import RuntimeUnavailable
        from specpipe.machine.gpus import gpus_here
        from specpipe.runtimes.engine_fit import installed

        if installed("tensorrt_llm") is None:
            raise RuntimeUnavailable(
                "TensorRT-LLM is not installed: run specpipe in a container made from "
                f"{release(DEFAULT_VERSION).image} (docker/Dockerfile.tensorrt-llm)"
            )
        if not gpus_here():
            raise RuntimeUnavailable(
                "TensorRT-LLM runs on a GPU, and NVIDIA's driver shows none: start the container "
                "with `--gpus all`"
            )

    def machine_facts(self) -> Mapping[str, str]:
        from specpipe.runtimes.tensorrt_llm import doctor

        return doctor.machine_facts()

    def settings_here(self) -> Mapping[str, str]:
        from specpipe.runtimes.engine_fit import installed
        from specpipe.runtimes.tensorrt_llm.engines import toolbox

        return {
            "tensorrt_llm.version": str(installed("tensorrt_llm")),
            "tensorrt_llm.backend": "tensorrt" if toolbox.is_native() else "pytorch",
        }

    def engine_stages(self, pair: PairPlan) -> tuple[EngineStages, EngineStages]:
        return _planned(pair.engine).engine_stages(pair)

    def reads_quantized(self, engine: TensorRTLLMEngineConfig) -> bool:
        return _planned(engine).reads_quantized(engine)

    def parallel_draft_fault(self, pair: PairPlan) -> str | None:
        return _planned(pair.engine).parallel_draft_fault(pair)

    def serving_settings(self, pair: PairPlan) -> Mapping[str, Any]:
        return _planned(pair.engine).serving_settings(pair)

    def plan_notes(self, pair: PairPlan) -> Iterable[str]:
        return _planned(pair.engine).plan_notes(pair)

    def estimate_memory(self, pair: PairPlan, side: Side) -> MemoryEstimate:
        return _planned(pair.engine).estimate_memory(pair, side)

    def memory_by_gpu(
        self, pair: PairPlan, side: Side, sm: int | None
    ) -> Mapping[int, MemoryEstimate]:
        from specpipe.runtimes.tensorrt_llm import kv_plan

        return kv_plan.memory_by_gpu(pair, side)

    def write_models(
        self, out: Path, *, draft_engine: Path, target_engine: Path, options: PairOptions
    ) -> None:
        _built(options).write_models(
            out, draft_engine=draft_engine, target_engine=target_engine, options=options
        )

    def lint(self, repository: Repository, pair: ServedPair) -> Iterator[str]:
        return _built(pair.options).lint(repository, pair)

    def load_pair(
        self,
        draft: Path,
        target: Path,
        options: PairOptions,
        detokenizer: DetokenizerFactory,
        guides: Guides | None = None,
    ) -> Pair:
        return _built(options).load_pair(draft, target, options, detokenizer, guides)

    def launch(
        self,
        repository: Path,
        *,
        mode: LaunchMode = "auto",
        allow_unknown_facts: bool = False,
        build_command: str = "specpipe build",
    ) -> Launch:
        from specpipe.runtimes.pair_file import read_pair

        return _built(read_pair(repository).options).launch(
            repository,
            mode=mode,
            allow_unknown_facts=allow_unknown_facts,
            build_command=build_command,
        )

    def requirements(self, repository: Path, *, driver: str | None) -> Requirements:
        from specpipe.runtimes.pair_file import read_pair

        return _built(read_pair(repository).options).requirements(repository, driver=driver)

    def describe(self, engine: Path) -> EngineDescription | None:
        described = (_backend(name).describe(engine) for name in ("tensorrt", "pytorch"))
        return next((one for one in described if one is not None), None)


def _planned(engine: TensorRTLLMEngineConfig) -> Backend[PairPlan]:
    return _backend(engine.tensorrt_llm.backend)


def _built(options: PairOptions) -> Backend[PairPlan]:
    return _backend(options.runtime_settings["backend"])


def _backend(name: str) -> Backend[PairPlan]:
    """Each backend is a module."""
    if name == "pytorch":
        from specpipe.runtimes.tensorrt_llm.llmapi import backend as llmapi

        return llmapi
    from specpipe.runtimes.tensorrt_llm.engines import backend as engines

    return engines
