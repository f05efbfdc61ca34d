"""The rule is simulated: requests in a closed loop, a new one for each that ends, and draft tokens
that are accepted with a given probability. Costs are those of 7 B and 0.4 B on an H200; of three
draft tokens, interpolated (benchmarks/notes.md, "One draft length for a batch").
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from specpipe.speculative.adaptive import DraftLength, Prior, StepCosts
from specpipe.speculative.batch_draft_length import BatchDraftLength, Candidate, Choice

_PROMPT, _OUTPUT = 128, 192

COSTS = {
    1: StepCosts(0.0, [0.158 * k for k in range(9)]),
    8: StepCosts(0.0, [0.0, 0.177, 0.362, 0.6, 0.844]),
    32: StepCosts(0.0, [0.0, 0.419, 0.706, 0.9]),
    64: StepCosts(0.0, [0.0, 0.464]),
}
READING = 0.0008
"""Plain rounds for a token that the draft reads; the rule is told less."""


@dataclass(eq=False)
class Simulated:
    acceptance: float
    draft_length: DraftLength
    num_left: int = _OUTPUT
    is_ready: bool = False
    num_unread: int = _PROMPT


@dataclass
class ClosedLoop:
    """Requests that run at the same time; rounds are told when the next one is launched already.

    fixed  the draft length of all; None: as the rule chooses
    """

    num_streams: int
    acceptances: Sequence[float]
    fixed: int | None = None
    seed: int = 0
    num_read: int = 0
    time: float = 0.0
    num_tokens: int = 0
    _under_way: list[tuple[Simulated, int, int]] = field(default_factory=list)
    _is_trial: bool = False

    def __post_init__(self) -> None:
        self._rng, self._prior = random.Random(self.seed), Prior()
        self._chooser = BatchDraftLength()
        self._costs = COSTS[self.num_streams]
        self._num_started = 0
        self._running = [self._new() for _ in range(self.num_streams)]

    def _new(self) -> Simulated:
        acceptance = self.acceptances[self._num_started % len(self.acceptances)]
        self._num_started += 1
        num_tokens = round(_OUTPUT * self._rng.uniform(0.7, 1.3))
        return Simulated(acceptance, DraftLength(self._prior), num_tokens)

    def run(self, num_requests: int) -> float:
        """Returns tokens in the time of a plain round."""
        while self._num_started < self.num_streams + num_requests:
            self._round()
        return self.num_tokens / self.time

    def _round(self) -> None:
        lengths, is_trial = self._lengths()
        self.time += self._costs.time(max(lengths.values(), default=0))
        drafted = []
        for request in self._running:
            k = lengths.get(request, 0)
            accepted = 0
            while accepted < k and self._rng.random() < request.acceptance:
                accepted += 1
            if k:
                self._read(request)
            else:
                request.num_unread += 1
            emitted = min(accepted + 1, request.num_left)
            request.num_left -= emitted
            self.num_tokens += emitted
            drafted.append((request, k, accepted))
        for request, k, accepted in self._under_way:
            request.draft_length.observe(num_draft_tokens=k, num_accepted_tokens=accepted)
        self._under_way, self._is_trial = drafted, is_trial
        self._running = [r if r.num_left else self._new() for r in self._running]

    def _lengths(self) -> tuple[dict[Simulated, int], bool]:
        most = len(self._costs.verify) - 1
        drafting = [r for r in self._running if r.num_left > 1]
        if self.fixed is not None:
            for request in drafting if self.fixed else []:
                self._read(request)
            return {r: min(self.fixed, r.num_left - 1) for r in drafting}, False
        choice = self._chooser.choose(
            [
                Candidate(r.draft_length, min(most, r.num_left - 1), r.is_ready, r.num_unread)
                for r in drafting
            ],
            self.num_streams - len(drafting),
            self._costs,
            reading=0.158 / 256,
            is_trial_under_way=self._is_trial,
        )
        lengths = {}
        for place in choice.who:
            request = drafting[place]
            if request.is_ready:
                lengths[request] = min(choice.num_draft_tokens, request.num_left - 1)
                if choice.is_trial:
                    request.draft_length.begin_trial()
            self._read(request)
        return lengths, choice.is_trial

    def _read(self, request: Simulated) -> None:
        self.num_read += not request.is_ready
        request.is_ready = True
        self.time += READING * request.num_unread
        request.num_unread = 0


def rate(num_streams: int, acceptances: Sequence[float], fixed: int | None = None) -> float:
    num_requests = max(4 * num_streams, 12)
    return ClosedLoop(num_streams, acceptances, fixed).run(num_requests)


def alone_by_draft_length(acceptance: float) -> float:
    """The rate of one stream by each request's own rule, which knows of no other request."""
    rng, costs, tokens, time = random.Random(0), COSTS[1], 0, 0.0
    for _ in range(12):
        draft_length, num_left = DraftLength(), _OUTPUT
        time += READING * _PROMPT
        while num_left:
            k = draft_length.choose(min(8, num_left - 1), costs)
            accepted = 0
            while accepted < k and rng.random() < acceptance:
                accepted += 1
            draft_length.observe(num_draft_tokens=k, num_accepted_tokens=accepted)
            num_left -= accepted + 1
            tokens += accepted + 1
            time += costs.time(k)
    return tokens / time


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_one_stream_is_as_fast_as_by_its_own_rule(acceptance: float) -> None:
    assert rate(1, [acceptance]) >= 0.98 * alone_by_draft_length(acceptance)


@pytest.mark.parametrize("num_streams", [1, 8, 32, 64])
def test_a_hopeless_draft_costs_little_at_any_load(num_streams: int) -> None:
    assert rate(num_streams, [0.0]) >= 0.98 * rate(num_streams, [0.0], 0)


def test_a_hopeless_draft_reads_few_prompts() -> None:
    loop = ClosedLoop(32, [0.0])
    loop.run(32)
    before = loop.num_read
    loop.run(192)
    assert loop.num_read - before <= 0.25 * 160


@pytest.mark.parametrize(
    ("num_streams", "acceptances"),
    [
        (8, [0.3]),
        (8, [0.7, 0.5, 0.3]),
        (8, [0.8, 0.0, 0.0, 0.0]),
        (32, [0.5]),
        (32, [0.8, 0.0]),
        (32, [0.9]),
        (64, [0.7]),
    ],
)
def test_close_to_the_best_fixed_length(num_streams: int, acceptances: list[float]) -> None:
    lengths = range(len(COSTS[num_streams].verify))
    best = max(rate(num_streams, acceptances, k) for k in lengths)
    assert rate(num_streams, acceptances) >= 0.96 * best


def test_a_draft_that_becomes_good_is_found_out() -> None:
    hopeless = ClosedLoop(8, [0.0])
    hopeless.run(40)
    hopeless.acceptances = [0.8]
    hopeless.time = hopeless.num_tokens = 0
    assert hopeless.run(hopeless._num_started + 32) >= 1.5 * rate(8, [0.8], 0)


def new(num: int, *, num_unread: int = 0, is_ready: bool = True) -> list[Candidate]:
    return [Candidate(DraftLength(), 4, is_ready, num_unread) for _ in range(num)]


def test_all_draft_or_none() -> None:
    good, bad = DraftLength(), DraftLength()
    for _ in range(20):
        good.observe(num_draft_tokens=2, num_accepted_tokens=2)
        bad.observe(num_draft_tokens=2, num_accepted_tokens=0)
    costs = StepCosts(0.1, [0.05 * k for k in range(9)])
    choice = BatchDraftLength().choose([Candidate(good, 4), Candidate(bad, 8)], 0, costs)
    assert choice == Choice(4, range(2))
    others = BatchDraftLength().choose([Candidate(good, 4), Candidate(bad, 8)], 40, costs)
    assert not others.num_draft_tokens or others.is_trial


def test_nobody_drafts_where_not_even_a_perfect_draft_would_pay() -> None:
    costs = StepCosts(1.0, [0.0] * 9)
    chooser = BatchDraftLength()
    assert all(chooser.choose(new(3), 0, costs) == Choice() for _ in range(300))


def test_a_trial_is_of_those_whose_texts_can_be_read_in_time() -> None:
    """A hundredth of 97 rounds; the trial's own step takes 0.5, and each text another 0.2."""
    dear = StepCosts(0.5, [0.0] * 9)
    bad = DraftLength()
    for _ in range(20):
        bad.observe(num_draft_tokens=1, num_accepted_tokens=0)
    candidates = [Candidate(bad, 4, True, 200) for _ in range(5)]
    choice = BatchDraftLength().choose(candidates, 0, dear, reading=0.001)
    assert choice == Choice(1, [0, 1], is_trial=True)


def test_who_has_no_draft_is_made_ready_before_it_is_tried() -> None:
    costs, prior = StepCosts(0.2, [0.0] * 9), Prior()
    for _ in range(200):
        prior.observe(num_accepted_tokens=0, is_rejected=True)
    unread = Candidate(DraftLength(prior), 4, False, 100)
    chooser = BatchDraftLength()
    assert chooser.choose([unread], 0, costs, reading=0.001) == Choice(0, [0])
    ready = Candidate(unread.draft_length, 4, True, 1)
    assert chooser.choose([ready], 0, costs, reading=0.001) == Choice(1, [0], is_trial=True)
