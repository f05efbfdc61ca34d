"""How many tokens to draft, or to copy from the texts, for all requests of a batch at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specpipe.speculative.adaptive import (
    MAX_PAUSE,
    TRIAL_SHARE,
    DraftLength,
    StepCosts,
    best_draft_length,
    can_pay,
)

_LEAST_GAIN = 0.1
"""Tokens that one more copied token must be expected to emit: its row is there in any case, but
what is never accepted tells others that the draft is bad.
"""

_READ_BY_STEPS, _STEPS_OF_READING, _READ_PER_STEP = 16, 5, 200
"""What the draft reads in the time of one of its steps: 16 tokens, or 200 of many after five steps.
Seen with 0.4 B on an H200.
"""


_LONGEST_FOR_NEW = 4.0
"""Pauses after a first trial, that any pause is worth to a request of which nothing is known."""

_READ_ALONE = 64
"""Requests that run while prompts are mostly read one by one: beside more they wait for each other.
A guess.
"""


def reading_time(
    num_tokens: int | npt.NDArray[np.int_], draft_step: float, *, num_texts: float = 1.0
) -> npt.NDArray[np.float64]:
    """Returns what the draft takes to read so many tokens of a text, if a step takes draft_step.

    num_texts  as many others are read with it, on average
    """
    by_prompts = _STEPS_OF_READING / num_texts + num_tokens / _READ_PER_STEP
    return draft_step * np.minimum(num_tokens / _READ_BY_STEPS, by_prompts)


class Candidate(NamedTuple):
    """A request that may draft.

    limit       draft tokens that it has use and room for, if it may draft
    is_ready    the draft has its text, but for what rounds make it read
    num_unread  tokens of its text that the draft has yet to read, in either case
    num_read    tokens that the draft reads before it drafts at all: the prompt's
    num_wanted  tokens of its answer, at most
    copied      tokens that a step should emit, by how many it copies; of none alone: it may not
    """

    draft_length: DraftLength
    limit: int
    is_ready: bool = True
    num_unread: int = 0
    num_read: int = 0
    num_wanted: int = 1
    copied: Sequence[float] | npt.NDArray[np.float64] = (1.0,)


@dataclass(frozen=True)
class Packing:
    """Rounds without the draft in which who copies much has several places, and the others one.

    rows   of a place: its draft tokens, and in the first place of each one more
    times  of rounds by their places, in plain rounds of those that take part
    """

    rows: int
    times: Mapping[int, float]


@dataclass(frozen=True)
class Choice:
    """Who drafts how many tokens in a round, each no more than its limit, and who copies.

    who     places among the candidates; those that are not ready are to be made so, and draft later
    copied  how many tokens each of the others copies, by place; those that are not there none
    """

    num_draft_tokens: int = 0
    who: Sequence[int] = ()
    copied: Mapping[int, int] = field(default_factory=dict)
    is_trial: bool = False


class BatchDraftLength:
    """Chooses one draft length for all, which should emit most in a given time.

    A draft step and the rows to verify cost nearly the same for some as for all. So in a round in
    which the draft runs all have draft tokens, those of its own or, where these promise more,
    copied ones; and in one without it as many copied ones as are worth their rows for all together.
    Each kind of round is judged by what it was measured to cost, at any load.

    Where the draft does not pay, or copies pay more, one token is drafted as a trial, by as many as
    can read their texts and draft in a hundredth of the time since the last one that failed, what
    is not copied meanwhile included. Twice as much time passes after each that fails, none after
    one at which it would pay if all were like those; for one of which nothing is known yet no more
    than four times as much as after the first.
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
        copying: StepCosts | None = None,
        packing: Packing | None = None,
        draft_step: float = 0.0,
        is_trial_under_way: bool = False,
    ) -> Choice:
        """Returns what to draft in the next round.

        num_others          take part without drafting, whatever is chosen
        copying             of rounds without the draft; None: there are none with draft tokens
        packing             of packed ones; None: there are none
        draft_step          one step of the draft for one request, in plain rounds
        is_trial_under_way  a trial was launched and has not told yet
        """
        self._since_trial += 1.0
        limit = min(max((c.limit for c in candidates), default=0), len(costs.verify) - 1)
        drafting = can_pay(limit, costs) and not is_trial_under_way
        best = _Best(candidates, num_others, draft_step)
        if drafting:
            best.draft(limit, costs)
        if copying is not None:
            best.copy(copying)
        if packing is not None:
            best.pack(packing)
        choice = best.choice()
        if choice.who:
            self._pause, self._tried = 0.0, ()
            self._since_trial = float(MAX_PAUSE)
        if choice.who or not drafting:
            return choice
        if self._tried:
            a = sum(tried.acceptance_probability for tried in self._tried) / len(self._tried)
            self._tried = ()
            if not best_draft_length(a, limit, costs):
                self._pause = min(max(2.0 * self._pause, self._next_pause), float(MAX_PAUSE))
                self._since_trial = 0.0
            elif choice.copied:  # which is better still
                self._since_trial = 0.0
        trial = self._trial(candidates, best.gain * costs.time(1) - 1.0, draft_step)
        if trial.is_trial:
            return trial
        return Choice(0, trial.who, choice.copied) if trial.who else choice

    def rest(self) -> None:
        """Counts a round for which nothing is chosen, as nothing was for the last."""
        self._since_trial += 1.0

    def _trial(self, candidates: Sequence[Candidate], time: float, draft_step: float) -> Choice:
        """Returns a trial that takes so much time besides what the draft reads, if one is due."""
        time_left = TRIAL_SHARE * self._since_trial - time
        is_due = self._since_trial >= self._pause
        is_due_to_new = self._since_trial >= min(self._pause, _LONGEST_FOR_NEW * self._next_pause)
        who: list[int] = []
        num_unread = 0
        for place in sorted(
            (
                i
                for i, c in enumerate(candidates)
                if c.limit and (is_due_to_new if c.draft_length.is_new else is_due)
            ),
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


class _Best:
    """The choice by which all together should emit most in a given time.

    That the draft reads a prompt is a part of the cost of each token that follows.
    """

    def __init__(self, candidates: Sequence[Candidate], num_others: int, draft_step: float) -> None:
        self._num_draft_tokens = 0
        self._who: Sequence[int] = ()
        self._most_copied: int | npt.NDArray[np.int_] = 0  # by each
        self._rate = float(len(candidates) + num_others)
        self._candidates, self._num_others = candidates, num_others
        lengths = [len(c.copied) for c in candidates]
        most = max(lengths, default=1)
        self._copied = np.array(
            [
                c.copied if length == most else [*c.copied, *[c.copied[-1]] * (most - length)]
                for c, length in zip(candidates, lengths, strict=True)
            ]
        ).reshape(len(candidates), most)
        self._draft_step = draft_step

    @property
    def gain(self) -> float:
        """The tokens that it emits in the time of as many without draft tokens."""
        return self._rate / max(len(self._candidates) + self._num_others, 1)

    def choice(self) -> Choice:
        """Returns the best of what was looked at."""
        return Choice(self._num_draft_tokens, self._who, self._worth_copying())

    def draft(self, limit: int, costs: StepCosts) -> None:
        """Looks at rounds with up to so many draft tokens in which the draft runs."""
        candidates = self._candidates
        a = np.array([c.draft_length.acceptance_probability for c in candidates])
        limits = np.array([c.limit for c in candidates])
        num_texts = 1.0 + len(candidates) / _READ_ALONE
        num_read = np.array([c.num_read for c in candidates])
        of_each = reading_time(num_read, self._draft_step, num_texts=num_texts)
        of_each = of_each / [c.num_wanted for c in candidates]
        lengths = np.arange(1, limit + 1)
        drafted = np.where(lengths <= limits[:, None], a[:, None] ** lengths, 0.0)
        expected = 1.0 + np.cumsum(drafted, axis=1)  # by candidate and draft length
        copied = self._copied[:, np.minimum(lengths, self._copied.shape[1] - 1)]
        reading = np.where(limits > 0, of_each, 0.0)[:, None] * expected
        copies = (copied >= 1.0 + _LEAST_GAIN) & (copied > expected - reading)
        rates = (np.where(copies, copied, expected).sum(axis=0) + self._num_others) / (
            [costs.time(k) for k in range(1, limit + 1)]
            + np.where(copies, 0.0, reading).sum(axis=0)
        )
        best = int(rates.argmax())
        who = np.flatnonzero((limits > 0) & ~copies[:, best]).tolist()
        if who and rates[best] > self._rate:
            self._rate = float(rates[best])
            self._num_draft_tokens, self._who = best + 1, who
            self._most_copied = np.where(copies[:, best], best + 1, 0)

    def copy(self, costs: StepCosts) -> None:
        """Looks at rounds without the draft."""
        most = min(self._copied.shape[1], len(costs.verify))
        rates = (self._copied.sum(axis=0)[:most] + self._num_others) / [
            costs.time(k) for k in range(most)
        ]
        best = int(rates.argmax())
        if best and rates[best] > self._rate:
            self._rate = float(rates[best])
            self._num_draft_tokens, self._who, self._most_copied = 0, (), best

    def pack(self, packing: Packing) -> None:
        """Looks at packed rounds. Places go to those for whom they are worth most."""
        num, most = len(self._candidates), self._copied.shape[1] - 1
        lengths = np.arange(packing.rows - 1, most + packing.rows, packing.rows).clip(max=most)
        by_places = self._copied[:, lengths]
        gains = np.diff(by_places, axis=1)
        order = np.argsort(-gains.ravel(), kind="stable")  # no place is worth more than one before
        totals = np.append(0.0, gains.ravel()[order].cumsum())
        totals += by_places[:, 0].sum() + self._num_others
        for places, time in packing.times.items():
            num_more = min(places - num - self._num_others, len(order))
            rate = totals[num_more] / time if num_more >= 0 else 0.0
            if rate > self._rate:
                self._rate = float(rate)
                of_each = np.bincount(order[:num_more] // max(len(lengths) - 1, 1), minlength=num)
                self._num_draft_tokens, self._who = 0, ()
                self._most_copied = lengths[of_each]

    def _worth_copying(self) -> Mapping[int, int]:
        """Returns how many tokens those copy that do."""
        gains = np.diff(self._copied, axis=1) >= _LEAST_GAIN
        lengths = np.minimum(gains.cumprod(axis=1).sum(axis=1), self._most_copied)
        return {i: length for i, length in enumerate(lengths.tolist()) if length}
