"""The rule is simulated: a draft whose tokens are accepted with a given probability, and given
costs.
"""

from __future__ import annotations

import math
import random

import pytest

from specpipe.speculative.adaptive import DraftLength, StepCosts, most_draft_tokens

COSTS = StepCosts(draft_step=0.25, verify=[0.05 * n for n in range(9)])
CHEAP = StepCosts(draft_step=0.0, verify=[0.14 * n for n in range(9)])  # 7 B and 0.4 B on an H100
DEAR = StepCosts(draft_step=0.4, verify=[0.0, 0.23, 0.26, 0.29, 0.31])  # small models on a CPU


def simulate(
    acceptance: float, costs: StepCosts, num_tokens: int = 2000, limit: int = 8
) -> tuple[float, list[int]]:
    """Time per token in plain target steps, and the draft length of each step."""
    rng = random.Random(0)
    draft_length = DraftLength()
    emitted, time, lengths = 0, 0.0, []
    while emitted < num_tokens:
        k = draft_length.choose(limit, costs)
        accepted = 0
        while accepted < k and rng.random() < acceptance:
            accepted += 1
        draft_length.observe(num_draft_tokens=k, num_accepted_tokens=accepted)
        emitted += accepted + 1
        time += costs.time(k)
        lengths.append(k)
    return time / emitted, lengths


@pytest.mark.parametrize(("costs", "limit"), [(COSTS, 8), (CHEAP, 8), (DEAR, 4)])
@pytest.mark.parametrize("num_tokens", [192, 1024])
def test_hopeless_draft_costs_little(costs: StepCosts, limit: int, num_tokens: int) -> None:
    time, _ = simulate(0.0, costs, num_tokens, limit)
    assert time <= 1.01


def lengths_of_steps(costs: StepCosts, limit: int, *, num_steps: int, right_from: int) -> str:
    """The draft length of each step: tokens are wrong in the first steps, right in all later."""
    draft_length, lengths = DraftLength(), ""
    for step in range(num_steps):
        k = draft_length.choose(limit, costs)
        accepted = k if step >= right_from else 0
        draft_length.observe(num_draft_tokens=k, num_accepted_tokens=accepted)
        lengths += str(k)
    return lengths


def test_a_trial_that_fails_is_paid_for_before_the_next() -> None:
    # It loses 0.14 of a step, 1 % of 14; then pauses double, and are no longer than 96.
    found = lengths_of_steps(CHEAP, 8, num_steps=203, right_from=999)
    assert found == "21111" + "0" * 14 + "1" + "0" * 28 + "1" + "0" * 56 + "1" + "0" * 96 + "1"
    # 0.63 of a step, 1 % of 63.
    found = lengths_of_steps(DEAR, 4, num_steps=258, right_from=999)
    assert found == "1" + "0" * 63 + "1" + "0" * 96 + "1" + "0" * 96


def test_one_right_token_after_a_pause_lets_drafting_begin_anew() -> None:
    found = lengths_of_steps(CHEAP, 8, num_steps=130, right_from=100)
    assert found == "21111" + "0" * 14 + "1" + "0" * 28 + "1" + "0" * 56 + "14" + "8" * 23


def test_a_round_that_was_under_way_when_drafting_paused_does_not_prolong_the_pause() -> None:
    draft_length = DraftLength()
    chosen = [draft_length.choose(4, DEAR) for _ in range(2)]  # the second before the first told
    assert chosen == [1, 1]
    for k in chosen:
        draft_length.observe(num_draft_tokens=k, num_accepted_tokens=0)
    for _ in range(63):
        assert draft_length.choose(4, DEAR) == 0
        draft_length.observe(num_draft_tokens=0, num_accepted_tokens=0)
    assert draft_length.choose(4, DEAR) == 1


def test_good_draft_is_used_in_full() -> None:
    time, lengths = simulate(0.97, COSTS)
    assert time < 0.45
    assert sorted(lengths)[len(lengths) // 2] >= 6


@pytest.mark.parametrize(("costs", "limit"), [(COSTS, 8), (CHEAP, 8), (DEAR, 4)])
@pytest.mark.parametrize("acceptance", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_never_much_slower_than_without_and_close_to_the_best_fixed_length(
    acceptance: float, costs: StepCosts, limit: int
) -> None:
    time, _ = simulate(acceptance, costs, 20_000, limit)
    lengths = range(limit + 1)
    expected = [sum(acceptance**i for i in range(k + 1)) / costs.time(k) for k in lengths]
    assert time <= 1.02
    assert time <= 1.03 / max(expected)


def test_expensive_draft_is_not_used() -> None:
    _, lengths = simulate(0.9, StepCosts(draft_step=2.0, verify=[0.0] * 9))
    assert sum(lengths) <= 0.05 * len(lengths)


def test_drafting_resumes_when_the_draft_becomes_right() -> None:
    draft_length = DraftLength()
    for _ in range(300):
        k = draft_length.choose(4, COSTS)
        draft_length.observe(num_draft_tokens=k, num_accepted_tokens=0)
    lengths = []
    for _ in range(300):
        k = draft_length.choose(4, COSTS)
        draft_length.observe(num_draft_tokens=k, num_accepted_tokens=k)
        lengths.append(k)
    assert lengths[-50:] == [4] * 50


def test_no_room_means_no_draft() -> None:
    assert DraftLength().choose(0, COSTS) == 0
    assert DraftLength().choose(-3, COSTS) == 0


def test_the_schedule_by_load() -> None:
    schedule = ((2, 4), (5, 1), (8, 0))
    found = {size: most_draft_tokens(schedule, size) for size in (1, 2, 4, 5, 7, 8, 99)}
    assert found == {1: None, 2: 4, 4: 4, 5: 1, 7: 1, 8: 0, 99: 0}
    assert most_draft_tokens((), 1) is None


@pytest.mark.parametrize("first", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("verify", [0.02, 0.06, 0.12])
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.8])
def test_one_estimate_serves_drafts_that_are_less_often_right_further_ahead(
    first: float, verify: float, decay: float
) -> None:
    """K of a draft whose positions are accepted less and less often, all proposed in one pass."""
    rates = [first * decay**n for n in range(8)]
    costs = StepCosts(
        draft_step=0.2, verify=[verify * n for n in range(9)], draft=[0.0, *[0.2] * 8]
    )
    rng = random.Random(0)
    draft_length = DraftLength()
    emitted, time = 0, 0.0
    while emitted < 6000:
        k = draft_length.choose(8, costs)
        accepted = 0
        while accepted < k and rng.random() < rates[accepted]:
            accepted += 1
        draft_length.observe(num_draft_tokens=k, num_accepted_tokens=accepted)
        emitted += accepted + 1
        time += costs.time(k)
    expected = [1.0]
    for k in range(1, 9):
        expected.append(expected[-1] + math.prod(rates[:k]))
    best = max(tokens / costs.time(k) for k, tokens in enumerate(expected))
    assert emitted / time > 0.94 * best
