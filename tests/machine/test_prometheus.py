from __future__ import annotations

import pytest

from specpipe.machine.prometheus import parse_samples, total

PAGE = """\
# HELP requests_total Requests by model
# TYPE requests_total counter
requests_total{model="draft",version="1"} 3
requests_total{model="target {x}",version="1"} 1e+06 1395066363000
requests_total_created 1.7e+09
waiting 0
"""


def test_samples_are_read_with_their_labels() -> None:
    assert parse_samples(PAGE) == {
        ("requests_total", frozenset({("model", "draft"), ("version", "1")})): 3.0,
        ("requests_total", frozenset({("model", "target {x}"), ("version", "1")})): 1e6,
        ("requests_total_created", frozenset()): 1.7e9,
        ("waiting", frozenset()): 0.0,
    }


def test_a_counter_keeps_the_name_that_the_page_has() -> None:
    """Prometheus' own parser calls it successes_total, as OpenMetrics has it; Triton does not."""
    page = "# TYPE successes counter\nsuccesses 3\n"
    assert parse_samples(page) == {("successes", frozenset()): 3.0}


@pytest.mark.parametrize(
    "line",
    [
        "waiting",
        "waiting 1.2.3",
        "waiting x",
        "waiting 1x",
        "<html> 1",
        "waiting{a=b} 1",
        'waiting{a="b",\t="c"} 1',
    ],
)
def test_a_line_that_is_no_sample_is_passed_over(line: str) -> None:
    assert parse_samples(f"{line}\nbusy 1") == {("busy", frozenset()): 1.0}


def test_samples_are_found_and_added_by_name_and_label() -> None:
    samples = parse_samples(PAGE)
    assert total(samples, "requests_total") == 1_000_003.0
    assert total(samples, "requests_total", model="draft", version="1") == 3.0
    assert total(samples, "waiting", "requests_total_created") == 1.7e9
    assert total(samples, "requests") is None
