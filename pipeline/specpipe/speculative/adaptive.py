"""How many tokens to draft next: what recent acceptance gains against what drafting costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_DECAY = 0.93  # weight of an observation after each later one: a memory of some fourteen steps
_PRIOR = (3.0, 1.5)  # accepted and rejected tokens that a new request is taken to have seen
MIN_GAIN = 1.1
"""What speculation must promise: costs that nobody measures (the draft reads the prompt too, and
what the target added by itself) eat a promise of less.
"""

_MIN_PAUSE, _MAX_PAUSE = 2, 64  # tokens without drafting before the draft is tried again


Schedule = tuple[tuple[int, int], ...]
"""The most draft tokens by load: (requests that decode at least, draft tokens at most), rising."""


def most_draft_tokens(schedule: Schedule, batch_size: int) -> int | None:
    """What a schedule allows while batch_size requests decode; None where it says nothing."""
    allowed = [most for from_batch_size, most in schedule if from_batch_size <= batch_size]
    return allowed[-1] if allowed else None


@dataclass(frozen=True)
class StepCosts:
    """Times relative to one target step without draft tokens, at the present load."""

    draft_step: float
    """One step of the draft model."""
    verify: Sequence[float]
    """What verifying 0, 1, 2 ... draft tokens adds to a target step. Not a line: on a CPU, a second
    row makes a matrix product of what was a product with a vector, and costs most.
    """

    def time(self, num_draft_tokens: int) -> float:
        """The time of one draft-verify step, in plain target steps."""
        return 1.0 + num_draft_tokens * self.draft_step + self.verify[num_draft_tokens]


class DraftLength:
    """Chooses one request's draft length from its own acceptance.

    A draft token is taken to be accepted with one probability a, independently, so that K draft
    tokens emit (1 - a^(K+1)) / (1 - a) tokens on average (Leviathan et al. 2023, arXiv:2211.17192,
    eq. 1). When no K promises a gain, drafting pauses, and is tried again after a pause that
    doubles as long as the draft stays wrong.
    """

    def __init__(self) -> None:
        self._accepted, self._rejected = _PRIOR
        self._pause = _MIN_PAUSE
        self._tokens_left_in_pause = 0
        self._is_trial = False

    @property
    def acceptance_probability(self) -> float:
        """The estimate of a."""
        return self._accepted / (self._accepted + self._rejected)

    @property
    def is_trial(self) -> bool:
        """True when the last choice was one token, to see whether drafting pays again."""
        return self._is_trial

    def choose(self, limit: int, costs: StepCosts) -> int:
        """The draft length in 0 ... limit that promises most tokens in a given time."""
        if limit <= 0 or self._tokens_left_in_pause > 0:
            return 0
        if (limit + 1) / costs.time(limit) < MIN_GAIN:
            return 0  # not even a perfect draft would pay at this load
        gains = [self.expected_tokens(k) / costs.time(k) for k in range(limit + 1)]
        best = max(range(limit + 1), key=gains.__getitem__)
        self._is_trial = gains[best] < MIN_GAIN and self._pause > _MIN_PAUSE
        if self._is_trial:
            return 1
        if gains[best] >= MIN_GAIN:
            return best
        self._start_pause()
        return 0

    def expected_tokens(self, num_draft_tokens: int) -> float:
        """What a step with that many draft tokens should emit."""
        a = self.acceptance_probability
        return sum(a**i for i in range(num_draft_tokens + 1))

    def observe(self, *, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Takes in one step; num_accepted_tokens + 1 tokens were emitted."""
        if not num_draft_tokens:
            self._tokens_left_in_pause -= 1
            return
        rejected = num_accepted_tokens < num_draft_tokens
        self._accepted = self._accepted * _DECAY + num_accepted_tokens
        self._rejected = self._rejected * _DECAY + rejected
        if self._is_trial and rejected:
            self._start_pause()
        elif not rejected:
            self._pause = _MIN_PAUSE

    def _start_pause(self) -> None:
        self._tokens_left_in_pause = self._pause
        self._pause = min(2 * self._pause, _MAX_PAUSE)
