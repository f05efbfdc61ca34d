"""Answers as records of NVIDIA's aiperf, one JSON object a line: its `profile_export.jsonl`.

Written against aiperf 0.13 (`MetricRecordInfo` in aiperf/common/models/record_models.py): times in
milliseconds, timestamps in nanoseconds since 1970; a failed request has an error and no metrics.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specpipe.evaluate.bench.load import Load
from specpipe.evaluate.bench.metrics import AcceptanceTotals, CountTokens, time_answer
from specpipe.evaluate.endpoints.base import TimedAnswer
from specpipe.machine.whole_file import written_whole

_WORKER = "specpipe"


def write_records(
    path: Path, loads: Iterable[Load], *, count_tokens: CountTokens | None = None
) -> None:
    """Writes the answers of loads in their order."""
    with written_whole(path) as staged, staged.open("w", encoding="utf-8") as file:
        for record in _records(loads, count_tokens):
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")


def _records(loads: Iterable[Load], count_tokens: CountTokens | None) -> Iterator[dict[str, Any]]:
    answers = ((load, answer) for load in loads for answer in load.answers)
    for number, (load, answer) in enumerate(answers):
        yield _record(number, load, answer, count_tokens)


def _record(
    number: int, load: Load, answer: TimedAnswer, count_tokens: CountTokens | None
) -> dict[str, Any]:
    def nanoseconds(time_s: float) -> int:
        # To the microsecond: a float of seconds since 1970 holds no more.
        return round((time_s + load.epoch_s) * 1e6) * 1000

    record: dict[str, Any] = {
        "metadata": {
            "session_num": number,
            "request_start_ns": nanoseconds(answer.started_s),
            "request_end_ns": nanoseconds(answer.ended_s),
            "worker_id": _WORKER,
            "record_processor_id": _WORKER,
            "benchmark_phase": "profiling",
            "was_cancelled": False,
        },
        "metrics": {},
    }
    if not answer.is_complete:
        record["error"] = {"type": answer.ending, "message": answer.error}
        return record
    record["metrics"] = _metrics(answer, count_tokens)
    acceptance = _acceptance(answer)
    if acceptance is not None:
        record["spec_decode_acceptance"] = acceptance
    return record


def _metrics(answer: TimedAnswer, count_tokens: CountTokens | None) -> dict[str, Any]:
    timing = time_answer(answer, count_tokens)
    usage = answer.usage
    milliseconds = {
        "request_latency": timing.latency_s,
        "time_to_first_token": timing.first_output_s,
        "inter_token_latency": timing.output_token_s,
    }
    tokens = {
        "input_sequence_length": None if usage is None else usage.num_input_tokens,
        "output_sequence_length": timing.num_output_tokens,
    }
    metrics: dict[str, Any] = {
        name: {"value": 1e3 * value, "unit": "ms"}
        for name, value in milliseconds.items()
        if value is not None
    }
    if timing.gaps_s:
        gaps_ms = [1e3 * gap for gap in timing.gaps_s]
        metrics["inter_chunk_latency"] = {"value": gaps_ms, "unit": "ms"}
    metrics |= {
        name: {"value": value, "unit": "tokens"}
        for name, value in tokens.items()
        if value is not None
    }
    return metrics


def _acceptance(answer: TimedAnswer) -> dict[str, Any] | None:
    """Returns acceptance as aiperf has it: of the steps with draft tokens, hence of a histogram."""
    acceptance = AcceptanceTotals.of([answer.usage])
    if acceptance is None or acceptance.histogram is None or not any(acceptance.histogram):
        return None
    num_steps = sum(acceptance.histogram)
    return {
        "engine": _WORKER,
        "mean_acceptance_length": 1 + acceptance.num_accepted_tokens / num_steps,
        "draft_acceptance_rate": acceptance.rate,
        "acceptance_histogram": {str(n): num for n, num in enumerate(acceptance.histogram) if num},
        "num_accepted_draft_tokens": acceptance.num_accepted_tokens,
        "num_draft_tokens": acceptance.num_draft_tokens,
        "num_spec_steps": num_steps,
        "completion_tokens": answer.num_output_tokens,
    }
