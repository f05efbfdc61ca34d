"""Every expected value is worked out by hand, beside it."""

from __future__ import annotations

import pytest

from specpipe.evaluate.tune.costs import LoadCosts
from specpipe.evaluate.tune.model import (
    LinearFit,
    MemoryBound,
    Prediction,
    fit_line,
    measured_tokens,
    predict,
    published_speed_up,
)
from specpipe.speculative.adaptive import expected_tokens


def test_tokens_of_the_published_model() -> None:
    assert expected_tokens(0.5, 3) == 1.875  # 1 + 1/2 + 1/4 + 1/8
    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.9, 0) == 1.0


def test_speed_up_of_the_published_model() -> None:
    # (1 - 0.8^6) / (1 - 0.8) = 3.68928 tokens in the time of 5 · 0.05 + 1 = 1.25 plain steps
    assert published_speed_up(0.8, 0.05, 5) == pytest.approx(2.951424)
    assert published_speed_up(0.8, 0.05, 0) == 1.0


def test_tokens_by_position() -> None:
    rates = (0.5, 0.5, 0.8)
    assert measured_tokens(rates, 0) == 1.0
    assert measured_tokens(rates, 1) == 1.5
    assert measured_tokens(rates, 3) == pytest.approx(1.95)  # 1 + 0.5 + 0.25 + 0.2
    assert measured_tokens((1.0, 0.0, 1.0), 3) == 2.0  # nothing comes after a sure rejection


def test_line_through_exact_points() -> None:
    line = fit_line([(1, 2.5), (2, 3.0), (9, 6.5), (40, 22.0)])
    assert (line.intercept, line.slope) == pytest.approx((2.0, 0.5))
    assert line.max_relative_error == pytest.approx(0.0, abs=1e-12)
    assert line.at(10) == pytest.approx(7.0)


def test_line_of_least_squares_through_others() -> None:
    # Means 2 and 3; slope ((-1)(-2) + 0 · (-1) + 1 · 3) / 2. At x = 1 it says 0.5 instead of 1.
    line = fit_line([(1, 1.0), (2, 2.0), (3, 6.0)])
    assert (line.intercept, line.slope) == pytest.approx((-2.0, 2.5))
    assert line.max_relative_error == pytest.approx(0.5)


def test_one_load_tells_no_slope() -> None:
    flat = LinearFit(pytest.approx(2.0), 0.0, pytest.approx(1.0))  # 2 for 1 is twice too much
    assert fit_line([(4, 1.0), (4, 3.0)]) == flat


COSTS = LoadCosts(
    batch_size=1,
    draft_s=0.1,
    verify_s={0: 1.0, 2: 1.2},
    plain_rest_s=0.1,
    drafting_rest_s=0.3,
)


def test_whole_steps_by_draft_length() -> None:
    assert COSTS.step_s(0) == pytest.approx(1.1)  # 1.0 + 0.1
    assert COSTS.step_s(1) == pytest.approx(1.4)  # 0.1 + 1.1 + 0.2
    assert COSTS.step_s(2) == pytest.approx(1.7)  # 0.2 + 1.2 + 0.3


def test_costs_round_trip() -> None:
    assert LoadCosts.from_json(COSTS.to_json()) == COSTS


def test_memory_bound_costs_are_fitted_over_all_loads() -> None:
    # Verification 0.9 + 0.1 a row; the draft 0.2 + 0.05 a row.
    costs = [
        LoadCosts(1, 0.25, {0: 1.0, 2: 1.2}, 0.0, 0.0),
        LoadCosts(4, 0.40, {0: 1.3, 2: 2.1}, 0.0, 0.0),
    ]
    fitted = MemoryBound.fit(costs)
    assert (fitted.target.intercept, fitted.target.slope) == pytest.approx((0.9, 0.1))
    assert (fitted.draft.intercept, fitted.draft.slope) == pytest.approx((0.2, 0.05))
    # Two requests, K = 1: a plain step takes 1.1, one with drafting 0.3 + 1.3.
    assert fitted.speed_up(1.5, 2, 1) == pytest.approx(1.5 * 1.1 / 1.6)


def test_a_pass_costs_the_same_however_many_tokens_it_gives() -> None:
    costs = LoadCosts(1, 0.1, {0: 1.0, 2: 1.2}, 0.1, 0.3, pass_s={1: 0.1, 2: 0.2})
    assert costs.step_s(2) == pytest.approx(1.7)  # 0.2 + 1.2 + 0.3
    assert (costs.drafting(0), costs.drafting(1)) == (0.0, pytest.approx(0.1))
    # By rows the pass takes -0.1 + 0.1 a row, of which K = 2 has three.
    fitted = MemoryBound.fit([costs])
    assert fitted.speed_up(1.75, 1, 2) == pytest.approx(1.75 * 1.0 / (0.2 + 1.2))
    two = predict(0.5, (0.5, 0.5), [costs], 2)[1]
    assert two.published == pytest.approx(1.75 / 1.2)  # all K for 0.2 plain steps


def test_predictions() -> None:
    first, second = predict(0.5, (0.5, 0.5), [COSTS], 2)
    assert first == Prediction(
        concurrency=1,
        num_draft_tokens=1,
        expected_tokens=1.5,
        published=pytest.approx(1.5 / 1.1),  # c = 0.1 / 1.0
        memory_bound=pytest.approx(1.25),  # 1.5 · 1.0 / (0.1 + 1.1)
        speed_up=pytest.approx(1.5 * 1.1 / 1.4),
    )
    assert second == Prediction(
        concurrency=1,
        num_draft_tokens=2,
        expected_tokens=1.75,
        published=pytest.approx(1.75 / 1.2),
        memory_bound=pytest.approx(1.25),  # 1.75 · 1.0 / (0.2 + 1.2)
        speed_up=pytest.approx(1.75 * 1.1 / 1.7),
    )
