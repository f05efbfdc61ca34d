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
    promise,
)


@dataclass(frozen=True)
class Candidate:
    """A request that may draft.

    limit       draft tokens that it has use and room for, one at least
    is_ready    the draft has its text, but for what rounds make it read
    num_unread  tokens of its text that the draft has yet to read, in either case
    """

    draft_length: DraftLength
    limit: int
    is_ready: bool = True
    num_unread: int = 0


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
    and draft in a hundredth of the time since the last trial. Twice as much time passes after each
    that fails; but one of which nothing is known yet is tried as soon as the time allows it.
    """

    def __init__(self) -> None:
        self._pause = self._next_pause = 0.0
        self._since_trial = float(MAX_PAUSE)  # in plain rounds
        self._was_tried = False

    def choose(
        self,
        candidates: Sequence[Candidate],
        num_others: int,
        costs: StepCosts,
        *,
        reading: float = 0.0,
        is_trial_under_way: bool = False,
    ) -> Choice:
        """Returns what to draft in the next round.

        num_others          take part without drafting, whatever is chosen
        reading             what the draft takes to read one token of a text, in plain rounds
        is_trial_under_way  a trial was launched and has not told yet
        """
        self._since_trial += 1.0
        limit = min(max((c.limit for c in candidates), default=0), len(costs.verify) - 1)
        lengths = range(1, limit + 1)
        can_pay = max((promise(1.0, k, costs) for k in lengths), default=0.0) >= MIN_GAIN
        if is_trial_under_way or not can_pay:
            return Choice()
        best = _best(candidates, num_others, costs, limit)
        if best:
            self._pause, self._was_tried = 0.0, False
            self._since_trial = float(MAX_PAUSE)
            return Choice(best, range(len(candidates)))
        if self._was_tried:
            self._was_tried = False
            self._pause = min(max(2.0 * self._pause, self._next_pause), float(MAX_PAUSE))
            self._since_trial = 0.0
        return self._trial(candidates, costs.time(1) - 1.0, reading)

    def _trial(self, candidates: Sequence[Candidate], step: float, reading: float) -> Choice:
        time_left = TRIAL_SHARE * self._since_trial - step
        is_due = self._since_trial >= self._pause
        who = []
        for place in sorted(
            (i for i, c in enumerate(candidates) if is_due or c.draft_length.is_new),
            key=lambda i: (not candidates[i].draft_length.is_new, candidates[i].num_unread),
        ):
            time_left -= reading * candidates[place].num_unread
            if time_left < 0:
                break
            who.append(place)
        ready = [place for place in who if candidates[place].is_ready]
        if not ready:
            return Choice(0, who)
        self._was_tried = True
        unread = sum(candidates[place].num_unread for place in ready)
        self._next_pause = (step + reading * unread) / TRIAL_SHARE
        return Choice(1, ready, is_trial=True)


def _best(candidates: Sequence[Candidate], num_others: int, costs: StepCosts, limit: int) -> int:
    """Returns the draft length in 0 ... limit at which all together should emit most."""
    a = np.array([c.draft_length.acceptance_probability for c in candidates])
    limits = np.array([c.limit for c in candidates])
    lengths = np.arange(1, limit + 1)
    drafted = np.where(lengths <= limits[:, None], a[:, None] ** lengths, 0.0).sum(axis=0)
    expected = len(candidates) + num_others + np.append(0.0, np.cumsum(drafted))
    return int((expected / [costs.time(k) for k in range(limit + 1)]).argmax())
