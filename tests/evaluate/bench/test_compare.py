from __future__ import annotations

import random

import pytest

pytest.importorskip("scipy")

from specpipe.evaluate.bench.compare import RateComparison, compare, verdict  # noqa: E402
from specpipe.evaluate.endpoints.base import Ending, TimedAnswer  # noqa: E402
from tests.evaluate.bench.recorded import answer  # noqa: E402


def took(
    seconds: float, num_tokens: int | None, *, ending: Ending = "complete", text: str = "a"
) -> TimedAnswer:
    """An answer that took so long, with all its tokens in one output."""
    return answer(0.0, [(seconds, num_tokens)], seconds, ending=ending, text=text)


def at(concurrency: int, ratio: float, low: float | None, high: float | None) -> RateComparison:
    return RateComparison(
        concurrency=concurrency,
        ratio=ratio,
        low=low,
        high=high,
        num_prompts=9,
        num_differing_prompts=0,
    )


def test_the_ratio_is_that_of_tokens_per_second_over_all_prompts() -> None:
    """30 tokens in 6 s before, 40 in 4 s after: 10 over 5. The prompts: 2 and 2.67, mean 2.33.

    The first round: 15 tokens in 3.4 s, 18 in 2 s; the second: 15 in 2.6 s, 22 in 2 s.
    """
    baseline = {"a": [took(0.9, 10), took(1.1, 10)], "b": [took(2.5, 5), took(1.5, 5)]}
    side = {"a": [took(0.4, 10), took(0.6, 10)], "b": [took(1.6, 8), took(1.4, 12)]}
    found = compare(baseline, side, concurrency=4)
    assert found is not None
    assert found.ratio == pytest.approx(2.0)
    assert found.round_ratios == pytest.approx((2.04, 22 / 2 * 2.6 / 15))
    assert (found.concurrency, found.num_prompts) == (4, 2)


def test_a_round_that_was_disturbed_widens_the_interval() -> None:
    """Eight prompts, alike: 2 s each before, 0.9 s after, but 4 s where the machine was busy.

    No draw of prompts tells of that: 6 s before, 5.8 s after. The rounds do: 2 / 0.9 and 2 / 4.
    """
    baseline = {str(n): [took(2.0, 10)] * 3 for n in range(8)}
    side = {str(n): [took(0.9, 10), took(0.9, 10), took(4.0, 10)] for n in range(8)}
    found = compare(baseline, side, concurrency=1)
    assert found is not None
    assert found.ratio == pytest.approx(6 / 5.8)
    assert (found.low, found.high) == (pytest.approx(0.5), pytest.approx(2 / 0.9))
    assert found.outcome == "no difference"


def test_a_prompt_with_an_answer_that_is_not_complete_is_left_out_on_both_sides() -> None:
    baseline = {name: [took(2.0, 10)] for name in "abcd"}
    side = {
        "a": [took(1.0, 10)],
        "b": [took(0.1, 10), took(0.1, 10, ending="cut")],
        "c": [took(0.1, 10, ending="failed")],
        "d": [took(0.1, None)],
    }
    found = compare(baseline, side, concurrency=1)
    assert found is not None
    assert (found.ratio, found.num_prompts) == (2.0, 1)
    assert (found.low, found.high, found.outcome) == (None, None, "no difference")


def test_without_a_prompt_that_both_answered_there_is_no_comparison() -> None:
    assert compare({"a": [took(1.0, 3)]}, {"b": [took(1.0, 3)]}, concurrency=1) is None
    assert compare({"a": [took(1.0, 3)]}, {"a": []}, concurrency=1) is None
    assert compare({"a": [took(1.0, 0)]}, {"a": [took(1.0, 0)]}, concurrency=1) is None


def test_texts_that_differ_are_counted() -> None:
    baseline = {name: [took(2.0, 10), took(2.0, 10)] for name in "abc"}
    side = {
        "a": [took(1.0, 10), took(1.0, 10)],
        "b": [took(1.0, 10), took(1.0, 10, text="b")],
        "c": [took(1.0, 10, text="b"), took(1.0, 10, text="b")],
    }
    found = compare(baseline, side, concurrency=1)
    assert found is not None and found.num_differing_prompts == 2


def test_prompts_that_gain_alike_leave_no_doubt() -> None:
    """Each is twice as fast, however long it is: no draw of prompts says otherwise."""
    baseline = {str(n): [took(2.0 * n, 10)] for n in range(1, 9)}
    side = {str(n): [took(1.0 * n, 10)] for n in range(1, 9)}
    found = compare(baseline, side, concurrency=1)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(2.0), pytest.approx(2.0))
    assert found.outcome == "gain"


@pytest.mark.parametrize(
    ("num_prompts", "num_runs", "fewest", "most"),
    [(2, 60, 51, 60), (3, 60, 51, 60), (20, 200, 175, 199)],
)
def test_the_interval_covers_the_truth_as_often_as_it_says(
    num_prompts: int, num_runs: int, fewest: int, most: int
) -> None:
    """Benchmarks of so many prompts each, whose true ratio is 1.2: 95 % of intervals hold it.

    Of 200 such, 180 to 199 do in all but one case in a thousand, were it 95 %, and of 60 at least
    51; a bootstrap of 20 is a little short of that.
    """
    generator = random.Random(5)
    num_held = 0
    for _ in range(num_runs):
        baseline, side = {}, {}
        for prompt in range(num_prompts):
            seconds = generator.uniform(1.0, 3.0)  # what the prompt is like, on both sides
            baseline[str(prompt)] = [took(seconds * generator.gauss(1.0, 0.1), 100)]
            side[str(prompt)] = [took(seconds / 1.2 * generator.gauss(1.0, 0.1), 100)]
        found = compare(baseline, side, concurrency=1)
        assert found is not None and found.low is not None and found.high is not None
        num_held += found.low <= 1.2 <= found.high
    assert fewest <= num_held <= most


def test_what_prompts_have_in_common_is_no_noise() -> None:
    """Prompts from 1 to 100 s, each 10 % faster: paired, that shows with eight of them."""
    generator = random.Random(7)
    baseline, side = {}, {}
    for prompt in range(8):
        seconds = generator.uniform(1.0, 100.0)
        baseline[str(prompt)] = [took(seconds, 100)]
        side[str(prompt)] = [took(seconds / 1.1 * generator.uniform(0.98, 1.02), 100)]
    found = compare(baseline, side, concurrency=1)
    assert found is not None and found.outcome == "gain"
    assert found.low is not None and found.low > 1.06


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (1.01, 1.3, "gain"),
        (0.7, 0.99, "loss"),
        (0.9, 1.1, "no difference"),
        (1.0, 1.2, "no difference"),
        (None, None, "no difference"),
    ],
)
def test_a_gain_or_loss_takes_the_whole_interval(
    low: float | None, high: float | None, outcome: str
) -> None:
    assert at(1, 1.0, low, high).outcome == outcome


def test_the_verdict_says_where_a_gain_turns_into_a_loss() -> None:
    comparisons = [
        at(16, 0.85, 0.8, 0.9),
        at(1, 1.42, 1.35, 1.49),
        at(4, 1.18, 1.1, 1.25),
        at(8, 1.01, 0.95, 1.07),
    ]
    assert verdict(comparisons, side="speculation", baseline="the target alone") == (
        "Speculation is faster than the target alone at concurrency "
        "1 (1.42 times its rate, 95 % interval 1.35 to 1.49) and "
        "4 (1.18 times its rate, 95 % interval 1.10 to 1.25). "
        "It is slower at concurrency 16 (0.85 times its rate, 95 % interval 0.80 to 0.90). "
        "It is neither faster nor slower, as far as this run can tell, at concurrency "
        "8 (1.01 times its rate, 95 % interval 0.95 to 1.07). "
        "The gain turns into a loss between concurrency 4 and 16."
    )


def test_the_verdict_of_one_prompt_has_no_interval() -> None:
    assert verdict([at(1, 1.5, None, None)], side="b", baseline="a") == (
        "B is neither faster nor slower than a, as far as this run can tell, at concurrency "
        "1 (1.50 times its rate)."
    )


def test_a_url_begins_a_verdict_as_it_is() -> None:
    assert verdict([at(1, 1.5, 1.4, 1.6)], side="http://h:1", baseline="http://h:2") == (
        "http://h:1 is faster than http://h:2 at concurrency 1 (1.50 times its rate, "
        "95 % interval 1.40 to 1.60)."
    )


def test_without_comparisons_the_verdict_says_why() -> None:
    assert verdict([], side="b", baseline="a") == (
        "B could not be compared with a: no prompt was answered by both."
    )


def test_comparing_is_written_with_its_outcome() -> None:
    assert at(4, 1.2, 1.1, 1.3).to_json() == {
        "concurrency": 4,
        "ratio": 1.2,
        "low": 1.1,
        "high": 1.3,
        "round_ratios": (),
        "num_prompts": 9,
        "num_differing_prompts": 0,
        "confidence": 0.95,
        "outcome": "gain",
    }
