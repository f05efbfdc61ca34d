"""nightly/thresholds.py: what a run is judged by, each threshold on both of its sides."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from specpipe.config.nightly import NightlyConfig
from specpipe.evaluate.nightly.record import Accepted, Run, SpeedUp, VerificationResult
from specpipe.evaluate.nightly.thresholds import is_too_slow, judge
from tests.evaluate.nightly.recorded import (
    ASKED,
    QUALITY,
    accepted,
    good_run,
    latency,
    next_run,
    speed_up,
)

NO_LAST = "no run before this one: nothing to compare with"


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


def test_totals_of_an_earlier_specpipe_are_compared_as_they_are() -> None:
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
        (
            {"is_parallel_draft": True},
            "another kind of draft (one pass for all tokens, or one for each)",
        ),
    ],
)
def test_acceptance_of_other_questions_is_not_compared(asked: dict[str, Any], what: str) -> None:
    run = replace(with_acceptance(10), asked=replace(ASKED, **asked))
    judged = judge(run, good_run(), NightlyConfig())
    assert judged.reasons == []
    assert f"acceptance is not compared with the last good run: {what}" in judged.notes


RATES = [0.5 + 0.02 * (number % 8) for number in range(16)]


def judged_acceptance(rates: list[float], kinds: tuple[str, ...] = ("code",)) -> list[str]:
    before = replace(good_run(), acceptance=accepted(RATES, kinds))
    run = replace(next_run(), compared_version=7, acceptance=accepted(rates, kinds))
    return reasons(run, before)


def test_a_decline_is_said_with_its_interval_and_what_it_is_compared_with() -> None:
    (reason,) = judged_acceptance([0.8 * rate for rate in RATES])
    said = re.fullmatch(
        r"acceptance rate fell to 0\.7\d\d \((0\.\d+) to (0\.\d+)\) of version 7's, from 0\.\d+ to "
        r"0\.\d+; nightly\.min_acceptance_ratio is 0\.95",
        reason,
    )
    assert said is not None and float(said[1]) < float(said[2]) < 0.95


def test_noise_is_no_decline() -> None:
    """Prompts that moved by a tenth, up and down, and one that fell by half."""
    noisy = [rate * (1.1 if number % 2 else 0.9) for number, rate in enumerate(RATES)]
    assert judged_acceptance(noisy) == []
    assert judged_acceptance([RATES[0] / 2, *RATES[1:]]) == []


def test_a_decline_of_one_kind_or_position_is_found_where_the_whole_hides_it() -> None:
    """Chat falls by a third while code gains as much; the second draft token fails."""
    kinds = ("code", "chat")
    moved = [rate * (0.67 if number % 2 else 1.3) for number, rate in enumerate(RATES)]
    assert [re.split(" fell| at ", reason)[1] for reason in judged_acceptance(moved, kinds)] == [
        "kind chat"
    ]
    before = accepted(RATES)
    later = [
        replace(p, accepted_at=(p.accepted_at[0], p.accepted_at[1] // 2)) for p in before.prompts
    ]
    # The totals are left as they were, so that the position alone tells.
    run = replace(next_run(), acceptance=replace(before, prompts=tuple(later)))
    found = reasons(run, replace(good_run(), acceptance=before))
    assert [reason.partition(" fell")[0] for reason in found] == ["acceptance rate at position 2"]


def test_quality_is_compared_on_the_same_texts() -> None:
    worse = replace(QUALITY, perplexity_ratio=1.04, mean_kl=0.026, top1_agreement=0.94)
    run = replace(next_run(), quality={"target": worse})
    assert reasons(run, good_run()) == [
        "quality of the target: perplexity by that of its plain form was 1.01, is 1.04; "
        "nightly.max_perplexity_ratio is 1.02",
        "quality of the target: mean KL to its plain form was 0.02, is 0.026; nightly.max_kl_ratio "
        "is 1.25",
        "quality of the target: top-1 agreement with its plain form was 0.96, is 0.94; "
        "nightly.min_top1_ratio is 0.99",
    ]
    within = replace(QUALITY, perplexity_ratio=1.03, mean_kl=0.0249, top1_agreement=0.951)
    assert reasons(replace(next_run(), quality={"target": within}), good_run()) == []
    others = replace(worse, measured_on="16 texts; cuda, bfloat16")
    judged = judge(replace(run, quality={"target": others}), good_run(), NightlyConfig())
    assert (judged.reasons, judged.notes) == (
        [],
        [
            "quality of the target is not compared with the last good run: another format, other "
            "texts, or another device"
        ],
    )


def test_a_wait_is_longer_where_both_intervals_say_so_on_the_same_machine() -> None:
    # The upper ends before, 22 and 60 ms, by 1.5: 33 and 90.
    run = replace(next_run(), latencies=[latency(50, 40, 33.5, 50), latency(99, 120, 89, 150)])
    assert reasons(run, good_run()) == [
        "p50 of the first token at concurrency 8 is 40.0 ms (33.5 to 50.0), 2.00 times the last "
        "good run's 20.0 ms (18.0 to 22.0); nightly.max_latency_ratio is 1.5"
    ]
    assert is_too_slow(run, good_run(), NightlyConfig())
    assert reasons(run, good_run(), max_latency_ratio=None) == []
    moved = replace(run, asked=replace(ASKED, machine="Epyc (4 cores)"))
    assert reasons(moved, good_run()) == []


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
    judged = judge(tie, good_run(), NightlyConfig())
    assert (judged.reasons, judged.notes) == (
        [],
        ["verification: the verdict of the last good run was identical, this one's is tie"],
    )
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


def test_a_draft_of_another_kind_that_accepts_less_must_be_as_fast() -> None:
    parallel = replace(
        with_acceptance(10),
        asked=replace(ASKED, is_parallel_draft=True),
        speed_ups=[speed_up(1, 1.05, 0.95, 1.11)],
    )
    assert [reason[:45] for reason in reasons(parallel, good_run())] == [
        "speed-up 1.05 (0.95 to 1.11) at concurrency 1"
    ]
    # The next one has the same kind before it, and both count.
    assert len(reasons(parallel, replace(good_run(), asked=parallel.asked))) == 2


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
