"""How many tokens to draft next: what recent acceptance gains against what drafting costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

# Prior, share and pauses were simulated at measured costs: benchmarks/notes.md, 12.
_DECAY = 0.97  # weight of an observation after each later one: a memory of some thirty steps
_PRIOR = (0.7, 0.5)  # accepted and rejected tokens that a new request begins with
_EXPECTED = _PRIOR[0] / sum(_PRIOR)
_PRIOR_DECAY = 0.99  # likewise, of what is expected of new requests after those of others
MIN_GAIN = 1.1
"""The least gain that a perfect draft must promise one request, and any draft a batch: costs that
are not measured (the draft reads the prompt too, and what the target added by itself) use up a
lower one. A guess.
"""

TRIAL_SHARE = 0.01
"""How much of the time trials that fail may take."""

_MIN_PAUSE, MAX_PAUSE = 4, 96  # tokens without drafting before the next trial


Schedule = tuple[tuple[int, int], ...]
"""The most draft tokens by load: (requests that decode at least, draft tokens at most), rising."""


def most_draft_tokens(schedule: Schedule, batch_size: int) -> int | None:
    """Returns the most draft tokens while batch_size requests decode; None for no limit."""
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
    seconds: float | None = None
    """Of the plain step; None where only relative times are known."""
    draft: Sequence[float] | None = None
    """What drafting 0, 1, 2 ... tokens takes; None: a step each. A draft that proposes several in
    one pass takes little more for all of them than for one.
    """

    @cached_property
    def copying(self) -> StepCosts:
        """The costs of steps whose draft tokens are copied."""
        return replace(self, draft_step=0.0, draft=None)

    def time(self, num_draft_tokens: int) -> float:
        """Returns the time of one draft-verify step, in plain target steps."""
        drafting = num_draft_tokens * self.draft_step
        if self.draft is not None:
            drafting = self.draft[num_draft_tokens]
        return 1.0 + drafting + self.verify[num_draft_tokens]


def expected_tokens(acceptance_probability: float, num_draft_tokens: int) -> float:
    """Returns the tokens that a step with K draft tokens should emit.

    Each draft token is accepted with one probability a:
    (1 - a^(K+1)) / (1 - a), Leviathan et al. 2023, arXiv:2211.17192, eq. 1.
    """
    return sum(acceptance_probability**i for i in range(num_draft_tokens + 1))


def promise(acceptance_probability: float, num_draft_tokens: int, costs: StepCosts) -> float:
    """Returns the tokens that such steps should emit in the time of a plain one."""
    return expected_tokens(acceptance_probability, num_draft_tokens) / costs.time(num_draft_tokens)


def best_draft_length(acceptance_probability: float, limit: int, costs: StepCosts) -> int:
    """Returns the draft length in 0 ... limit that promises most."""
    return max(range(limit + 1), key=lambda k: promise(acceptance_probability, k, costs))


def can_pay(limit: int, costs: StepCosts) -> bool:
    """Returns whether any draft tokens, up to limit, could pay if all of them were accepted."""
    return any(k + 1 >= MIN_GAIN * costs.time(k) for k in range(1, limit + 1))


def num_worth_copying(
    expected: Sequence[float], limit: int, costs: StepCosts, *, instead_of: float
) -> int:
    """Returns how many draft tokens, up to limit, to copy; 0 where it does not pay.

    expected    tokens that a step should emit, by how many it copies
    costs       of verifying them
    instead_of  the tokens that another kind of step promises in the time of a plain step
    """
    if limit <= 0:
        return 0
    promised = [expected[k] / costs.time(k) for k in range(limit + 1)]
    best = max(promised)
    return promised.index(best) if best > max(instead_of, MIN_GAIN) else 0


class Prior:
    """What is expected of a request that has drafted nothing yet, by those before and beside it."""

    def __init__(self) -> None:
        self._accepted, self._rejected = _PRIOR
        self.acceptance_probability = _EXPECTED
        """The estimate of a."""

    def observe(self, *, num_accepted_tokens: int, is_rejected: bool) -> None:
        """Takes in one step that drafted."""
        self._accepted = self._accepted * _PRIOR_DECAY + num_accepted_tokens
        self._rejected = self._rejected * _PRIOR_DECAY + is_rejected
        self.acceptance_probability = self._accepted / (self._accepted + self._rejected)


class DraftLength:
    """Chooses one request's draft length from its own acceptance.

    K is what should emit most in a given time. Where that is none, one token is drafted as a
    trial: a wrong one has cost time(1) - 1 target steps for nothing, and drafting pauses until that
    is a hundredth of the time, and twice as long after each further trial that fails. One
    that succeeds after a pause lets the request begin anew: what was seen before is no measure.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        """prior is of all requests of a pair; None: each begins as the first did."""
        self._prior = prior
        self._is_trial = False
        self._first_pause = _MIN_PAUSE
        self._begin()

    def _begin(self) -> None:
        self._accepted = self._rejected = 0.0
        self._doubt = sum(_PRIOR)  # the weight of what was expected
        self._pause = 0  # its length in tokens, until a trial succeeds
        self._tokens_left_in_pause = 0

    @property
    def acceptance_probability(self) -> float:
        """The estimate of a."""
        expected = _EXPECTED if self._prior is None else self._prior.acceptance_probability
        accepted = self._accepted + self._doubt * expected
        return accepted / (self._accepted + self._rejected + self._doubt)

    @property
    def is_new(self) -> bool:
        """Whether nothing of its own was observed yet."""
        return not self._accepted + self._rejected

    @property
    def is_trial(self) -> bool:
        """Whether a trial was chosen, and no step that drafted was observed since."""
        return self._is_trial

    def choose(self, limit: int, costs: StepCosts) -> int:
        """Returns the draft length in 0 ... limit that promises most tokens in a given time."""
        if limit <= 0 or self._tokens_left_in_pause > 0:
            return 0
        if (limit + 1) / costs.time(limit) < MIN_GAIN:
            return 0  # not even a perfect draft would pay at this load
        best = 0 if self._pause else best_draft_length(self.acceptance_probability, limit, costs)
        self._is_trial = best == 0
        self._first_pause = round((costs.time(1) - 1.0) / TRIAL_SHARE)
        return max(best, 1)

    def begin_trial(self) -> None:
        """Makes the next step that drafts a trial, which another decided on."""
        self._is_trial = True

    def promise(self, limit: int, costs: StepCosts) -> float:
        """Returns the tokens that drafting up to limit promises in the time of a plain step."""
        if limit <= 0 or self._pause:
            return 1.0
        a = self.acceptance_probability
        return promise(a, best_draft_length(a, limit, costs), costs)

    def observe_others(self, num_tokens: int) -> None:
        """Takes in a step that drafted nothing and emitted num_tokens."""
        self._tokens_left_in_pause -= num_tokens

    def observe(self, *, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Takes in one step; num_accepted_tokens + 1 tokens were emitted."""
        if not num_draft_tokens:
            self.observe_others(1)
            return
        rejected = num_accepted_tokens < num_draft_tokens
        if self._pause and not rejected:
            self._begin()
        self._accepted = self._accepted * _DECAY + num_accepted_tokens
        self._rejected = self._rejected * _DECAY + rejected
        self._doubt *= _DECAY
        if self._prior is not None:
            self._prior.observe(num_accepted_tokens=num_accepted_tokens, is_rejected=rejected)
        if self._is_trial and rejected:
            self._start_pause()
        self._is_trial = False

    def _start_pause(self) -> None:
        pause = max(self._first_pause, 2 * self._pause, _MIN_PAUSE)
        self._pause = self._tokens_left_in_pause = min(pause, MAX_PAUSE)
