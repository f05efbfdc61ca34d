"""Runs requests on a pair as they come and go, and keeps what each was told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.bits.asked import Asked
from specpipe.runtimes.pair.engine import Engine
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.speculative.request import Chunk, FinishReason, Request

_MOST_STILL_STEPS = 1_000
"""Steps in which nobody is told anything, and the pair is taken to hang."""


@dataclass
class Told:
    """What one request was told.

    joined  the step before which it came
    steps   the step of each chunk
    """

    joined: int
    chunks: list[Chunk] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [i for chunk in self.chunks for i in chunk.token_ids]

    @property
    def last(self) -> Chunk | None:
        """The last chunk, once there is one that ends the request."""
        ended = self.chunks and self.chunks[-1].finish_reason
        return self.chunks[-1] if ended else None

    @property
    def reason(self) -> FinishReason | None:
        """Why it is over; None: it is not."""
        return None if self.last is None else self.last.finish_reason

    def step_of(self, place: int) -> int:
        """Returns the step in which a token of the output, or else the end, was told."""
        num_told = 0
        for chunk, step in zip(self.chunks, self.steps, strict=True):
            num_told += len(chunk.token_ids)
            if num_told > place:
                return step
        return self.steps[-1] if self.steps else self.joined


@dataclass
class Crowd:
    """What came of many requests at once.

    told         by request id
    unknown      ids in chunks of nobody
    most_at_once  requests that were told something in one step, at most
    """

    told: dict[str, Told] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    most_at_once: int = 0
    is_stuck: bool = False

    def of(self, request_id: str) -> Told:
        """Returns what a request was told, also if it never came."""
        return self.told.get(request_id, Told(self.num_steps))

    def beside(self, request_id: str, step: int) -> list[str]:
        """Returns who else was told something in a step, or in those about it."""
        about = range(step - 1, step + 2)
        return [
            other
            for other, told in self.told.items()
            if other != request_id and any(at in about for at in told.steps)
        ]


def run_crowd(pair: EnginePair, asked: Sequence[Asked], *, max_waiting: int) -> Crowd:
    """Runs all requests to their ends; those that come while so many wait come later."""
    crowd = Crowd()
    coming = _Coming(asked)
    leaving: dict[str, int] = {}  # the step before which each is cancelled
    num_still = 0
    while coming.is_left or pair.has_work():
        while pair.occupancy().num_waiting < max_waiting:
            one = coming.take(crowd.num_steps, is_idle=not pair.has_work())
            if one is None:
                break
            request_id = pair.submit(one.request)
            crowd.told[request_id] = Told(crowd.num_steps)
            if one.cancelled_after is not None:
                leaving[request_id] = crowd.num_steps + one.cancelled_after
        for request_id in [i for i, step in leaving.items() if step <= crowd.num_steps]:
            pair.cancel(request_id)
            del leaving[request_id]
        chunks = pair.step()
        for chunk in chunks:
            told = crowd.told.get(chunk.request_id)
            if told is None:
                crowd.unknown[chunk.request_id] += 1
                continue
            told.chunks.append(chunk)
            told.steps.append(crowd.num_steps)
        crowd.most_at_once = max(crowd.most_at_once, len({c.request_id for c in chunks}))
        crowd.num_steps += 1
        num_still = 0 if chunks or not pair.has_work() else num_still + 1
        if num_still > _MOST_STILL_STEPS:
            crowd.is_stuck = True
            break
    return crowd


class _Coming:
    """Requests that have not come yet."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._left = list(reversed(asked))
        self._last_step = 0

    @property
    def is_left(self) -> bool:
        return bool(self._left)

    def take(self, step: int, *, is_idle: bool) -> Asked | None:
        """Takes out the next request if it comes before this step."""
        if not self._left:
            return None
        after = self._left[-1].steps_after
        comes = is_idle if after is None else step >= self._last_step + after
        if not comes:
            return None
        self._last_step = step
        return self._left.pop()


def run_alone(pair: EnginePair, request: Request) -> Told:
    """Runs one request on an idle pair."""
    crowd = run_crowd(pair, [Asked(request, "alone", steps_after=0)], max_waiting=1)
    return crowd.told[request.request_id]


@dataclass(frozen=True)
class Room:
    """What an idle engine has room for: sequences of one token, and of all that it takes."""

    shortest: int
    longest: int

    @classmethod
    def of(cls, engine: Engine) -> Room:
        """Counts by taking all of it, and gives it back."""
        return cls(*(len(list(_filled(engine, size))) for size in (1, engine.max_seq_len)))


def _filled(engine: Engine, max_tokens: int) -> Iterator[int]:
    taken = []
    while engine.can_admit(max_tokens):
        taken.append(engine.allocate(prompt_length=1, max_tokens=max_tokens))
        yield taken[-1]
    for sequence in taken:
        engine.free(sequence)
