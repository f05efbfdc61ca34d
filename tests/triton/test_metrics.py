"""The metrics: counted by hand, on the endpoint of a real Triton, and in their documentation."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specpipe.runtimes.pair.pair import KVUse, LateWork, Occupancy, Preempted
from specpipe.speculative.metrics import AcceptanceCounts
from specpipe.speculative.request import Chunk, Statistics
from specpipe.triton.client import Client
from specpipe.triton.metrics import METRIC_FAMILIES, Counters
from specpipe.triton.server.server import Server
from tests.triton.asking import settled_metrics
from tests.triton.metric_family import Metric, MetricFamily
from tests.waiting import PATIENCE_S

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"

PROMPT = "def read(path):\n"  # 6 tokens


@pytest.fixture
def made() -> Iterator[dict[str, dict[str, Metric]]]:
    MetricFamily.made.clear()
    yield MetricFamily.made
    MetricFamily.made.clear()


def values(made: dict[str, dict[str, Metric]]) -> dict[str, float]:
    """Everything that is not 0, by name and label."""
    return {
        f"{name} {value}".strip(): metric.value
        for name, by_value in made.items()
        for value, metric in by_value.items()
        if metric.value
    }


def last_chunk(*steps: tuple[int, int], queue_s: float | None = None) -> Chunk:
    """The end of a request of 7 prompt tokens with these steps: drafted and accepted tokens."""
    counts = AcceptanceCounts()
    for drafted, accepted in steps:
        counts.record(num_draft_tokens=drafted, num_accepted_tokens=accepted)
    statistics = Statistics(
        num_input_tokens=7,
        num_output_tokens=counts.num_steps + counts.num_accepted_tokens,
        num_steps=counts.num_steps,
        total_draft_tokens=counts.num_draft_tokens,
        total_accepted_draft_tokens=counts.num_accepted_tokens,
        seed_used=0,
        acceptance_rate=counts.acceptance_rate,
    )
    return Chunk(
        request_id="r",
        finish_reason="length",
        statistics=statistics,
        counts=counts,
        queue_s=queue_s,
    )


def test_a_request_is_counted_by_draft_length_and_position(
    made: dict[str, dict[str, Metric]],
) -> None:
    """Four steps: drafted 4, 4, 2, 0; accepted 4, 1, 0, 0. A position is drafted in each step that
    is as long, and accepted in each that accepted as many.
    """
    counters = Counters(MetricFamily)
    counters.begin_request()
    last = last_chunk((4, 4), (4, 1), (2, 0), (0, 0), queue_s=0.3)
    assert last.statistics is not None
    predicted = replace(last.statistics, accepted_prediction_tokens=1, rejected_prediction_tokens=3)
    counters.end_request(replace(last, statistics=predicted))
    assert values(made) == {}
    counters.report(5, Occupancy())
    assert values(made) == {
        "specpipe_requests_total length": 1,
        "specpipe_loop_steps_total": 5,
        "specpipe_input_tokens_total": 7,
        "specpipe_output_tokens_total": 9,
        "specpipe_request_steps_total": 4,
        "specpipe_request_steps_by_draft_length_total 0": 1,
        "specpipe_request_steps_by_draft_length_total 2": 1,
        "specpipe_request_steps_by_draft_length_total 4": 2,
        "specpipe_draft_tokens_total": 10,
        "specpipe_draft_tokens_by_position_total 1": 3,
        "specpipe_draft_tokens_by_position_total 2": 3,
        "specpipe_draft_tokens_by_position_total 3": 2,
        "specpipe_draft_tokens_by_position_total 4": 2,
        "specpipe_accepted_draft_tokens_total": 5,
        "specpipe_accepted_draft_tokens_by_position_total 1": 2,
        "specpipe_accepted_draft_tokens_by_position_total 2": 1,
        "specpipe_accepted_draft_tokens_by_position_total 3": 1,
        "specpipe_accepted_draft_tokens_by_position_total 4": 1,
        "specpipe_accepted_prediction_tokens_total": 1,
        "specpipe_rejected_prediction_tokens_total": 3,
    }
    assert made["specpipe_request_queue_seconds"][""].observed == [0.3]


def test_requests_between_two_reports_are_added_up_before_triton_hears_of_them(
    made: dict[str, dict[str, Metric]],
) -> None:
    counters = Counters(MetricFamily)
    for _ in range(3):
        counters.begin_request()
    counters.end_request(last_chunk((1, 1)))
    counters.end_request(last_chunk((1, 0), (1, 1)))
    counters.report(2, Occupancy(num_running=1))
    drafted = made["specpipe_draft_tokens_by_position_total"]["1"]
    assert (drafted.value, drafted.num_changes) == (3, 1)
    assert made["specpipe_requests_in_flight"][""].value == 1
    before = {name: metric.num_changes for name, metric in changes(made).items()}
    counters.report(0, Occupancy(num_running=1))
    assert {name: metric.num_changes for name, metric in changes(made).items()} == before


def changes(made: dict[str, dict[str, Metric]]) -> dict[str, Metric]:
    return {f"{n} {v}": metric for n, by_value in made.items() for v, metric in by_value.items()}


def test_a_refused_request_is_counted_as_such_alone(made: dict[str, dict[str, Metric]]) -> None:
    counters = Counters(MetricFamily)
    counters.begin_request()
    counters.end_request()
    counters.report(0, Occupancy())
    assert values(made) == {"specpipe_refused_requests_total": 1}


def test_a_request_whose_steps_nobody_knows_counts_in_the_totals(
    made: dict[str, dict[str, Metric]],
) -> None:
    counters = Counters(MetricFamily)
    counters.begin_request()
    found = last_chunk((4, 2))
    counters.end_request(
        Chunk(request_id="r", finish_reason="stop", statistics=found.statistics, counts=None)
    )
    counters.report(1, Occupancy())
    assert values(made) == {
        "specpipe_requests_total stop": 1,
        "specpipe_loop_steps_total": 1,
        "specpipe_input_tokens_total": 7,
        "specpipe_output_tokens_total": 3,
        "specpipe_request_steps_total": 1,
        "specpipe_draft_tokens_total": 4,
        "specpipe_accepted_draft_tokens_total": 2,
    }


def test_late_work_is_counted_once_and_never_falls(made: dict[str, dict[str, Metric]]) -> None:
    counters = Counters(MetricFamily)
    assert made["specpipe_kernel_compilations_after_ready_total"][""].value == 0
    late = LateWork(num_compilations=3, num_recordings=1)
    for occupancy in (
        Occupancy(late_work=late),
        Occupancy(late_work=late),
        Occupancy(),  # as that of a loop that failed
        Occupancy(late_work=replace(late, num_recordings=2)),
    ):
        counters.report(0, occupancy)
    assert values(made) == {
        "specpipe_kernel_compilations_after_ready_total": 3,
        "specpipe_graph_recordings_after_ready_total": 2,
    }


def test_what_the_pair_holds_is_set_and_falls_again(made: dict[str, dict[str, Metric]]) -> None:
    counters = Counters(MetricFamily)
    caches = {
        "draft": KVUse(11, 2048),
        "target": KVUse(40, 4096, num_cached_tokens=64, num_reused_tokens=128),
    }
    preempted = Preempted(num_requests=2, num_tokens=30)
    counters.report(
        0, Occupancy(num_running=2, num_waiting=1, kv_caches=caches, preempted=preempted)
    )
    assert values(made) == {
        "specpipe_requests_running": 2,
        "specpipe_requests_waiting": 1,
        "specpipe_kv_cache_tokens draft": 11,
        "specpipe_kv_cache_tokens target": 40,
        "specpipe_kv_cache_capacity_tokens draft": 2048,
        "specpipe_kv_cache_capacity_tokens target": 4096,
        "specpipe_kv_cache_reusable_tokens target": 64,
        "specpipe_reused_input_tokens_total target": 128,
        "specpipe_preempted_requests_total": 2,
        "specpipe_recomputed_tokens_total": 30,
    }
    caches = {"draft": KVUse(0, 2048), "target": KVUse(0, 4096)}
    counters.report(0, Occupancy(kv_caches=caches))
    assert values(made) == {
        "specpipe_kv_cache_capacity_tokens draft": 2048,
        "specpipe_kv_cache_capacity_tokens target": 4096,
        "specpipe_reused_input_tokens_total target": 128,
        "specpipe_preempted_requests_total": 2,
        "specpipe_recomputed_tokens_total": 30,
    }


def gained(server: Server, before: dict[str, float]) -> dict[str, float]:
    """By how much metrics grew, once every answer is counted."""
    after = settled_metrics(server)
    return {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if value != before.get(name, 0.0)
    }


def test_triton_counts_what_was_asked(echo_server: Server) -> None:
    """The pair drafts and accepts one token a step as long as two may come: 5 are 2 + 2 + 1."""
    before = settled_metrics(echo_server)
    with Client(echo_server.grpc_url) as client:
        client.generate(PROMPT, max_tokens=5)
        client.generate(PROMPT, max_tokens=2, num_draft_tokens=0)
    assert gained(echo_server, before) == {
        'specpipe_requests_total{finish_reason="length"}': 2,
        "specpipe_loop_steps_total": 5,
        "specpipe_responses_total": 2,
        "specpipe_input_tokens_total": 12,
        "specpipe_output_tokens_total": 7,
        "specpipe_request_steps_total": 5,
        'specpipe_request_steps_by_draft_length_total{num_draft_tokens="0"}': 3,
        'specpipe_request_steps_by_draft_length_total{num_draft_tokens="1"}': 2,
        "specpipe_draft_tokens_total": 2,
        'specpipe_draft_tokens_by_position_total{position="1"}': 2,
        "specpipe_accepted_draft_tokens_total": 2,
        'specpipe_accepted_draft_tokens_by_position_total{position="1"}': 2,
    }


def test_triton_counts_what_the_quickstart_pair_answers(quickstart_server: Server) -> None:
    before = settled_metrics(quickstart_server)
    totals: Counter[str] = Counter()
    with Client(quickstart_server.grpc_url) as client:
        for num_draft_tokens in (0, 3, 8):
            answer = client.generate(
                PROMPT, max_tokens=24, end_id=-1, num_draft_tokens=num_draft_tokens
            )
            assert answer.statistics is not None
            totals["drafted"] += answer.statistics.total_draft_tokens
            totals["accepted"] += answer.statistics.total_accepted_draft_tokens
            totals["steps"] += answer.statistics.num_steps
    found = gained(quickstart_server, before)
    assert totals["accepted"] > 0
    assert found["specpipe_output_tokens_total"] == 72
    assert found["specpipe_draft_tokens_total"] == totals["drafted"]
    assert found["specpipe_accepted_draft_tokens_total"] == totals["accepted"]
    assert found["specpipe_request_steps_total"] == totals["steps"]
    assert summed(found, "specpipe_draft_tokens_by_position_total") == totals["drafted"]
    assert summed(found, "specpipe_accepted_draft_tokens_by_position_total") == totals["accepted"]
    by_length = "specpipe_request_steps_by_draft_length_total"
    assert summed(found, by_length) == totals["steps"]
    # The one without speculation took a step for each token; another one's last step may be plain.
    assert 24 <= found[f'{by_length}{{num_draft_tokens="0"}}'] <= 26
    assert found["specpipe_request_queue_seconds_count"] == 3
    assert found['specpipe_request_queue_seconds_bucket{le="600"}'] == 3
    assert 0 < found["specpipe_request_queue_seconds_sum"] < 30


def summed(found: dict[str, float], name: str) -> float:
    return sum(value for sample, value in found.items() if sample.startswith(f"{name}{{"))


def promtool(*arguments: str, text: str = "") -> str:
    """Runs promtool; what it says."""
    command = shutil.which("promtool")
    if command is None:
        pytest.skip("promtool (Debian: prometheus) is not installed")
    done = subprocess.run([command, *arguments], input=text, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_promtool_has_no_complaint_but_about_tritons_own(quickstart_server: Server) -> None:
    with urllib.request.urlopen(quickstart_server.metrics_url, timeout=PATIENCE_S) as response:
        text = response.read().decode()
    assert text.count("# TYPE specpipe_") == len(METRIC_FAMILIES)
    complaints = promtool("check", "metrics", text=text).splitlines()
    assert [line for line in complaints if not line.startswith("nv_")] == []


def table(heading: str) -> list[list[str]]:
    """The cells of a table of the document, by its first heading."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_document_names_every_metric_with_its_type_and_label() -> None:
    documented = [(row[0].strip("`"), row[1], row[2].strip("`")) for row in table("name")]
    assert documented == [(f.name, f.kind, f.label or "") for f in METRIC_FAMILIES]


def test_the_queries_of_the_document_are_promql_on_metrics_that_exist(tmp_path: Path) -> None:
    queries = [row[1].strip("`") for row in table("question")]
    names = {family.name for family in METRIC_FAMILIES}
    used = set(re.findall(r"specpipe_\w+", " ".join(queries)))
    assert {name.removesuffix("_bucket") for name in used} <= names
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "document", "rules": rules}]}))
    assert f"SUCCESS: {len(queries)} rules found" in promtool("check", "rules", str(path))
