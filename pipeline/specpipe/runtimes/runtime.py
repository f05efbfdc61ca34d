"""What a runtime offers to the rest of specpipe: a build stage for each engine, and a pair that
serves them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from specpipe.machine.libraries import require_installed

if TYPE_CHECKING:
    from specpipe.config.faults import Fault
    from specpipe.config.sections import PipelineConfig
    from specpipe.machine.memory import MemoryEstimate
    from specpipe.runtimes.engine_description import EngineDescription
    from specpipe.runtimes.launch import Launch, LaunchMode
    from specpipe.runtimes.pair.pair import DetokenizerFactory, Pair, PairOptions
    from specpipe.runtimes.plan import EngineStages, PairPlan, Side
    from specpipe.runtimes.repository_rule import Repository, ServedPair
    from specpipe.runtimes.requirements import Requirements
    from specpipe.speculative.guide import Guides

RUNTIMES = {
    "torch": "specpipe.runtimes.torch:TorchRuntime",
    "tensorrt": "specpipe.runtimes.tensorrt:TensorRTRuntime",
    "tensorrt_llm": "specpipe.runtimes.tensorrt_llm:TensorRTLLMRuntime",
}


Plan = TypeVar("Plan", contravariant=True)


class Backend(Protocol[Plan]):
    """What may differ within a runtime: how engines come to be, what they are, how they serve."""

    def engine_stages(self, pair: Plan) -> tuple[EngineStages, EngineStages]:
        """How the engines of the draft and of the target come to be.

        Imports nothing heavy. Raises EngineBuildError
        for what can be known not to work.
        """

    def reads_quantized(self, engine: Any) -> bool:
        """True where quantized Hugging Face checkpoints are read as they are.

        `Side.unified` then tells the architecture and not how the weights are stored. Others read
        a unified checkpoint, into which what is known of them is carried over.
        """

    def parallel_draft_fault(self, pair: Plan) -> str | None:
        """Why a draft that proposes several tokens in one pass does not run so, and what to do, as
        the second half of a sentence; None: it does.

        It is asked of such pairs alone: `Side.unified` of the draft says how it is, and so will
        the pair's options.
        """

    def serving_settings(self, pair: Plan) -> Mapping[str, Any]:
        """The `runtime_settings` of the pair's options."""

    def plan_notes(self, pair: Plan) -> Iterable[str]:
        """What is worth knowing of a pair before it is built, a sentence each."""

    def estimate_memory(self, pair: Plan, side: Side) -> MemoryEstimate:
        """What one engine will take."""

    def write_models(
        self, out: Path, *, draft_engine: Path, target_engine: Path, options: PairOptions
    ) -> None:
        """Puts the engines into the Triton repository `out`, and models of its own.

        The folders `draft` and `target` in the version folder of `speculative` are what `load_pair`
        gets; each holds the engine's `config.json` at least.
        """

    def lint(self, repository: Repository, pair: ServedPair) -> Iterator[str]:
        """Yields what keeps a repository from serving a pair, besides what holds for every runtime.

        Each sentence begins with the name of a model.
        """

    def launch(
        self,
        repository: Path,
        *,
        mode: LaunchMode = "auto",
        allow_unknown_facts: bool = False,
        build_command: str = "specpipe build",
    ) -> Launch:
        """How the server of a repository is to be started on this machine.

        Raises EngineMismatch when its engines were built for something else than what is here, or
        when a fact of theirs is unknown and that was not allowed; the message names all of it, and
        the command that builds them again.
        """

    def requirements(self, repository: Path, *, driver: str | None) -> Requirements:
        """What a machine must be to serve a repository, as far as the repository tells.

        driver  that of NVIDIA under which the engines were built; None: unknown, or there was none
        """

    def load_pair(
        self,
        draft: Path,
        target: Path,
        options: PairOptions,
        detokenizer: DetokenizerFactory,
        guides: Guides | None = None,
    ) -> Pair:
        """Loads two engines; RuntimeUnavailable or EngineMismatch when they cannot run here.

        With `guides` requests may have a guide, where the runtime can follow one.
        """

    def describe(self, engine: Path) -> EngineDescription | None:
        """What an engine is, by its folder alone: without the library and the GPU that run it.

        None for a folder that is no engine of this runtime; EngineMismatch where it is one, and
        cannot be read.
        """


class Runtime(Backend["PairPlan"], Protocol):
    """One library's way of building engines and running a pair of them.

    `engine` is the YAML's section as this runtime has it, and so is that of a plan.

    runs_own_loop
            whether specpipe's loop runs the engines: any process can then load the pair, and a
            seeded request draws with one noise for draft and target, whatever K is
    """

    name: str
    runs_own_loop: bool

    def setting_faults(self, config: PipelineConfig, engine: Any) -> Iterable[Fault]:
        """The settings that this runtime cannot follow, or that have no effect with it.

        Imports nothing heavy, NumPy included: whoever reads a YAML waits for it.
        """

    def require(self) -> None:
        """Raises RuntimeUnavailable when the library that builds and runs is not installed."""

    def require_serving(self) -> None:
        """Raises RuntimeUnavailable when no engine of it could be served on this machine."""

    def machine_facts(self) -> Mapping[str, str]:
        """What this machine has of the libraries and programs that it uses, by their names."""

    def settings_here(self) -> Mapping[str, str]:
        """The settings below `engine`, by dotted key, that what is installed here decides.

        Whoever names nothing but the runtime gets them. To be called after `require_serving`.
        """

    def memory_by_gpu(
        self, pair: PairPlan, side: Side, sm: int | None
    ) -> Mapping[int, MemoryEstimate]:
        """What each rank of one engine will take, by the number of its GPU; none: no GPU has it.

        sm  the compute capability of the GPUs, times 10; None: unknown
        """


def load_runtime(name: str) -> Runtime:
    """Imports a runtime, without its library and NumPy: reading a YAML and planning need it."""
    module_name, _, class_name = RUNTIMES[name].partition(":")
    return cast(Runtime, getattr(importlib.import_module(module_name), class_name)())


def require_library(runtime: str, library: str, *, extra: str) -> None:
    """Raises RuntimeUnavailable when the library of a runtime is not installed."""
    require_installed(f"runtime '{runtime}'", library, extra=extra)
