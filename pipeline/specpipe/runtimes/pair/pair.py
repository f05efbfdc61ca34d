"""What a pair of models is to those who drive it, and how it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specpipe.checkpoints.parallel_draft import ParallelDraft
from specpipe.roles import Role
from specpipe.speculative.adaptive import Schedule
from specpipe.speculative.request import Chunk, Detokenizer, Request


class DetokenizerFactory(Protocol):
    """`Tokenizer.detokenizer`, which makes the detokenizer of one request."""

    def __call__(
        self, prompt_token_ids: Sequence[int], /, *, skip_special_tokens: bool
    ) -> Detokenizer:
        """Takes `text_token_ids` of the request, and whether text leaves special tokens out."""


@dataclass(frozen=True)
class KVUse:
    """How full one model's KV cache is.

    num_tokens         positions that hold a token or, where it has pages, that requests have
    capacity_tokens    positions in all
    num_cached_tokens  those that hold what was read of prompts, and that no request has
    num_reused_tokens  tokens of prompts that were found there since the pair was loaded
    """

    num_tokens: int
    capacity_tokens: int
    num_cached_tokens: int = 0
    num_reused_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Preempted:
    """What a pair did for want of memory since it was loaded.

    num_requests  times that a request gave way to others
    num_tokens    that were computed again for that
    """

    num_requests: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class LateWork:
    """What a pair should have done before it was ready, and did while requests waited.

    num_compilations  kernels that were compiled, or read from disk
    num_recordings    launches that were recorded
    """

    num_compilations: int = 0
    num_recordings: int = 0


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """What a pair holds at a moment.

    num_waiting  requests in its queue
    kv_caches    empty where the models run elsewhere, which then has metrics of its own
    late_work    since it was loaded; so is preempted
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_caches: Mapping[Role, KVUse] = field(default_factory=dict)
    late_work: LateWork = LateWork()
    preempted: Preempted = Preempted()


class Pair(Protocol):
    """A draft and a target that run requests together.

    One thread drives it: `submit`, `cancel`, `step` and `occupancy` are not to be called at the
    same time. Any other may call `prepare` and `interrupt`.
    """

    @property
    def num_steps(self) -> int:
        """Draft-verify rounds so far: a sign of life while requests are long."""

    def prepare(self, request: Request) -> None:
        """Does of `submit` what takes long and needs no engine; any thread may call it.

        Raises RequestError as that does.
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
        """Runs one draft-verify round for every admitted request; returns what each may emit.

        A pair whose models run elsewhere waits for the next round of any request instead.
        """

    def interrupt(self) -> None:
        """Makes a `step` that waits return, or the next one if none does: there is news for it."""

    def close(self) -> None:
        """Gives back what would outlive this process; the pair's last call."""

    def occupancy(self) -> Occupancy:
        """Returns what the pair holds now; cheap enough to ask some times a second."""

    def has_work(self) -> bool:
        """Returns whether a request is queued, running, or has a chunk that `step` must return."""


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
    """Whether requests copy draft tokens from their own texts where these repeat themselves,
    instead of asking the draft model.
    """
    prefix_reuse: bool = True
    """Whether prompts that begin alike share what is cached of that, where engines have pages."""
    max_batch_size: int = 8
    max_seq_len: int = 1024
    max_num_tokens: int = 256
    max_queue_size: int = 128
    request_timeout_s: float = 600.0
    stream_interval_s: float | None = None
    """Between two responses of a stream; 0: each chunk has one; None: as the server can."""
    num_threads: int | None = None
    unused_token_ids: tuple[tuple[int, int], ...] = ()
    """Ids that no tokenizer entry uses (padding rows and holes), as half-open ranges.

    They are never proposed and never emitted.
    """
    parallel: ParallelDraft | None = None
    """How the draft proposes all of its tokens in one pass; None: it gives them one by one."""
    runtime_settings: Mapping[str, Any] = field(default_factory=dict)
    """What only the pair's runtime knows of; JSON-able."""

    @property
    def used_token_id(self) -> int:
        """The lowest id that is used: a prompt that every pair takes."""
        return next((stop for start, stop in self.unused_token_ids if start == 0), 0)
