"""nightly/thresholds.py: what a run is judged by, each threshold on both of its sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specpipe.config.nightly import NightlyConfig
from specpipe.evaluate.nightly.record import Accepted, Run, SpeedUp, VerificationResult
from specpipe.evaluate.nightly.thresholds import is_too_slow, judge
from tests.evaluate.nightly.recorded import ASKED, good_run, next_run, speed_up

NO_LAST = "no last good run: nothing to compare with"


def reasons(run: Run, last: Run | None, **limits: Any) -> list[str]:
    return judge(run, last, NightlyConfig(**limits)).reasons


def with_acceptance(num_accepted_tokens: int) -> Run:
    counts = Accepted(num_draft_tokens=1000, num_accepted_tokens=num_accepted_tokens)
    return replace(next_run(), acceptance=counts)


def test_the_same_again_is_good() -> None:
    judged = judge(next_run(), good_run(), NightlyConfig())
    assert (judged.reasons, judged.notes) == ([], [])


def test_first_run_meets_absolute_thresholds_only() -> None:
    judged = judge(with_acceptance(10), None, NightlyConfig())
    assert (judged.reasons, judged.notes) == ([], [NO_LAST])
    assert reasons(with_acceptance(10), None, min_acceptance_rate=0.3) == [
        "acceptance rate 0.010 is under nightly.min_acceptance_rate 0.3"
    ]
    assert reasons(with_acceptance(300), None, min_acceptance_rate=0.3) == []


def test_acceptance_keeps_95_percent_of_the_last_good_run() -> None:
    # 0.95 * 540 = 513 of 1000.
    assert reasons(with_acceptance(513), good_run()) == []
    assert reasons(with_acceptance(512), good_run()) == [
        "acceptance rate 0.512 is 0.948 of the last good run's 0.540, under "
        "nightly.min_acceptance_ratio 0.95"
    ]


def test_a_last_good_run_that_accepted_nothing_is_no_measure() -> None:
    nothing = replace(good_run(), acceptance=Accepted(num_draft_tokens=1000, num_accepted_tokens=0))
    assert reasons(next_run(), nothing) == []


@pytest.mark.parametrize(
    "asked, what",
    [
        ({"prompts": "other"}, "other prompts or answer lengths"),
        ({"num_draft_tokens": 8}, "another speculation.num_draft_tokens"),
    ],
)
def test_acceptance_of_other_questions_is_not_compared(asked: dict[str, Any], what: str) -> None:
    run = replace(with_acceptance(10), asked=replace(ASKED, **asked))
    judged = judge(run, good_run(), NightlyConfig())
    assert judged.reasons == []
    assert f"acceptance is not compared with the last good run: {what}" in judged.notes


def test_a_fault_and_a_tie() -> None:
    fault = VerificationResult(
        verdict="fault", reason="greedy, K = 4, 1 at once: prompt a: bad", num_ties=0
    )
    assert reasons(replace(next_run(), verification=fault), good_run()) == [
        "verification: greedy, K = 4, 1 at once: prompt a: bad"
    ]
    tie = replace(
        next_run(), verification=VerificationResult(verdict="tie", reason=None, num_ties=2)
    )
    assert reasons(tie, good_run()) == []
    assert reasons(tie, good_run(), allow_ties=False) == [
        "verification: 2 numerical ties, and nightly.allow_ties is false"
    ]


def test_speed_is_crossed_where_the_whole_interval_is() -> None:
    run = replace(next_run(), speed_ups=[speed_up(1, 0.8, 0.7, 0.9), speed_up(8, 0.8, 0.7, 0.89)])
    assert reasons(run, None) == [
        "speed-up 0.80 (0.70 to 0.89) at concurrency 8 is under nightly.min_speed_up 0.9"
    ]
    assert is_too_slow(run, None, NightlyConfig())
    assert not is_too_slow(run, None, NightlyConfig(min_speed_up=None))


def test_speed_keeps_80_percent_of_the_last_good_run_on_the_same_machine() -> None:
    # At the lower ends of the last good run: 0.8 * 1.4 = 1.12, and 0.8 * 1.1 = 0.88.
    run = replace(
        next_run(), speed_ups=[speed_up(1, 1.05, 0.95, 1.11), speed_up(8, 0.85, 0.8, 0.89)]
    )
    assert reasons(run, good_run(), min_speed_up=None) == [
        "speed-up 1.05 (0.95 to 1.11) at concurrency 1 is 0.700 of the last good run's 1.50 (1.40 "
        "to 1.60), under nightly.min_speed_up_ratio 0.8"
    ]
    moved = replace(run, asked=replace(ASKED, machine="Epyc (4 cores)"))
    judged = judge(moved, good_run(), NightlyConfig(min_speed_up=None))
    assert judged.reasons == []
    assert judged.notes == ["speed is not compared with the last good run: another machine"]


def test_a_last_good_run_that_was_lucky_is_no_measure() -> None:
    """Where a neighbour slowed down its target alone, the interval says so, and is believed."""
    lucky = replace(good_run(), speed_ups=[speed_up(1, 2.0, 1.2, 3.0)])
    assert reasons(replace(next_run(), speed_ups=[speed_up(1, 1.0, 0.95, 1.05)]), lucky) == []


def test_a_failed_answer_is_bad_at_any_speed() -> None:
    failing = SpeedUp(
        concurrency=8,
        ratio=None,
        low=None,
        high=None,
        num_answers=32,
        num_failed=3,
        error="the queue is full",
    )
    judged = judge(replace(next_run(), speed_ups=[failing]), None, NightlyConfig())
    assert judged.reasons == ["3 of 32 answers failed at concurrency 8: the queue is full"]
    assert judged.notes == [
        "no speed-up at concurrency 8: no prompt was answered by both",
        NO_LAST,
    ]


def test_a_tenth_more_is_all_that_an_engine_may_grow() -> None:
    sizes = {"draft engine": 4_400_000, "target engine": 22_000_001, "repository": 25_000_000}
    assert reasons(replace(next_run(), sizes_bytes=sizes), good_run()) == [
        "size of the target engine is 22,000,001 bytes, 1.100 times the last good run's "
        "20,000,000, over nightly.max_size_ratio 1.1"
    ]
