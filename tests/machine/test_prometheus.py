from __future__ import annotations

import pytest

from specpipe.machine.prometheus import by_labels, parse_samples, total

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
        'requests_total{model="draft",version="1"}': 3.0,
        'requests_total{model="target {x}",version="1"}': 1e6,
        "requests_total_created": 1.7e9,
        "waiting": 0.0,
    }


@pytest.mark.parametrize(
    "line", ["waiting", "waiting 1.2.3", "waiting x", "waiting 1x", "<html> 1"]
)
def test_a_line_that_is_no_sample_is_passed_over(line: str) -> None:
    assert parse_samples(line) == {}


def test_samples_are_found_and_added_by_name_and_label() -> None:
    samples = parse_samples(PAGE)
    assert by_labels(samples, "waiting") == {"": 0.0}
    assert total(samples, "requests_total") == 1_000_003.0
    assert total(samples, "requests_total", label='model="draft"') == 3.0
    assert total(samples, "waiting", "requests_total_created") == 1.7e9
    assert total(samples, "requests") is None
