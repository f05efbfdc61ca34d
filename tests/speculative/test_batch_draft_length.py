"""The rule is simulated: requests in a closed loop, a new one for each that ends, and draft tokens
that are accepted with a given probability. Costs are those of 7 B and 0.4 B on an H200; of three
draft tokens, interpolated (benchmarks/notes.md, "One draft length for a batch").
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe.speculative.adaptive import DraftLength, Prior, StepCosts, expected_tokens
from specpipe.speculative.batch_draft_length import (
    BatchDraftLength,
    Candidate,
    Choice,
    Packing,
    reading_time,
)

_PROMPT, _OUTPUT = 128, 192

COSTS = {
    1: StepCosts(0.0, [0.158 * k for k in range(9)]),
    8: StepCosts(0.0, [0.0, 0.177, 0.362, 0.6, 0.844]),
    32: StepCosts(0.0, [0.0, 0.419, 0.706, 0.9]),
    64: StepCosts(0.0, [0.0, 0.464]),
}
PLAIN = {1: 1.0, 8: 1.04, 32: 1.25, 64: 1.65}
"""What a round without draft tokens takes, in those of one stream."""

DRAFT_STEP = 0.158


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
    _num_unread: int = 0

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
        self.time += reading_time(self._num_unread, DRAFT_STEP) / PLAIN[self.num_streams]
        self._num_unread = 0
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
                Candidate(
                    r.draft_length,
                    min(most, r.num_left - 1),
                    r.is_ready,
                    r.num_unread,
                    num_read=_PROMPT,
                    num_wanted=_OUTPUT,
                )
                for r in drafting
            ],
            self.num_streams - len(drafting),
            self._costs,
            draft_step=DRAFT_STEP / PLAIN[self.num_streams],
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
        self._num_unread += request.num_unread
        request.num_unread = 0


def rate(num_streams: int, acceptances: Sequence[float], fixed: int | None = None) -> float:
    num_requests = max(4 * num_streams, 12)
    return ClosedLoop(num_streams, acceptances, fixed).run(num_requests)


def alone_by_draft_length(acceptance: float) -> float:
    """The rate of one stream by each request's own rule, which knows of no other request."""
    rng, costs, tokens, time = random.Random(0), COSTS[1], 0, 0.0
    for _ in range(12):
        draft_length, num_left = DraftLength(), _OUTPUT
        time += reading_time(_PROMPT, DRAFT_STEP)
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
    assert hopeless.run(hopeless._num_started + 32) >= 1.25 * rate(8, [0.8], 0)


def new(num: int, *, num_unread: int = 0, is_ready: bool = True) -> list[Candidate]:
    return [Candidate(DraftLength(), 4, is_ready, num_unread) for _ in range(num)]


def test_all_draft_or_none() -> None:
    good, bad = DraftLength(), DraftLength()
    for _ in range(20):
        good.observe(num_draft_tokens=2, num_accepted_tokens=2)
        bad.observe(num_draft_tokens=2, num_accepted_tokens=0)
    costs = StepCosts(0.1, [0.05 * k for k in range(9)])
    choice = BatchDraftLength().choose([Candidate(good, 4), Candidate(bad, 8)], 0, costs)
    assert choice == Choice(4, [0, 1])
    others = BatchDraftLength().choose([Candidate(good, 4), Candidate(bad, 8)], 40, costs)
    assert not others.num_draft_tokens or others.is_trial


def test_nobody_drafts_where_not_even_a_perfect_draft_would_pay() -> None:
    costs = StepCosts(1.0, [0.0] * 9)
    chooser = BatchDraftLength()
    assert all(chooser.choose(new(3), 0, costs) == Choice() for _ in range(300))


def test_a_trial_is_of_those_whose_texts_can_be_read_in_time() -> None:
    """In a hundredth of 97 rounds; the step takes 0.5, and each text but the first another 0.2."""
    dear = StepCosts(0.5, [0.0] * 9)
    bad = DraftLength()
    for _ in range(20):
        bad.observe(num_draft_tokens=1, num_accepted_tokens=0)
    candidates = [Candidate(bad, 4, True, 32) for _ in range(5)]
    choice = BatchDraftLength().choose(candidates, 0, dear, draft_step=0.1)
    assert choice == Choice(1, [0, 1, 2], is_trial=True)


def test_who_has_no_draft_is_made_ready_before_it_is_tried() -> None:
    costs, prior = StepCosts(0.2, [0.0] * 9), Prior()
    for _ in range(200):
        prior.observe(num_accepted_tokens=0, is_rejected=True)
    unread = Candidate(DraftLength(prior), 4, False, 100)
    chooser = BatchDraftLength()
    assert chooser.choose([unread], 0, costs, draft_step=0.1) == Choice(0, [0])
    ready = Candidate(unread.draft_length, 4, True, 1)
    assert chooser.choose([ready], 0, costs, draft_step=0.1) == Choice(1, [0], is_trial=True)


def test_prompts_that_the_draft_must_read_are_a_part_of_what_drafting_costs() -> None:
    """Read in five steps of 0.2 each, for two tokens, or for many."""
    costs = StepCosts(0.2, [0.0] * 9)

    def choice(num_wanted: int) -> Choice:
        candidate = Candidate(DraftLength(), 4, True, 0, num_read=100, num_wanted=num_wanted)
        return BatchDraftLength().choose([candidate], 0, costs, draft_step=0.2)

    assert choice(200) == Choice(2, [0])
    assert choice(2).is_trial


def drafting(a: float, *, limit: int = 4, copied: Sequence[float] = (1.0,)) -> Candidate:
    draft_length = DraftLength()
    for _ in range(50):
        draft_length.observe(num_draft_tokens=10, num_accepted_tokens=round(10 * a))
    return Candidate(draft_length, limit, copied=copied)


GOOD, POOR = [1.0 + 0.95 * k for k in range(9)], [1.0, 1.02, 1.03, 1.03, 1.03]
DRAFT_COSTS, COPY_COSTS = StepCosts(0.1, [0.05 * k for k in range(9)]), StepCosts(0.0, [0.05] * 9)


@pytest.mark.parametrize(
    ("candidates", "num_others", "expected"),
    [
        ([drafting(0.1, copied=GOOD)] * 2, 0, Choice(copied={0: 8, 1: 8})),
        # Who copies badly takes part without draft tokens, and takes no rows away.
        (
            [drafting(0.1, copied=GOOD), drafting(0.1, copied=POOR)],
            0,
            Choice(copied={0: 8}),
        ),
        # The draft runs for most, and one copies as many tokens as they draft.
        (
            [drafting(0.9, copied=GOOD), *[drafting(0.9, copied=POOR)] * 5],
            0,
            Choice(4, [1, 2, 3, 4, 5], {0: 4}),
        ),
        # Who has no room in the draft copies beside those that draft.
        (
            [drafting(0.9, limit=0, copied=GOOD[:3]), *[drafting(0.9)] * 5],
            0,
            Choice(4, [1, 2, 3, 4, 5], {0: 2}),
        ),
    ],
    ids=["all copy", "one copies", "one copies beside the draft", "without room"],
)
def test_who_copies_and_who_drafts(
    candidates: list[Candidate], num_others: int, expected: Choice
) -> None:
    chooser = BatchDraftLength()
    assert chooser.choose(candidates, num_others, DRAFT_COSTS, copying=COPY_COSTS) == expected


@pytest.mark.parametrize("is_ready", [True, False])
def test_what_copies_gain_is_a_part_of_what_a_trial_costs(is_ready: bool) -> None:
    """Twice as many tokens, of which a trial costs 1.3 rounds: it may once in 130. Who has to be
    read for it goes on copying.
    """
    chooser, copying = BatchDraftLength(), StepCosts(0.0, [0.0, 0.05])
    candidate = drafting(0.1, copied=[1.0, 2.1])._replace(is_ready=is_ready)
    for _ in range(96, 129):
        choice = chooser.choose([candidate], 0, DRAFT_COSTS, copying=copying)
        assert choice == Choice(copied={0: 1})
    choices = [chooser.choose([candidate], 0, DRAFT_COSTS, copying=copying) for _ in range(3)]
    tried = Choice(1, [0], is_trial=True) if is_ready else Choice(0, [0], {0: 1})
    assert tried in choices


def test_copies_that_are_worth_less_than_their_rows_are_left() -> None:
    """Of one among many that cannot copy; and where the rounds cost more."""
    one = [drafting(0.0, limit=0, copied=GOOD)]
    hopeless = StepCosts(9.0, [9.0] * 9)
    for num_others, copying, is_worth in (
        (100, StepCosts(0.0, [0.0] + [0.05] * 8), True),
        (400, StepCosts(0.0, [0.0] + [0.05] * 8), False),
        (0, StepCosts(0.0, [9.0 * k for k in range(9)]), False),
        (0, None, False),
    ):
        choice = BatchDraftLength().choose(one, num_others, hopeless, copying=copying)
        assert bool(choice.copied) == is_worth


@pytest.mark.parametrize(
    ("copied", "num_others", "times", "expected"),
    [
        # Eight rows: nobody has more than two of them, or one has eight and the others one.
        ([GOOD, POOR, POOR], 1, {8: 1.1}, {0: 8}),
        ([GOOD, GOOD, POOR], 4, {8: 1.1}, {0: 3, 1: 1}),
        ([GOOD, GOOD[:3], POOR], 4, {8: 1.1, 16: 1.15}, {0: 8, 1: 2}),
        ([GOOD, GOOD[:3], POOR], 4, {8: 1.1, 16: 9.0}, {0: 3, 1: 1}),
        ([GOOD], 9, {8: 1.0}, {}),
        ([POOR], 1, {8: 1.1}, {}),
    ],
)
def test_places_go_to_those_that_copy_best(
    copied: list[list[float]], num_others: int, times: dict[int, float], expected: dict[int, int]
) -> None:
    candidates = [drafting(0.0, limit=0, copied=c) for c in copied]
    choice = BatchDraftLength().choose(
        candidates, num_others, StepCosts(9.0, [9.0] * 9), packing=Packing(2, times)
    )
    assert choice.copied == expected


def test_gain_that_rises_with_load_is_taken() -> None:
    """As with mixtures of experts: of many rows none costs more."""
    for num in (1, 64):
        costs = StepCosts(0.0, [0.0] + [8.0 / num] * 8)
        who = [drafting(0.1, copied=GOOD)] * num
        choice = BatchDraftLength().choose(who, 0, costs, copying=costs)
        assert len(choice.copied) == (num if num == 64 else 0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_no_choice_is_expected_to_emit_less_than_another(data: st.DataObject) -> None:
    """Each draft length is tried by hand: all copy, draft or do neither, whatever is best."""
    four = st.lists(st.floats(0, 1), min_size=4, max_size=4)

    def costs() -> StepCosts:
        return StepCosts(0.0, [0.0, *sorted(data.draw(four))])

    def expected_of(chances: list[float]) -> list[float]:
        return [1.0, *(1.0 + np.cumsum(np.cumprod(chances)))]

    copied = data.draw(st.lists(four.map(expected_of), min_size=1, max_size=5))
    acceptances = data.draw(st.lists(st.sampled_from([0.0, 0.5, 0.9]), min_size=len(copied)))
    candidates = [drafting(a, copied=c) for a, c in zip(acceptances, copied, strict=False)]
    copying, drafting_alone = costs(), costs()
    # A round in which the draft runs takes no less than one without it.
    times = zip(copying.verify, drafting_alone.verify, strict=True)
    with_draft = StepCosts(0.0, [sum(both) for both in times])
    choice = BatchDraftLength().choose(candidates, 2, with_draft, copying=copying)
    if choice.is_trial:
        return

    def drafted(c: Candidate, k: int) -> float:
        return expected_tokens(c.draft_length.acceptance_probability, k)

    rates = [1.0]
    for k in range(1, 5):
        for cost, best in (
            (copying, [c.copied[k] for c in candidates]),
            (with_draft, [max(c.copied[k], drafted(c, k)) for c in candidates]),
        ):
            rates.append((sum(best) + 2) / cost.time(k) / (len(candidates) + 2))
    num_tokens = 2.0
    for place, c in enumerate(candidates):
        if place in choice.who:
            num_tokens += drafted(c, choice.num_draft_tokens)
        else:
            num_tokens += c.copied[choice.copied.get(place, 0)]
    longest = max([choice.num_draft_tokens, *choice.copied.values()])
    cost = with_draft if choice.who else copying
    found = num_tokens / cost.time(longest) / (len(candidates) + 2)
    assert found >= 0.9 * max(rates)
