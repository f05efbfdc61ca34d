"""What a runtime offers to the rest of specpipe: a build stage for each engine, and a pair that
serves them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from specpipe.errors import RuntimeUnavailable
from specpipe.runtimes.memory import MemoryEstimate
from specpipe.speculative.request import Chunk, Detokenizer, Request

if TYPE_CHECKING:
    from specpipe.config import EngineConfig
    from specpipe.stages.base import Stage

RUNTIMES = {
    "torch": "specpipe.runtimes.torch:TorchRuntime",
}

DetokenizerFactory = Callable[[Sequence[int]], Detokenizer]
"""Makes the detokenizer of one request from its prompt's token ids."""


class Pair(Protocol):
    """A draft and a target that run requests together.

    One thread drives it: `submit`, `cancel` and `step` are not to be called at the same time.
    """

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
        """Runs one draft-verify round for every admitted request; returns what each may emit."""

    def has_work(self) -> bool:
        """True while a request is queued, running, or has a chunk that `step` has yet to return."""


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """How a pair serves; packaging writes it beside the engines, the Triton model reads it."""

    num_draft_tokens: int = 4
    adaptive: bool = True
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


class Runtime(Protocol):
    """One library's way of building engines and running a pair of them."""

    name: str

    def require(self) -> None:
        """Raises RuntimeUnavailable when the library that builds and runs is not installed."""

    def build_stage(
        self,
        *,
        role: Literal["draft", "target"],
        checkpoint: Path,
        engine: EngineConfig,
        max_seq_len: int,
        max_draft_len: int,
    ) -> Stage:
        """The stage that turns one unified checkpoint into one engine; imports nothing heavy."""

    def estimate_memory(
        self,
        unified: Mapping[str, Any],
        *,
        engine: EngineConfig,
        max_seq_len: int,
        max_draft_len: int,
    ) -> MemoryEstimate:
        """What one engine will take, from the config of its unified checkpoint alone."""

    def load_pair(
        self, draft: Path, target: Path, options: PairOptions, detokenizer: DetokenizerFactory
    ) -> Pair:
        """Loads two engines; RuntimeUnavailable or EngineMismatch when they cannot run here."""


def load_runtime(name: str) -> Runtime:
    """Imports a runtime, without its library: that is for planning."""
    module_name, _, class_name = RUNTIMES[name].partition(":")
    return cast(Runtime, getattr(importlib.import_module(module_name), class_name)())


def require_library(runtime: str, library: str, *, extra: str) -> None:
    """Raises RuntimeUnavailable when the library of a runtime is not installed."""
    if importlib.util.find_spec(library) is None:
        raise RuntimeUnavailable(
            f"runtime '{runtime}' needs '{library}': pip install 'specpipe[{extra}]'"
        )
