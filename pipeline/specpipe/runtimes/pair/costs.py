"""What a draft step and a draft token to verify cost, measured at start and while serving."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specpipe.roles import Role
from specpipe.speculative.adaptive import StepCosts

if TYPE_CHECKING:
    from specpipe.runtimes.pair.engine import Engine

_MIN_ROUNDS, _MAX_ROUNDS, _BUDGET_S = 3, 30, 2.0  # of timing at start: guesses
_CONTEXT = 256  # tokens before those that are timed: attention is a part of the costs
_DRIFT = 0.1  # how far one slower step moves a time; a faster one moves it all the way
_MAX_SLOWDOWN = 2.0  # more than this is another process at work, not a cost
_COMMON = 0.8  # of a change is that of all row counts: longer texts, a busier machine
_AGREEMENT = 1.03  # times that agree: they are some 1 % apart where nothing else runs
_OPTIMISM = 0.9995  # what a step without drafting leaves of the draft's time


class CostTable:
    """Seconds of forwards by number of rows, for both engines.

    A row is one token: B rows decode B sequences, B (K + 1) verify K draft tokens of each. A
    parallel draft proposes them in one pass of as many rows: about two unread tokens of each, and
    K - 1 masks. What else the machine does only ever adds time, so a time falls to a faster step at
    once and follows slower ones by little.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        draft: Mapping[int, float],
        target: Mapping[int, float],
        *,
        is_parallel: bool = False,
    ) -> None:
        """num_draft_tokens is the largest K that verification was timed with."""
        self._num_draft_tokens, self._is_parallel = num_draft_tokens, is_parallel
        self._rows = {"draft": sorted(draft), "target": sorted(target)}
        self._seconds = {
            "draft": [draft[n] for n in self._rows["draft"]],
            "target": [target[n] for n in self._rows["target"]],
        }

    def seconds(self, role: Role, num_rows: int) -> float:
        """Returns the time of a forward; between measurements, interpolated."""
        return float(np.interp(num_rows, self._rows[role], self._seconds[role]))

    def at(self, batch_size: int) -> StepCosts:
        """Returns the costs of drafting while batch_size requests decode."""
        num_rows = batch_size * np.arange(1, self._num_draft_tokens + 2)
        verified = np.interp(num_rows, self._rows["target"], self._seconds["target"])
        plain = float(verified[0])
        drafting = None
        if self._is_parallel:
            drafted = np.interp(num_rows[1:], self._rows["draft"], self._seconds["draft"])
            drafting = [0.0, *(drafted / plain).tolist()]
        return StepCosts(
            draft_step=self.seconds("draft", batch_size) / plain,
            verify=[max(seconds / plain - 1.0, 0.0) for seconds in verified.tolist()],
            draft=drafting,
        )

    def step_seconds(
        self, draft_lengths: Sequence[int], copied_lengths: Sequence[int] = ()
    ) -> float:
        """Returns the time of one step of a batch whose requests draft, or copy, that many tokens
        each.
        """
        batch_size = len(draft_lengths) + len(copied_lengths)
        num_rows = batch_size * (1 + max((*draft_lengths, *copied_lengths), default=0))
        if self._is_parallel:
            num_drafted = sum(length + 1 for length in draft_lengths if length)
            drafting = self.seconds("draft", num_drafted) if num_drafted else 0.0
            return self.seconds("target", num_rows) + drafting
        still_drafting = (
            sum(length > depth for length in draft_lengths)
            for depth in range(max(draft_lengths, default=0))
        )
        return self.seconds("target", num_rows) + sum(
            self.seconds("draft", num_drafting) for num_drafting in still_drafting
        )

    def favour_draft(self) -> None:
        """Takes the draft to be a little faster than it was, after a step that did not time it.

        So a draft that seemed too slow, perhaps since the machine was busy, is tried again later.
        """
        self._seconds["draft"] = [seconds * _OPTIMISM for seconds in self._seconds["draft"]]

    def observe(self, role: Role, num_rows: int, seconds: float) -> None:
        """Learns from one forward: all measurements move, those nearest to num_rows the most."""
        ratio = seconds / self.seconds(role, num_rows)
        if ratio > 1.0:
            ratio = 1.0 + _DRIFT * (min(ratio, _MAX_SLOWDOWN) - 1.0)
        rows, times = self._rows[role], self._seconds[role]
        above = min(int(np.searchsorted(rows, num_rows)), len(rows) - 1)
        below = max(above - 1, 0)
        gap = rows[above] - rows[below]
        nearness = [0.0] * len(rows)
        nearness[above] = min(max((num_rows - rows[below]) / gap, 0.0), 1.0) if gap else 1.0
        if below != above:
            nearness[below] = 1.0 - nearness[above]
        for index, near in enumerate(nearness):
            times[index] *= ratio ** (_COMMON + (1.0 - _COMMON) * near)


@dataclass(frozen=True)
class PromptCosts:
    """Seconds of launches that read prompts.

    by_width  of one by the most rows that it may have, rising, where texts begin
    per_look  more for each position that a row looks back at
    """

    by_width: Mapping[int, float]
    per_look: float = 0.0

    def seconds(self, num_rows: int, num_looks: int = 0) -> float:
        """Returns the time of so many rows, which may be several launches."""
        widest = max(self.by_width)
        num_whole, rest = divmod(num_rows, widest)
        seconds = num_whole * self.by_width[widest] + num_looks * self.per_look
        return seconds + (self.by_width[min(w for w in self.by_width if w >= rest)] if rest else 0)

    def most_within(self, seconds: float, start: int = 0) -> int:
        """Returns the width of the greatest launch behind `start` tokens that takes no longer, or
        else of the least.
        """
        fitting = [
            width for width in self.by_width if self.seconds(width, width * start) <= seconds
        ]
        return max(fitting, default=min(self.by_width))


def settled(times: Iterable[float]) -> float:
    """Returns the least of as many times as it takes for two to agree.

    What else a machine does only ever adds time.
    """
    seen: list[float] = []
    for seconds in times:
        seen = sorted([*seen, seconds])
        if len(seen) > 1 and seen[1] <= _AGREEMENT * seen[0]:
            break
    return seen[0]


@contextmanager
def timed(costs: CostTable | None, role: Role, num_rows: int | None) -> Iterator[None]:
    """Lets the costs learn from a forward of num_rows single tokens; None: not one."""
    start = time.perf_counter()
    yield
    if costs is not None and num_rows is not None:
        costs.observe(role, num_rows, time.perf_counter() - start)


def measure_costs(
    draft: Engine,
    target: Engine,
    *,
    max_batch_size: int,
    num_draft_tokens: int,
    is_parallel: bool = False,
    budget_s: float = _BUDGET_S,
) -> CostTable:
    """Times both engines on a few tokens, for about as long; their caches end empty.

    is_parallel  the draft proposes all of its tokens in one pass
    """
    sizes = sorted({1, min(max_batch_size, draft.max_batch_size, target.max_batch_size)})
    row_counts = sorted({1, 2, num_draft_tokens + 1})
    of_draft = row_counts if is_parallel else [1]
    forwards: list[tuple[Role, int, int]] = [("draft", size, n) for n in of_draft for size in sizes]
    forwards += [("target", size, n) for n in row_counts for size in sizes]
    engines: dict[Role, Engine] = {"draft": draft, "target": target}
    fastest: dict[Role, dict[int, float]] = {"draft": {}, "target": {}}
    end = time.perf_counter() + budget_s
    # In turn, so that a busy moment of the machine does not fall on one of them alone.
    for round_number in range(_MAX_ROUNDS):
        for role, size, num_tokens in forwards:
            seconds = time_forward(engines[role], size, num_tokens)
            times = fastest[role]
            times[size * num_tokens] = min(seconds, times.get(size * num_tokens, seconds))
        if round_number + 1 >= _MIN_ROUNDS and time.perf_counter() > end:
            break
    return CostTable(num_draft_tokens, fastest["draft"], fastest["target"], is_parallel=is_parallel)


def time_forward(
    engine: Engine, batch_size: int, num_tokens: int, *, context: int = _CONTEXT
) -> float:
    """Times one forward of num_tokens for each of batch_size sequences that hold context tokens."""
    context = min(context, engine.max_seq_len - num_tokens)
    context = max(most_tokens(engine, batch_size, context + num_tokens) - num_tokens, 0)
    sequences = [
        engine.allocate(prompt_length=context, max_tokens=context + num_tokens)
        for _ in range(batch_size)
    ]
    for sequence in sequences:
        engine.skip(sequence, context)
    batch = [(sequence, [0] * num_tokens) for sequence in sequences]
    start = time.perf_counter()
    logits = engine.forward(batch, [num_tokens] * batch_size)
    float(logits[0, 0])  # waits for a GPU, which was only asked so far
    seconds = time.perf_counter() - start
    for sequence in sequences:
        engine.free(sequence)
    return seconds


def most_tokens(engine: Engine, number: int, wanted: int) -> int:
    """Returns how many tokens each of so many sequences finds room for, about wanted at most.

    An engine without pages has room for all; no sequence runs meanwhile.
    """
    if engine.pages is None:
        return wanted
    num_tokens = wanted
    while num_tokens > 1 and not _fit(engine, number, num_tokens):
        num_tokens //= 2
    return num_tokens


def _fit(engine: Engine, number: int, num_tokens: int) -> bool:
    sequences: list[int] = []
    while len(sequences) < number and engine.can_admit(num_tokens):
        sequences.append(engine.allocate(prompt_length=1, max_tokens=num_tokens))
    for sequence in sequences:
        engine.free(sequence)
    return len(sequences) == number
