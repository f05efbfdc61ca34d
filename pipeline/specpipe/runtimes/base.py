"""What a runtime offers to the rest of specpipe: a build stage for each engine, and a pair that
serves them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from specpipe.checkpoint import read_config
from specpipe.errors import ConfigError, RuntimeUnavailable
from specpipe.family_config import named_dtype
from specpipe.file_limits import FILE_LIMITS, FileLimits
from specpipe.installation import with_extras
from specpipe.quantization.quantized_config import check_export
from specpipe.runtimes.memory import MemoryEstimate
from specpipe.speculative.adaptive import Schedule
from specpipe.speculative.request import Chunk, Detokenizer, Request
from specpipe.stages.base import PlannedStage, Role
from specpipe.stages.calibrate import Calibrate
from specpipe.stages.convert import Convert
from specpipe.stages.export import Export
from specpipe.stages.quantize import Quantize
from specpipe.unified_config import UnifiedConfig

if TYPE_CHECKING:
    from specpipe.config import CheckpointConfig, EngineConfig
    from specpipe.runtimes.engine_description import EngineDescription

RUNTIMES = {
    "torch": "specpipe.runtimes.torch:TorchRuntime",
    "tensorrt": "specpipe.runtimes.tensorrt:TensorRTRuntime",
    "tensorrt_llm": "specpipe.runtimes.tensorrt_llm:TensorRTLLMRuntime",
}

DetokenizerFactory = Callable[[Sequence[int]], Detokenizer]
"""Makes the detokenizer of one request from its `text_token_ids`."""


@dataclass(frozen=True)
class KVUse:
    """Of one model's KV cache: positions that hold a token, and how many there are."""

    num_tokens: int
    capacity_tokens: int


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """What a pair holds at a moment.

    num_waiting  requests in its queue
    kv_caches    empty where the models run elsewhere, which then tells by itself
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_caches: Mapping[Role, KVUse] = field(default_factory=dict)


class Pair(Protocol):
    """A draft and a target that run requests together.

    One thread drives it: `submit`, `cancel`, `step` and `occupancy` are not to be called at the
    same time. Any other may call `interrupt`.
    """

    @property
    def num_steps(self) -> int:
        """Draft-verify rounds so far: a sign of life while requests are long."""

    def submit(self, request: Request) -> str:
        """Queues a request and returns its id.

        Raises RequestError when the request can never run (a limit, with the numbers) or when the
        queue is full.
        """

    def cancel(self, request_id: str) -> None:
        """Frees the request's KV cache before the next step; its last chunk says "cancelled".

        An id that is not running or queued is ignored: the request may just have finished.
        """

    def step(self) -> list[Chunk]:
        """Runs one draft-verify round for every admitted request; returns what each may emit.

        A pair whose models run elsewhere waits for the next round of any request instead.
        """

    def interrupt(self) -> None:
        """Makes a `step` that waits return, or the next one if none does: there is news for it."""

    def close(self) -> None:
        """Gives back what would outlive this process; the pair's last call."""

    def occupancy(self) -> Occupancy:
        """What it holds now, for its operators; cheap enough to ask some times a second."""

    def has_work(self) -> bool:
        """True while a request is queued, running, or has a chunk that `step` has yet to return."""


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """How a pair serves; packaging writes it beside the engines, the Triton model reads it."""

    num_draft_tokens: int = 4
    adaptive: bool = True
    schedule: Schedule = ()
    """The most tokens that the draft drafts by load, whatever acceptance says, for requests that
    name no draft length; none: num_draft_tokens.
    """
    prompt_lookup: bool = False
    """Whether a request that runs alone copies draft tokens from its own text where that repeats
    itself, instead of asking the draft model.
    """
    max_batch_size: int = 8
    max_seq_len: int = 1024
    max_num_tokens: int = 256
    max_queue_size: int = 128
    request_timeout_s: float = 600.0
    num_threads: int | None = None
    unused_token_ids: tuple[tuple[int, int], ...] = ()
    """Ids that no tokenizer entry uses (padding rows and holes), as half-open ranges.

    They are never proposed and never emitted.
    """
    runtime_settings: Mapping[str, Any] = field(default_factory=dict)
    """What only the pair's runtime knows of; JSON-able."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One checkpoint of a pair, as a plan knows it: from its small files.

    folder          the checkpoint; its weights may not be there before `fetch` was called
    unified         the config of the unified checkpoint that will be written, but for its dtype
    context_length  tokens that the checkpoint's positions reach
    base_dir        where relative paths of the YAML start
    artifacts       the folder of what is made of it, one folder below for each stage
    limits          what its files may hold
    """

    role: Role
    checkpoint: CheckpointConfig
    folder: Path
    unified: UnifiedConfig
    context_length: int
    base_dir: Path
    artifacts: Path
    limits: FileLimits = FILE_LIMITS
    fetch: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True)
class PairPlan:
    """What a runtime needs to plan its engines.

    max_seq_len  tokens of prompt and answer together, for the target
    measures     whether what quantization costs is measured, which reads unified checkpoints
    """

    draft: Side
    target: Side
    engine: EngineConfig
    max_seq_len: int
    num_draft_tokens: int
    measures: bool = False

    def max_seq_len_of(self, side: Side) -> int:
        """A draft with a shorter context stops drafting there; the request goes on."""
        return min(self.max_seq_len, side.context_length)


def checkpoint_stages(
    side: Side, *, unified: bool = True, huggingface: bool = False
) -> tuple[PlannedStage, ...]:
    """The stages from a Hugging Face checkpoint to what is built from it.

    unified      whether anyone reads the unified checkpoint, in `checkpoint_dir`
    huggingface  whether the engine needs the quantized weights in Hugging Face's layout, in
                 `huggingface_dir`; the config may ask for them anyway

    A plain checkpoint is converted, and so is one that is quantized already. The last stage of one
    that the config quantizes makes what the engine reads.
    """
    scheme = side.checkpoint.quantization
    if scheme is None:
        convert = Convert(
            side.role,
            side.folder,
            tp_size=side.checkpoint.tp_size,
            pp_size=side.checkpoint.pp_size,
            limits=side.limits,
        )
        # Plain weights are raw bytes; those of others are taken apart in torch.
        require = None if side.unified.format is None else _require_torch
        return (PlannedStage(convert, checkpoint_dir(side), side.fetch, require),)
    if scheme.export or huggingface:
        try:
            check_export(side.unified)
        except ConfigError as exc:
            raise ConfigError(f"{side.role}: {exc}") from exc
    stages = []
    scales = side.artifacts / "scales" if scheme.needs_data else None
    if scales is not None:
        calibrate = Calibrate(
            role=side.role,
            checkpoint=side.folder,
            scheme=scheme,
            base_dir=side.base_dir,
            limits=side.limits,
        )
        stages.append(PlannedStage(calibrate, scales, side.fetch, calibrate.require))
    export = Export(
        role=side.role,
        checkpoint=side.folder,
        scales=scales,
        scheme=scheme,
        limits=side.limits,
    )
    exported = PlannedStage(export, huggingface_dir(side), side.fetch, _require_torch)
    if scheme.export and not huggingface:
        stages.append(exported)
    if unified:
        quantize = Quantize(
            role=side.role,
            checkpoint=side.folder,
            scales=scales,
            scheme=scheme,
            tp_size=side.checkpoint.tp_size,
            pp_size=side.checkpoint.pp_size,
            limits=side.limits,
        )
        stages.append(PlannedStage(quantize, checkpoint_dir(side), side.fetch, _require_torch))
    if huggingface:
        stages.append(exported)
    return tuple(stages)


def checkpoint_dtype(side: Side) -> str:
    """Returns the dtype that a side's config.json names; bfloat16 where the weights decide."""
    return named_dtype(read_config(side.folder, allow_quantized=True, limits=side.limits))


def checkpoint_dir(side: Side) -> Path:
    """Returns the folder of a side's unified checkpoint, plain or quantized."""
    return side.artifacts / "checkpoint"


def huggingface_dir(side: Side) -> Path:
    """Returns the folder of a side's quantized weights in Hugging Face's layout."""
    return side.artifacts / "huggingface"


def _require_torch() -> None:
    require_installed("quantization", "torch", extra="quantize")


LaunchMode = Literal["auto", "leader", "orchestrator"]
"""How the ranks of engines come to be, where they are processes of their own: mpirun starts them
all (leader), or one server spawns those of each engine (orchestrator)."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the server of a repository is started; the default is one `tritonserver`.

    world_size       servers that mpirun starts, one for each rank; all but the first load
                     `rank_models` only and answer nobody
    is_orchestrator  whether mpirun starts the only server, which spawns the ranks itself
    environment      variables added to the server's own
    arguments        arguments of `tritonserver` besides those that every runtime needs
    notes            what the log is to say about it, a sentence each
    """

    world_size: int = 1
    is_orchestrator: bool = False
    rank_models: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def uses_mpi(self) -> bool:
        return self.world_size > 1 or self.is_orchestrator


class Runtime(Protocol):
    """One library's way of building engines and running a pair of them.

    runs_own_loop
            whether specpipe's loop runs the engines: any process can then load the pair, and a
            seeded request draws with one noise for draft and target, whatever K is
    """

    name: str
    runs_own_loop: bool

    def require(self) -> None:
        """Raises RuntimeUnavailable when the library that builds and runs is not installed."""

    def require_serving(self) -> None:
        """Raises RuntimeUnavailable when no engine of it could be served on this machine."""

    def engine_stages(
        self, pair: PairPlan
    ) -> tuple[tuple[PlannedStage, ...], tuple[PlannedStage, ...]]:
        """The stages from the draft's checkpoint to its engine, and those of the target.

        The artifact of the last one is the engine. Imports nothing heavy. Raises EngineBuildError
        for what can be known not to work.
        """

    def reads_quantized(self, engine: EngineConfig) -> bool:
        """True where quantized Hugging Face checkpoints are read as they are.

        `Side.unified` then tells the architecture and not how the weights are stored. Others read
        a unified checkpoint, into which what is known of them is carried over.
        """

    def serving_settings(self, pair: PairPlan) -> Mapping[str, Any]:
        """The `runtime_settings` of the pair's options."""

    def estimate_memory(self, pair: PairPlan, side: Side) -> MemoryEstimate:
        """What one engine will take."""

    def memory_by_gpu(
        self, pair: PairPlan, side: Side, sm: int | None
    ) -> Mapping[int, MemoryEstimate]:
        """What each rank of one engine will take, by the number of its GPU; none: no GPU has it.

        sm  the compute capability of the GPUs, times 10; None: unknown
        """

    def write_models(
        self, out: Path, *, draft_engine: Path, target_engine: Path, options: PairOptions
    ) -> None:
        """Puts the engines into the Triton repository `out`, and models of its own.

        The folders `draft` and `target` in the version folder of `speculative` are what `load_pair`
        gets; each holds the engine's `config.json` at least.
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

    def load_pair(
        self, draft: Path, target: Path, options: PairOptions, detokenizer: DetokenizerFactory
    ) -> Pair:
        """Loads two engines; RuntimeUnavailable or EngineMismatch when they cannot run here."""

    def describe(self, engine: Path) -> EngineDescription | None:
        """What an engine is, by its folder alone: without the library and the GPU that run it.

        None for a folder that is no engine of this runtime; EngineMismatch where it is one, and
        cannot be read.
        """


def load_runtime(name: str) -> Runtime:
    """Imports a runtime, without its library: that is for planning."""
    module_name, _, class_name = RUNTIMES[name].partition(":")
    return cast(Runtime, getattr(importlib.import_module(module_name), class_name)())


def require_library(runtime: str, library: str, *, extra: str) -> None:
    """Raises RuntimeUnavailable when the library of a runtime is not installed."""
    require_installed(f"runtime '{runtime}'", library, extra=extra)


def require_installed(needed_by: str, library: str, *, extra: str) -> None:
    """Raises RuntimeUnavailable when a library that comes with an extra is not installed."""
    if importlib.util.find_spec(library) is None:
        raise RuntimeUnavailable(f"{needed_by} needs '{library}': {with_extras(extra)}")
