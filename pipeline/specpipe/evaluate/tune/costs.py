"""What a step takes at each load: a draft step, a verification, and all that is neither.

B requests that decode, K draft tokens. Forwards are timed on sequences of a given length. Whole
steps of the pair are timed as well, on short prompts, and what they take beyond their forwards
(choosing tokens, text, bookkeeping) is the rest. All is timed in turns, and the median counts, so
that a busy moment of the machine does not fall on one of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from specpipe.errors import ServerError
from specpipe.machine.callables import Clock
from specpipe.roles import Role
from specpipe.runtimes.pair.costs import time_forward
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.speculative.request import Chunk, Request

_MIN_ROUNDS, _MAX_ROUNDS, _BUDGET_S = 7, 31, 5.0
"""Rounds of forwards, odd for a median: the fewest, and the most that begin within the budget."""

_STEP_ROUNDS, _NUM_STEPS = 3, 6  # rounds of whole steps, and steps of each. A guess.
_MOST_DRAFT_LENGTHS = 9  # of verification; those between them lie on a line
_PROMPT_TOKENS = 32  # a short one: reading it is no part of a step
_MOST_ANSWER_TOKENS = 1024  # more than the steps need, prompts that are still read included


@dataclass(frozen=True)
class LoadCosts:
    """Seconds at one load.

    draft_s          one draft step, over one token of each request
    verify_s         a target forward over K + 1 tokens of each request, by K; K = 0 is a plain step
    plain_rest_s     what a step without draft tokens takes besides; drafting_rest_s: with the most
    pass_s           the pass of a draft that proposes K tokens in one, by K; None: it takes K steps
    """

    batch_size: int
    draft_s: float
    verify_s: Mapping[int, float]
    plain_rest_s: float
    drafting_rest_s: float
    pass_s: Mapping[int, float] | None = None

    def drafting(self, num_draft_tokens: int) -> float:
        """Returns the seconds of drafting K tokens, interpolated likewise."""
        if self.pass_s is None or not num_draft_tokens:
            return num_draft_tokens * self.draft_s
        return float(np.interp(num_draft_tokens, list(self.pass_s), list(self.pass_s.values())))

    def verify(self, num_draft_tokens: int) -> float:
        """Returns the seconds of a verification, interpolated between those that were timed."""
        return float(np.interp(num_draft_tokens, list(self.verify_s), list(self.verify_s.values())))

    def step_s(self, num_draft_tokens: int) -> float:
        """Returns the seconds of a step: its forwards, and the rest, which grows evenly with K."""
        share = num_draft_tokens / max(self.verify_s)
        rest_s = (1.0 - share) * self.plain_rest_s + share * self.drafting_rest_s
        return self.drafting(num_draft_tokens) + self.verify(num_draft_tokens) + rest_s

    def to_json(self) -> dict[str, Any]:
        of_pass = {} if self.pass_s is None else {"pass_s": _pairs(self.pass_s)}
        return {
            "batch_size": self.batch_size,
            "draft_s": self.draft_s,
            **of_pass,
            "verify_s": _pairs(self.verify_s),
            "plain_rest_s": self.plain_rest_s,
            "drafting_rest_s": self.drafting_rest_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LoadCosts:
        by_length = {key: dict(data[key]) for key in ("verify_s", "pass_s") if key in data}
        return cls(**{**data, **by_length})


def _pairs(by_length: Mapping[int, float]) -> list[list[float]]:
    return [[length, seconds] for length, seconds in by_length.items()]


def draft_lengths(max_draft_len: int) -> tuple[int, ...]:
    """Returns the lengths whose verification is timed: all of a few, evenly chosen ones of many."""
    count = min(max_draft_len + 1, _MOST_DRAFT_LENGTHS)
    return tuple(sorted({round(length) for length in np.linspace(0, max_draft_len, count)}))


def measure(
    pair: EnginePair,
    prompt: Sequence[int],
    *,
    batch_sizes: Sequence[int],
    max_draft_len: int,
    context: int,
    clock: Clock = time.perf_counter,
) -> list[LoadCosts]:
    """Times a pair whose draft length is fixed, and that has no other requests.

    context is the length of the sequences that forwards are timed on; whole steps run on the
    beginning of the prompt.
    """
    times = _Times(pair, list(prompt)[:_PROMPT_TOKENS], clock)
    lengths = draft_lengths(max_draft_len)
    of_pass = lengths[1:] if pair.is_parallel else ()
    end = time.perf_counter() + _BUDGET_S
    for round_number in range(_MAX_ROUNDS + 1):
        for size in batch_sizes:
            for length in (0, *of_pass):
                times.forward("draft", size, length, context)
            for length in lengths:
                times.forward("target", size, length, context)
        if round_number == 0:
            times.clear()  # a warm-up
        elif round_number >= _MIN_ROUNDS and time.perf_counter() > end:
            break
    for _ in range(_STEP_ROUNDS):
        for size in batch_sizes:
            times.forward("draft", size, times.draft_forward(max_draft_len)[0], 0)
            for length in (0, max_draft_len):
                times.forward("target", size, length, 0)
                times.steps(size, length)
    return [
        LoadCosts(
            batch_size=size,
            draft_s=times.median("draft", size, 0, context),
            verify_s={length: times.median("target", size, length, context) for length in lengths},
            plain_rest_s=times.rest(size, 0),
            drafting_rest_s=times.rest(size, max_draft_len),
            pass_s={n: times.median("draft", size, n, context) for n in of_pass} or None,
        )
        for size in batch_sizes
    ]


class _Times:
    """Seconds of everything that was timed; context 0 stands for that of the whole steps."""

    def __init__(self, pair: EnginePair, prompt: list[int], clock: Clock) -> None:
        self._pair, self._prompt, self._clock = pair, prompt, clock
        self._seconds: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)

    def clear(self) -> None:
        self._seconds.clear()

    def median(self, timed: str, batch_size: int, num_draft_tokens: int, context: int) -> float:
        return median(self._seconds[timed, batch_size, num_draft_tokens, context])

    def rest(self, batch_size: int, num_draft_tokens: int) -> float:
        """Returns what whole steps take beyond their forwards; noise may make it negative."""
        forwards_s = self.median("target", batch_size, num_draft_tokens, 0)
        if num_draft_tokens:
            length, number = self.draft_forward(num_draft_tokens)
            forwards_s += number * self.median("draft", batch_size, length, 0)
        return max(self.median("step", batch_size, num_draft_tokens, 0) - forwards_s, 0.0)

    def draft_forward(self, num_draft_tokens: int) -> tuple[int, int]:
        """Returns which forward of the draft gives so many tokens, by its length, and how many.

        A pass reads about two tokens that are unread, and masks for all but the first it proposes.
        """
        return (num_draft_tokens, 1) if self._pair.is_parallel else (0, num_draft_tokens)

    def forward(self, role: Role, batch_size: int, num_draft_tokens: int, context: int) -> None:
        seconds = time_forward(
            self._pair.engines[role],
            batch_size,
            num_draft_tokens + 1,
            context=context or len(self._prompt),
        )
        self._seconds[role, batch_size, num_draft_tokens, context].append(seconds)

    def steps(self, batch_size: int, num_draft_tokens: int) -> None:
        """Times steps in which all requests draft that many tokens, and then cancels them."""
        names = [f"{number} of {batch_size}" for number in range(batch_size)]
        max_seq_len = min(engine.max_seq_len for engine in self._pair.engines.values())
        for name in names:
            self._pair.submit(
                Request(
                    request_id=name,
                    prompt_token_ids=tuple(self._prompt),
                    max_tokens=min(max_seq_len - len(self._prompt), _MOST_ANSWER_TOKENS),
                    num_draft_tokens=num_draft_tokens,
                )
            )
        times, chunks = self._time_steps(set(names))
        have_ended = any(chunk.finish_reason is not None for chunk in chunks)
        for name in names:
            self._pair.cancel(name)
        while self._pair.has_work():
            chunks += self._pair.step()
        drafted = [chunk.counts.by_draft_length for chunk in chunks if chunk.counts is not None]
        if have_ended or any(counts[num_draft_tokens] < _NUM_STEPS for counts in drafted):
            raise ServerError(
                f"{batch_size} requests never drafted {num_draft_tokens} tokens together: lower "
                "--concurrency or --max-draft-len, or raise engine.max_seq_len"
            )
        self._seconds["step", batch_size, num_draft_tokens, 0] += times

    def _time_steps(self, silent: set[str]) -> tuple[list[float], list[Chunk]]:
        """Times some steps once all requests have read their prompts and begun to answer."""
        chunks: list[Chunk] = []
        while silent and self._pair.has_work():
            chunks += self._pair.step()
            silent -= {chunk.request_id for chunk in chunks if chunk.token_ids}
        times = []
        for _ in range(_NUM_STEPS):
            start = self._clock()
            chunks += self._pair.step()
            times.append(self._clock() - start)
        return times, chunks
