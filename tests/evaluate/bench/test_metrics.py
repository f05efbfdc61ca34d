"""The arithmetic of the benchmark, on streams whose right values were worked out by hand."""

from __future__ import annotations

import pytest

from specpipe.evaluate.bench.metrics import (
    AcceptanceTotals,
    Distribution,
    LatencyLimits,
    Timing,
    summarize,
    time_answer,
)
from specpipe.evaluate.endpoints.base import Usage
from tests.evaluate.bench.recorded import answer, load

# Six tokens: one at 0.2 s, three at 0.3 s, two at 0.5 s; the stream was over at 0.6 s.
SHORT_FIRST = answer(10.0, [(10.2, 1), (10.3, 3), (10.5, 2)], 10.6)
# Five tokens: four at 0.4 s, one at 0.5 s.
LONG_FIRST = answer(11.0, [(11.4, 4), (11.5, 1)], 11.6)
CUT = answer(12.0, [(12.1, 1)], 12.8, ending="cut")


def near(value: float) -> object:
    return pytest.approx(value, abs=1e-9)


def test_times_are_of_outputs_only() -> None:
    """What opens and what ends a stream has no part in them."""
    timing = time_answer(SHORT_FIRST)
    assert timing == Timing(
        num_output_tokens=6,
        latency_s=near(0.5),  # type: ignore[arg-type]
        first_output_s=near(0.2),  # type: ignore[arg-type]
        num_first_tokens=1,
        gaps_s=(near(0.1), near(0.2)),  # type: ignore[arg-type]
    )
    assert timing.decode_s == near(0.3)
    assert timing.num_decoded_tokens == 5
    assert timing.output_token_s == near(0.06)


def test_the_time_per_output_token_leaves_out_all_tokens_of_the_first_output() -> None:
    """One token in 0.1 s; over five tokens less one it would be 0.025 s, four times too fast."""
    timing = time_answer(LONG_FIRST)
    assert timing.num_decoded_tokens == 1
    assert timing.output_token_s == near(0.1)


def test_the_servers_total_wins_over_its_pieces() -> None:
    """Of the six tokens told at the end one had no text, and came with the second output."""
    timing = time_answer(answer(0.0, [(0.2, 1), (0.4, 4)], 0.5, usage=Usage(num_output_tokens=6)))
    assert timing.num_output_tokens == 6
    assert timing.output_token_s == near(0.04)


def test_what_the_server_does_not_tell_is_counted_by_the_tokenizer() -> None:
    """Text "abc" is three letters, here two tokens each; the first output has one letter."""
    untold = answer(0.0, [(0.2, None), (0.3, None), (0.6, None)], 0.6)
    timing = time_answer(untold, lambda text: 2 * len(text))
    assert (timing.num_output_tokens, timing.num_first_tokens) == (6, 2)
    assert timing.output_token_s == near(0.1)
    assert time_answer(untold).num_output_tokens is None
    assert time_answer(untold).output_token_s is None


def test_without_a_count_of_the_first_output_it_is_taken_for_one_token() -> None:
    untold = answer(0.0, [(0.2, None), (0.6, None)], 0.6, usage=Usage(num_output_tokens=5))
    assert time_answer(untold).output_token_s == near(0.1)


def test_one_output_has_no_time_per_token_and_no_gap() -> None:
    timing = time_answer(answer(0.0, [(0.2, 3)], 0.3))
    assert (timing.output_token_s, timing.gaps_s, timing.num_decoded_tokens) == (None, (), 0)


def test_an_answer_without_output_has_no_first_one() -> None:
    timing = time_answer(answer(5.0, [], 5.25, usage=Usage(num_output_tokens=0)))
    assert timing == Timing(num_output_tokens=0, latency_s=0.25)
    assert timing.output_token_s is None


def test_a_summary_of_two_streams() -> None:
    """Three answers took two streams 0.6 + 0.6 + 0.8 = 2.0 s, so 1.0 s by the clock.

    11 tokens in 1.0 s; two whole answers in 1.0 s. Time per output token: (0.3 + 0.1) / (5 + 1).
    """
    found = summarize([load(SHORT_FIRST, LONG_FIRST, concurrency=2), load(CUT, concurrency=2)])
    assert (found.num_answers, found.num_complete, found.num_failed, found.num_cut) == (3, 2, 0, 1)
    assert found.errors == {"it broke off": 1}
    assert found.num_output_tokens == 11
    assert found.output_tokens_per_s == near(11.0)
    assert found.answers_per_s == near(2.0)
    assert found.output_token_s is not None and found.first_output_s is not None
    assert found.output_token_s.mean == near(0.4 / 6)
    assert found.output_token_s.p50 == near(0.08)
    assert found.first_output_s.mean == near(0.3)
    assert found.gap_s is not None
    assert (found.gap_s.mean, found.gap_s.max) == (near(0.4 / 3), near(0.2))
    assert found.tokens_counted_by == "server"


def test_failed_and_cut_answers_are_counted_and_never_averaged_in() -> None:
    """The failed one lasted ten seconds: times stay, and the rate tells of the stream it held."""
    failed = answer(20.0, [], 30.0, ending="failed")
    alone, together = summarize([load(SHORT_FIRST)]), summarize([load(SHORT_FIRST, failed)])
    assert (together.num_failed, together.num_cut, together.num_complete) == (1, 0, 1)
    for name in ("first_output_s", "output_token_s", "gap_s", "latency_s", "num_output_tokens"):
        assert getattr(together, name) == getattr(alone, name)
    assert alone.output_tokens_per_s == near(10.0)  # 6 tokens in 0.6 s
    assert together.output_tokens_per_s == near(6 / 10.6)


def test_nothing_complete_gives_no_times() -> None:
    found = summarize([load(CUT)]).to_json()
    assert found["first_output_ms"] is found["output_token_ms"] is found["latency_ms"] is None
    assert (found["num_output_tokens"], found["output_tokens_per_s"]) == (0, 0.0)
    assert found["acceptance"] is None


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        (LatencyLimits(), 2),
        (LatencyLimits(first_output_s=0.41), 2),
        (LatencyLimits(first_output_s=0.3), 1),
        (LatencyLimits(output_token_s=0.08), 1),
        (LatencyLimits(first_output_s=0.3, output_token_s=0.05), 0),
    ],
)
def test_goodput_is_of_answers_within_the_limits(limits: LatencyLimits, num_good: int) -> None:
    """Two answers held one stream for 1.2 s."""
    found = summarize([load(SHORT_FIRST, LONG_FIRST)], limits=limits)
    assert found.good_answers_per_s == near(num_good / 1.2)


def test_an_unknown_number_of_tokens_gives_no_rate() -> None:
    """Rather than one that leaves out whom nobody counted."""
    untold = answer(0.0, [(0.2, None)], 0.4)
    found = summarize([load(SHORT_FIRST, untold)])
    assert (found.num_output_tokens, found.output_tokens_per_s) == (None, None)
    assert found.tokens_counted_by == "nobody"
    counted = summarize([load(SHORT_FIRST, untold)], count_tokens=len)
    assert counted.num_output_tokens == 7
    assert counted.tokens_counted_by == "tokenizer"


def test_loads_of_several_concurrencies_are_not_added_up() -> None:
    with pytest.raises(ValueError, match="too many values to unpack"):
        summarize([load(CUT, concurrency=1), load(CUT, concurrency=2)])


def test_percentiles_are_interpolated() -> None:
    """Of 1, 2, 3, 4, 10 the ninth tenth lies 0.6 of the way from 4 to 10."""
    found = Distribution.of([4.0, 1.0, 10.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.p50, found.p90, found.max) == (4.0, 3.0, near(7.6), 10.0)
    assert found.p99 == near(9.76)
    assert Distribution.of([]) is None


def test_acceptance_of_four_steps() -> None:
    """Drafted 4, 4, 2, 0; accepted 4, 1, 0, 0.

    Half of what was drafted, not of 4 × 4; 2.25 tokens a step over all four; the step without a
    draft is in no histogram.
    """
    usage = Usage(
        num_output_tokens=9,
        num_steps=4,
        total_draft_tokens=10,
        total_accepted_draft_tokens=5,
        acceptance_histogram=(1, 1, 0, 0, 1),
    )
    found = AcceptanceTotals.of([usage])
    assert found is not None
    assert found.to_json() == {
        "rate": 0.5,
        "length": 2.25,
        # Of three steps with a draft two accepted its first token, one those after it.
        "per_position": (near(2 / 3), near(1 / 3), near(1 / 3), near(1 / 3)),
        "histogram": (1, 1, 0, 0, 1),
        "num_draft_tokens": 10,
        "num_accepted_tokens": 5,
        "num_steps": 4,
    }


def test_acceptance_adds_up_tokens_and_not_rates() -> None:
    """3 of 4 and 1 of 12: together 4 of 16, whereas the mean of the rates is 0.42."""
    found = AcceptanceTotals.of(
        [
            Usage(total_draft_tokens=4, total_accepted_draft_tokens=3, num_steps=2),
            Usage(total_draft_tokens=12, total_accepted_draft_tokens=1, num_steps=6),
        ]
    )
    assert found is not None
    assert (found.rate, found.length, found.histogram) == (0.25, 1.5, None)


def test_nothing_drafted_has_no_rate() -> None:
    found = AcceptanceTotals.of(
        [Usage(total_draft_tokens=0, total_accepted_draft_tokens=0, num_steps=3)]
    )
    assert found is not None
    assert (found.rate, found.length, found.per_position) == (None, 1.0, None)


def test_histograms_of_different_lengths_are_added_up() -> None:
    found = AcceptanceTotals.of(
        [
            Usage(
                total_draft_tokens=4,
                total_accepted_draft_tokens=3,
                acceptance_histogram=(1, 0, 0, 1),
            ),
            Usage(total_draft_tokens=2, total_accepted_draft_tokens=1, acceptance_histogram=(1, 1)),
        ]
    )
    assert found is not None
    assert (found.histogram, found.num_steps, found.length) == ((2, 1, 0, 1), None, None)


@pytest.mark.parametrize(
    "usages",
    [
        [],
        [None],
        [Usage(num_output_tokens=3)],
        [Usage(total_draft_tokens=4, total_accepted_draft_tokens=1), None],
    ],
)
def test_acceptance_that_not_every_answer_tells_is_unknown(usages: list[Usage | None]) -> None:
    assert AcceptanceTotals.of(usages) is None
