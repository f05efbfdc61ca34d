"""How many tokens to draft for all requests of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specpipe.speculative.adaptive import (
    MAX_PAUSE,
    MIN_GAIN,
    TRIAL_SHARE,
    DraftLength,
    StepCosts,
    best_draft_length,
    promise,
)

_READ_BY_STEPS, _STEPS_OF_READING, _READ_PER_STEP = 16, 5, 200
"""What the draft reads in the time of one of its steps: 16 tokens, or 200 of many after five steps.
Seen with 0.4 B on an H200.
"""


_READ_ALONE = 64
"""Requests that run while prompts are mostly read one by one: beside more they wait for each other.
A guess.
"""


def reading_time(num_tokens: int, draft_step: float, *, num_texts: float = 1.0) -> float:
    """Returns what the draft takes to read so many tokens of a text, if a step takes draft_step.

    num_texts  as many others are read with it, on average
    """
    by_prompts = _STEPS_OF_READING / num_texts + num_tokens / _READ_PER_STEP
    return draft_step * min(num_tokens / _READ_BY_STEPS, by_prompts)


@dataclass(frozen=True)
class Candidate:
    """A request that may draft.

    limit       draft tokens that it has use and room for, one at least
    is_ready    the draft has its text, but for what rounds make it read
    num_unread  tokens of its text that the draft has yet to read, in either case
    num_read    tokens that the draft reads before it drafts at all: the prompt's
    num_wanted  tokens of its answer, at most
    """

    draft_length: DraftLength
    limit: int
    is_ready: bool = True
    num_unread: int = 0
    num_read: int = 0
    num_wanted: int = 1


@dataclass(frozen=True)
class Choice:
    """Who drafts how many tokens in a round, each no more than its limit.

    who  places among the candidates; those that are not ready are to be made so, and draft later
    """

    num_draft_tokens: int = 0
    who: Sequence[int] = ()
    is_trial: bool = False


class BatchDraftLength:
    """Chooses one draft length for all, which should emit most in a given time.

    A draft step and the rows to verify cost nearly the same for some as for all, so all draft, or
    none. Where nothing pays, one token is drafted as a trial, by as many as can read their texts
    and draft in a hundredth of the time since the last one that failed. Twice as much time passes
    after each that fails, none after one at which it would pay if all were like those; and one of
    which nothing is known yet is tried as soon as the time allows it.
    """

    def __init__(self) -> None:
        self._pause = self._next_pause = 0.0
        self._since_trial = float(MAX_PAUSE)  # in plain rounds
        self._tried: Sequence[DraftLength] = ()

    def choose(
        self,
        candidates: Sequence[Candidate],
        num_others: int,
        costs: StepCosts,
        *,
        draft_step: float = 0.0,
        is_trial_under_way: bool = False,
    ) -> Choice:
        """Returns what to draft in the next round.

        num_others          take part without drafting, whatever is chosen
        draft_step          one step of the draft for one request, in plain rounds
        is_trial_under_way  a trial was launched and has not told yet
        """
        self._since_trial += 1.0
        limit = min(max((c.limit for c in candidates), default=0), len(costs.verify) - 1)
        lengths = range(1, limit + 1)
        can_pay = max((promise(1.0, k, costs) for k in lengths), default=0.0) >= MIN_GAIN
        if is_trial_under_way or not can_pay:
            return Choice()
        best = _best(candidates, num_others, costs, limit, draft_step)
        if best:
            self._pause, self._tried = 0.0, ()
            self._since_trial = float(MAX_PAUSE)
            return Choice(best, range(len(candidates)))
        if self._tried:
            a = sum(tried.acceptance_probability for tried in self._tried) / len(self._tried)
            self._tried = ()
            if not best_draft_length(a, limit, costs):
                self._pause = min(max(2.0 * self._pause, self._next_pause), float(MAX_PAUSE))
                self._since_trial = 0.0
        return self._trial(candidates, costs.time(1) - 1.0, draft_step)

    def _trial(self, candidates: Sequence[Candidate], time: float, draft_step: float) -> Choice:
        """Returns a trial that takes so much time besides what the draft reads, if one is due."""
        time_left = TRIAL_SHARE * self._since_trial - time
        is_due = self._since_trial >= self._pause
        who: list[int] = []
        num_unread = 0
        for place in sorted(
            (i for i, c in enumerate(candidates) if is_due or c.draft_length.is_new),
            key=lambda i: (not candidates[i].draft_length.is_new, candidates[i].num_unread),
        ):
            if who or not candidates[place].is_ready:  # the first is tried as if it were alone
                num_unread += candidates[place].num_unread
            if reading_time(num_unread, draft_step) > time_left:
                break
            who.append(place)
        ready = [place for place in who if candidates[place].is_ready]
        if not ready:
            return Choice(0, who)
        self._tried = [candidates[place].draft_length for place in ready]
        self._next_pause = time / TRIAL_SHARE
        return Choice(1, ready, is_trial=True)


def _best(
    candidates: Sequence[Candidate],
    num_others: int,
    costs: StepCosts,
    limit: int,
    draft_step: float,
) -> int:
    """Returns the draft length in 0 ... limit at which all together should emit most.

    That the draft reads a prompt is a part of the cost of each token that follows.
    """
    a = np.array([c.draft_length.acceptance_probability for c in candidates])
    limits = np.array([c.limit for c in candidates])
    num_texts = 1.0 + len(candidates) / _READ_ALONE
    reading = np.array(
        [
            reading_time(c.num_read, draft_step, num_texts=num_texts) / c.num_wanted
            for c in candidates
        ]
    )
    lengths = np.arange(1, limit + 1)
    drafted = np.where(lengths <= limits[:, None], a[:, None] ** lengths, 0.0)
    expected = 1.0 + np.cumsum(drafted, axis=1)  # by candidate and draft length
    rates = (expected.sum(axis=0) + num_others) / (
        [costs.time(k) for k in range(1, limit + 1)] + reading @ expected
    )
    best = int(rates.argmax())
    return best + 1 if rates[best] > len(candidates) + num_others else 0
