"""Recorded steps, counted by hand; and steps of a real loop over models of known acceptance."""

from __future__ import annotations

import pytest

from specpipe.errors import ServerError
from specpipe.evaluate.tune.acceptance import AcceptanceEstimate, run_requests
from tests.runtimes.table_engine import make_pair
from tests.speculative.table import (
    TableModel,
    greedy_reference,
    request,
    target_rule,
    wrong_rule,
)


def test_recorded_steps() -> None:
    """Four steps: drafted 4, 4, 2, 0; accepted 4, 1, 0, 0."""
    found = AcceptanceEstimate.of([{(4, 4): 1, (4, 1): 1, (2, 0): 1, (0, 0): 1}], 4)
    assert found.num_steps == 4
    assert (found.num_draft_tokens, found.num_accepted_tokens) == (10, 5)
    # Position 1 was judged by the three steps that drafted, 2 by the two that accepted it.
    assert [(p.num_judged, p.num_accepted) for p in found.positions] == [
        (3, 2),
        (2, 1),
        (1, 1),
        (1, 1),
    ]
    assert found.rates == pytest.approx((2 / 3, 1 / 2, 1.0, 1.0))
    assert found.alpha == pytest.approx(5 / 7)  # 5 accepted, 2 rejected; 3 were never judged
    # 1 + 2/3, then 1/3 more at each further position
    assert [e.tokens for e in found.expected] == pytest.approx([5 / 3, 2.0, 7 / 3, 8 / 3])


def test_a_step_that_drafted_less_says_nothing_of_later_positions() -> None:
    found = AcceptanceEstimate.of([{(1, 1): 6, (2, 1): 1, (2, 2): 1}], 2)
    assert [(p.num_judged, p.num_accepted) for p in found.positions] == [(8, 8), (2, 1)]


def test_a_position_that_no_step_reached() -> None:
    found = AcceptanceEstimate.of([{(3, 0): 5}, {(3, 1): 1, (3, 0): 4}], 3)
    assert [p.rate for p in found.positions] == [0.1, 0.0, None]
    assert found.rates == (0.1, 0.0, 0.0)
    assert (found.positions[2].low, found.positions[2].high) == (None, None)
    assert [e.tokens for e in found.expected] == pytest.approx([1.1, 1.1, 1.1])


def test_nothing_drafted() -> None:
    found = AcceptanceEstimate.of([{(0, 0): 9}], 1)
    assert (found.num_steps, found.num_draft_tokens, found.alpha) == (9, 0, None)
    assert found.positions[0].rate is None


def test_interval_draws_prompts_and_not_steps() -> None:
    """Of two prompts, drawing two gives rates 0, 1/2 and 1, the ends a quarter of the time each;
    that there are a thousand steps of each does not make it narrower.
    """
    found = AcceptanceEstimate.of([{(1, 0): 1000}, {(1, 1): 1000}], 1)
    (position,) = found.positions
    assert (position.low, position.rate, position.high) == (0.0, 0.5, 1.0)
    (expected,) = found.expected
    assert (expected.low, expected.tokens, expected.high) == (1.0, 1.5, 2.0)


def test_prompts_that_are_alike_leave_no_doubt_and_one_prompt_no_interval() -> None:
    alike = AcceptanceEstimate.of([{(1, 0): 1, (1, 1): 3}] * 5, 1).positions[0]
    assert (alike.low, alike.high) == (0.75, 0.75)
    alone = AcceptanceEstimate.of([{(1, 0): 1, (1, 1): 3}], 1).positions[0]
    assert (alone.low, alone.high) == (None, None)


def test_steps_of_a_loop() -> None:
    """17 tokens at K = 3: always right, four steps of 4 and one token; always wrong, one each."""
    requests = [request("a"), request("b", prompt_length=5)]
    right = make_pair(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=3)
    assert run_requests(right, requests, at_once=1) == {
        name: {(3, 3): 4, (0, 0): 1} for name in "ab"
    }
    wrong = make_pair(TableModel(target_rule), TableModel(wrong_rule), num_draft_tokens=3)
    assert run_requests(wrong, requests, at_once=2) == {
        name: {(3, 0): 14, (2, 0): 1, (1, 0): 1, (0, 0): 1} for name in "ab"
    }


def test_what_was_drafted_past_the_end_was_not_judged() -> None:
    """The sixth token ends the answer: the second step judges two draft tokens of its three."""
    reference = greedy_reference(request())
    pair = make_pair(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=3)
    ended = request(end_token_ids=frozenset({reference[5]}))
    assert run_requests(pair, [ended], at_once=1) == {"r": {(3, 3): 1, (2, 2): 1}}


def test_a_failed_prompt_is_named() -> None:
    now = iter(range(0, 10_000, 100))
    pair = make_pair(
        TableModel(target_rule),
        TableModel(target_rule),
        clock=lambda: float(next(now)),
        request_timeout_s=150.0,
    )
    with pytest.raises(ServerError, match="prompt a failed: "):
        run_requests(pair, [request("a")], at_once=1)
