from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from specpipe.evaluate.bench.export import write_records
from specpipe.evaluate.bench.load import Load
from specpipe.evaluate.endpoints.base import Usage
from tests.evaluate.bench.aiperf import aiperf_python, needs_aiperf
from tests.evaluate.bench.recorded import answer

USAGE = Usage(
    num_input_tokens=7,
    num_output_tokens=9,
    num_steps=4,
    total_draft_tokens=10,
    total_accepted_draft_tokens=5,
    acceptance_histogram=(1, 1, 0, 0, 1),
)
COMPLETE = answer(0.5, [(1.0, 5), (1.5, 4)], 1.75, usage=USAGE)
CUT = answer(2.0, [(2.25, 1)], 2.5, ending="cut")
LOAD = Load(concurrency=1, answers=(COMPLETE, CUT), epoch_s=1_700_000_000.0)


def metadata(number: int, start_ns: int, end_ns: int) -> dict[str, object]:
    return {
        "session_num": number,
        "request_start_ns": start_ns,
        "request_end_ns": end_ns,
        "worker_id": "specpipe",
        "record_processor_id": "specpipe",
        "benchmark_phase": "profiling",
        "was_cancelled": False,
    }


def test_a_record_for_each_answer(tmp_path: Path) -> None:
    path = tmp_path / "records" / "profile_export.jsonl"
    write_records(path, [LOAD])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {
            "metadata": metadata(0, 1_700_000_000_500_000_000, 1_700_000_001_750_000_000),
            "metrics": {
                "request_latency": {"value": 1000.0, "unit": "ms"},
                "time_to_first_token": {"value": 500.0, "unit": "ms"},
                "inter_token_latency": {"value": 125.0, "unit": "ms"},
                "inter_chunk_latency": {"value": [500.0], "unit": "ms"},
                "input_sequence_length": {"value": 7, "unit": "tokens"},
                "output_sequence_length": {"value": 9, "unit": "tokens"},
            },
            "spec_decode_acceptance": {
                "engine": "specpipe",
                "mean_acceptance_length": pytest.approx(1 + 5 / 3),
                "draft_acceptance_rate": 0.5,
                "acceptance_histogram": {"0": 1, "1": 1, "4": 1},
                "num_accepted_draft_tokens": 5,
                "num_draft_tokens": 10,
                "num_spec_steps": 3,
                "completion_tokens": 9,
            },
        },
        {
            "metadata": metadata(1, 1_700_000_002_000_000_000, 1_700_000_002_500_000_000),
            "metrics": {},
            "error": {"type": "cut", "message": "it broke off"},
        },
    ]
    assert [found.name for found in path.parent.iterdir()] == ["profile_export.jsonl"]


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    untold = answer(0.0, [(0.5, None)], 0.75)
    write_records(tmp_path / "r.jsonl", [Load(concurrency=1, answers=(untold,))])
    record = json.loads((tmp_path / "r.jsonl").read_text())
    assert record["metrics"] == {
        "request_latency": {"value": 500.0, "unit": "ms"},
        "time_to_first_token": {"value": 500.0, "unit": "ms"},
    }
    assert "spec_decode_acceptance" not in record


@needs_aiperf
def test_aiperf_reads_our_records(tmp_path: Path) -> None:
    path = tmp_path / "profile_export.jsonl"
    write_records(path, [LOAD])
    reads = (
        "import sys; from aiperf.common.models.record_models import MetricRecordInfo\n"
        "for line in open(sys.argv[1]):\n"
        "    record = MetricRecordInfo.model_validate_json(line)\n"
        "    print(record.metadata.session_num, len(record.metrics), record.error is not None)\n"
    )
    ran = subprocess.run(
        [aiperf_python(), "-c", reads, str(path)], capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.returncode) == ("0 6 False\n1 0 True\n", 0), ran.stderr
