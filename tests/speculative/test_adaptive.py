"""The rule is simulated: a draft whose tokens are accepted with a given probability, and given
costs.
"""

from __future__ import annotations

import random

import pytest

from specpipe.speculative.adaptive import DraftLength, StepCosts, most_draft_tokens

COSTS = StepCosts(draft_step=0.25, verify=[0.05 * n for n in range(9)])


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


def test_hopeless_draft_costs_little() -> None:
    time, _ = simulate(0.0, COSTS)
    assert time <= 1.05


def test_good_draft_is_used_in_full() -> None:
    time, lengths = simulate(0.97, COSTS)
    assert time < 0.45
    assert sorted(lengths)[len(lengths) // 2] >= 6


@pytest.mark.parametrize("acceptance", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_never_much_slower_than_without_and_close_to_the_best_fixed_length(
    acceptance: float,
) -> None:
    time, _ = simulate(acceptance, COSTS, num_tokens=20_000)
    expected = [sum(acceptance**i for i in range(k + 1)) / COSTS.time(k) for k in range(9)]
    assert time <= 1.05
    assert time <= 1.1 / max(expected)


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
