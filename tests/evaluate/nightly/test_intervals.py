"""nightly/intervals.py: what an interval holds, and how often."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("scipy")

from specpipe.evaluate.nightly.intervals import Estimate, rate, ratio  # noqa: E402

SAME = [(30, 60), (20, 50), (45, 64), (10, 40), (31, 60), (22, 50), (40, 64), (15, 40)]


def test_nothing_changed_leaves_no_doubt() -> None:
    found = ratio(SAME, SAME, 0.95)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))


def test_a_rate_by_hand() -> None:
    """Rates 0.4 and 0.6 in turn: 0.5 ± 2.262 * 0.1054 / sqrt(10), with 9 degrees of freedom."""
    found = rate([(4, 10), (6, 10)] * 5, 0.95)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.4246, 0.5754), abs=1e-4)
    assert str(found) == "0.500 (0.425 to 0.575)"
    assert rate([(0, 0)], 0.95) is None


def test_few_prompts_are_judged_by_their_tokens() -> None:
    """0.5 ± 1.96 * 0.5 / sqrt(100), however far apart the two prompts are."""
    found = rate([(0, 50), (50, 50)], 0.95)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.402, 0.598), abs=1e-3)
    fell = ratio([(1, 40), (2, 40)], [(20, 40), (18, 40)], 0.95)
    assert fell is not None and fell.high is not None and fell.high < 0.3
    same = ratio([(20, 40), (18, 40)], [(20, 40), (18, 40)], 0.95)
    assert same is not None and same.low is not None and same.high is not None
    assert same.low < 0.8 and same.high > 1.25


def test_an_end_of_the_ratios_interval_is_where_the_difference_may_be_nothing() -> None:
    now = [(12, 60), (20, 50), (22, 64), (9, 40), (20, 60), (18, 50), (30, 64), (12, 40)]
    before = SAME
    found = ratio(now, before, 0.95)
    assert found is not None and found.low is not None and found.high is not None
    assert 0 < found.low < found.value < found.high
    for end in (found.low, found.high):
        # Student's t of the prompts' own residuals, with 7 degrees of freedom: 2.365.
        totals = np.array([*np.sum(now, axis=0), *np.sum(before, axis=0)], dtype=float)
        difference = totals[0] / totals[1] - end * totals[2] / totals[3]
        residuals = [
            (a - totals[0] / totals[1] * d) / totals[1]
            - end * (b - totals[2] / totals[3] * e) / totals[3]
            for (a, d), (b, e) in zip(now, before, strict=True)
        ]
        error = np.sqrt(8 / 7 * np.sum(np.square(residuals)))
        assert abs(difference) / error == pytest.approx(2.365, abs=1e-3)


@pytest.mark.parametrize(
    "now, before",
    [
        ([(0, 2)] * 8, [(1, 2)] * 8),  # eight tokens are to be expected
        ([(5, 40)] * 8, [(40, 40), *[(0, 40)] * 7]),  # the rate before may be none
    ],
    ids=["tokens", "a rate that may be 0"],
)
def test_too_little_has_no_interval(
    now: list[tuple[int, int]], before: list[tuple[int, int]]
) -> None:
    found = ratio(now, before, 0.95)
    assert found is not None and (found.low, found.high) == (None, None)


def test_a_rate_of_nothing_has_no_ratio_and_a_rate_that_falls_to_nothing_has() -> None:
    nothing = [(0, 60)] * 8
    assert ratio(SAME, nothing, 0.95) is None
    assert ratio(nothing, SAME, 0.95) == Estimate(value=0.0, low=0.0, high=0.0)


@pytest.mark.parametrize("true_ratio", [1.0, 0.95, 0.75])
def test_as_many_intervals_hold_the_truth_as_they_say(true_ratio: float) -> None:
    """400 pairs of runs over 16 prompts drawn anew, easy ones and hard ones, of 80 tokens each.

    At 1, chance crosses a threshold of 0.95 far more seldom than 2.5 times in 100; a decline by a
    quarter is found nearly always.
    """
    generator = np.random.default_rng(3)
    num_runs, held, crossed = 400, 0, 0
    for _ in range(num_runs):
        easy = generator.beta(5.0, 4.0, size=16)
        before = generator.binomial(80, easy)
        now = generator.binomial(80, true_ratio * easy)
        found = ratio([(a, 80) for a in now], [(a, 80) for a in before], 0.95)
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= true_ratio <= found.high
        crossed += found.high < 0.95
    assert held / num_runs == pytest.approx(0.95, abs=0.03)
    assert {1.0: crossed <= 4, 0.95: crossed <= 24, 0.75: crossed >= 360}[true_ratio], crossed
