"""Case A7 and its kind: recorded streams, and logits whose margins were worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from specpipe.evaluate.verification.verdict import (
    IDENTICAL,
    FirstDifference,
    GreedyChoice,
    Stream,
    StreamComparison,
    TieThreshold,
    compare,
    unit_in_last_place,
    worst,
)

BF16 = TieThreshold(dtype="bfloat16")
END = frozenset({2})


def choice_at(**logits: float) -> Callable[[int], GreedyChoice]:
    """Logits of ids, as `t40=7.8125`, wherever it is asked; every other one is -5."""
    row = np.full(100, -5.0)
    for name, value in logits.items():
        row[int(name[1:])] = value
    return lambda position: GreedyChoice(row)


def never(position: int) -> GreedyChoice:
    raise AssertionError(f"position {position} was scored without need")


def stream(*token_ids: int, finish_reason: str | None = "length") -> Stream:
    return Stream(token_ids, finish_reason)


SHARED = (10, 11, 12, 13, 14, 15, 16, 17, 18)


def test_equal_streams_are_identical_and_need_no_score() -> None:
    assert compare(stream(*SHARED), stream(*SHARED), never, BF16) == IDENTICAL


def test_case_a7_a_equal_logits_are_a_tie() -> None:
    found = compare(
        stream(*SHARED, 40, 50, 51), stream(*SHARED, 41, 60, 61),
        choice_at(t40=7.8125, t41=7.8125), BF16,
    )  # fmt: skip
    assert found == StreamComparison(
        "tie",
        FirstDifference(
            position=9, expected_id=40, found_id=41, margin=0.0, in_ulps=0.0, threshold=0.03125
        ),
    )


def test_case_a7_b_one_step_of_bfloat16_is_a_tie() -> None:
    """At 7.8125 = 2^2 · 1.953125 the step of bfloat16 is 2^(2 - 7) = 0.03125."""
    found = compare(
        stream(*SHARED, 40, 50), stream(*SHARED, 41, 60),
        choice_at(t40=7.8125, t41=7.78125), BF16,
    )  # fmt: skip
    assert found == StreamComparison(
        "tie",
        FirstDifference(
            position=9, expected_id=40, found_id=41, margin=0.03125, in_ulps=1.0, threshold=0.03125
        ),
    )


def test_case_a7_c_a_wide_margin_is_a_fault() -> None:
    """At 9.5 the step is 2^(3 - 7) = 0.0625; 9.5 - 6 = 3.5 are 56 of them."""
    found = compare(
        stream(*SHARED[:4], 40, 50, 51), stream(*SHARED[:4], 41, 60, 61),
        choice_at(t40=9.5, t41=6.0), BF16,
    )  # fmt: skip
    assert found == StreamComparison(
        "fault",
        FirstDifference(
            position=4, expected_id=40, found_id=41, margin=3.5, in_ulps=56.0, threshold=0.0625
        ),
        "position 4: 41 instead of 40, margin 3.5 = 56 units in the last place (threshold 0.0625)",
    )


@pytest.mark.parametrize(
    ("expected", "found"), [(SHARED, SHARED[:5]), (SHARED[:5], SHARED)], ids=["short", "long"]
)
def test_case_a7_d_a_stream_that_just_ends_is_a_fault(
    expected: tuple[int, ...], found: tuple[int, ...]
) -> None:
    comparison = compare(stream(*expected), stream(*found), never, BF16, END)
    assert comparison.verdict == "fault"
    assert comparison.reason == "a stream just ends at position 5, without an end id"
    assert comparison.divergence is not None and comparison.divergence.position == 5


def test_an_end_id_within_the_threshold_is_a_tie() -> None:
    found = compare(
        stream(*SHARED), stream(*SHARED[:5], finish_reason="stop"),
        choice_at(t15=7.8125, t2=7.78125), BF16, END,
    )  # fmt: skip
    assert found.verdict == "tie"
    assert found.divergence is not None
    assert (found.divergence.expected_id, found.divergence.found_id) == (15, None)
    assert str(found.divergence).startswith("position 5: an end instead of 15, margin 0.03125")


def test_the_best_of_several_end_ids_counts() -> None:
    found = compare(
        stream(*SHARED), stream(*SHARED[:5], finish_reason="stop"),
        choice_at(t15=7.8125, t2=1.0, t3=7.8125), BF16, frozenset({2, 3}),
    )  # fmt: skip
    assert found.verdict == "tie"


def test_an_end_id_that_is_not_likely_is_a_fault() -> None:
    found = compare(
        stream(*SHARED), stream(*SHARED[:5], finish_reason="stop"),
        choice_at(t15=7.8125, t2=1.0), BF16, END,
    )  # fmt: skip
    assert found.verdict == "fault"
    assert found.divergence is not None and found.divergence.margin == 6.8125


def test_two_tokens_that_are_close_to_each_other_but_not_to_the_best_are_a_fault() -> None:
    found = compare(
        stream(*SHARED, 40), stream(*SHARED, 41), choice_at(t30=9.0, t40=1.0, t41=1.0), BF16
    )
    assert found.verdict == "fault"
    assert found.divergence is not None and found.divergence.margin == 8.0


def test_a_token_that_can_never_be_chosen_is_a_fault_without_a_margin() -> None:
    found = compare(
        stream(*SHARED, 40), stream(*SHARED, 99), choice_at(t40=1.0, t99=-math.inf), BF16
    )
    assert found == StreamComparison(
        "fault",
        FirstDifference(position=9, expected_id=40, found_id=99),
        "position 9: 99 instead of 40, a token that the target can never choose",
    )


def test_equal_tokens_that_end_otherwise_are_a_fault() -> None:
    found = compare(stream(*SHARED), stream(*SHARED, finish_reason="stop"), never, BF16)
    assert found == StreamComparison(
        "fault", reason="equal tokens end otherwise: stop instead of length"
    )


def test_a_failed_request_is_a_fault() -> None:
    found = compare(stream(*SHARED), Stream((), None, "out of memory"), never, BF16)
    assert found == StreamComparison("fault", reason="a request failed: out of memory")


def test_the_difference_between_block_shapes_widens_the_threshold() -> None:
    threshold = TieThreshold(dtype="float32", block_difference=1e-3)
    near = compare(
        stream(*SHARED, 40), stream(*SHARED, 41), choice_at(t40=8.0, t41=7.9995), threshold
    )
    far = compare(
        stream(*SHARED, 40), stream(*SHARED, 41), choice_at(t40=8.0, t41=7.998), threshold
    )
    assert (near.verdict, far.verdict) == ("tie", "fault")


def test_a_fixed_threshold_holds_instead() -> None:
    threshold = TieThreshold(dtype="float32", block_difference=1.0, fixed=1e-4)
    assert threshold.at(1000.0) == 1e-4
    assert str(threshold) == "a margin of at most 0.0001"


@pytest.mark.parametrize(
    ("dtype", "magnitude", "step"),
    [
        ("bfloat16", 1.0, 2.0**-7),
        ("bfloat16", 7.78125, 2.0**-5),
        ("bfloat16", 9.5, 2.0**-4),
        ("float16", 1.0, 2.0**-10),
        ("float16", 9.5, 2.0**-7),
        ("float32", 1.0, 2.0**-23),
        ("float32", 9.5, 2.0**-20),
    ],
)
def test_unit_in_last_place(dtype: str, magnitude: float, step: float) -> None:
    assert unit_in_last_place(dtype, magnitude) == step


def test_the_worst_verdict_counts() -> None:
    assert worst([]) == "identical"
    assert worst(["identical", "tie"]) == "tie"
    assert worst(["fault", "tie"]) == "fault"
