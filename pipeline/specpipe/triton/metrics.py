"""What requests and the pair report, on Triton's metrics endpoint (docs/metrics.md).

Names and units follow Prometheus: counters end with `_total`, times are in seconds. A position is
that of a draft token in its step, the first of which is 1. Each has the label `model`, as Triton's
own have: several versions of a pair may stand in one server.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

from specpipe.roles import ROLES
from specpipe.runtimes.pair.pair import Occupancy
from specpipe.runtimes.repository_layout import SPECULATIVE
from specpipe.speculative.request import Chunk

STEPS = "specpipe_loop_steps_total"
"""Rounds of the loop, all requests together; the launcher reads it as a sign of life."""

RESPONSES = "specpipe_responses_total"
"""Responses that were handed on to postprocessing; the launcher looks for those that never leave
it.
"""

IN_FLIGHT = "specpipe_requests_in_flight"
"""Requests that wait or run; the launcher reads when a server that is to stop has done its work.

It is set when the first request comes, and again after everything that was counted: a client that
has all answers and reads 0 here finds them counted.
"""

LATE_COMPILATIONS = "specpipe_kernel_compilations_after_ready_total"
LATE_RECORDINGS = "specpipe_graph_recordings_after_ready_total"
"""What made requests wait, and should have been done before; `specpipe bench` warns of it."""

_REQUESTS = "specpipe_requests_total"
_REFUSED = "specpipe_refused_requests_total"
_GATHERED = "specpipe_gathered_chunks_total"
_BY_DRAFT_LENGTH = "specpipe_request_steps_by_draft_length_total"
_DRAFTED_AT = "specpipe_draft_tokens_by_position_total"
_ACCEPTED_AT = "specpipe_accepted_draft_tokens_by_position_total"
_UNVERIFIED = "specpipe_unverified_draft_tokens_total"
_QUEUE = "specpipe_request_queue_seconds"
_RUNNING = "specpipe_requests_running"
_WAITING = "specpipe_requests_waiting"
_KV_TOKENS = "specpipe_kv_cache_tokens"
_KV_CAPACITY = "specpipe_kv_cache_capacity_tokens"
_KV_CACHED = "specpipe_kv_cache_reusable_tokens"
_KV_REUSED = "specpipe_reused_input_tokens_total"
_PREEMPTED = "specpipe_preempted_requests_total"
_RECOMPUTED = "specpipe_recomputed_tokens_total"


@dataclass(frozen=True)
class MetricFamily:
    """A metric, of which there is one for each value of its label.

    values   those that are there from the start, others when they first occur
    buckets  upper bounds of a histogram
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    description: str
    label: str | None = None
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRIC_FAMILIES = (
    MetricFamily(
        _REQUESTS,
        "counter",
        "Finished requests by finish_reason",
        label="finish_reason",
        values=("stop", "length", "cancelled", "error"),
    ),
    MetricFamily(_REFUSED, "counter", "Requests that were refused, by a limit or a full queue"),
    MetricFamily(
        STEPS, "counter", "Draft-verify rounds of the loop, each for all running requests"
    ),
    MetricFamily(
        RESPONSES, "counter", "Responses that the loop handed on, each a chunk of an answer"
    ),
    MetricFamily(
        _GATHERED, "counter", "Chunks of streams that left in the response of another one"
    ),
    MetricFamily("specpipe_input_tokens_total", "counter", "Prompt tokens of finished requests"),
    MetricFamily("specpipe_output_tokens_total", "counter", "Output tokens of finished requests"),
    MetricFamily(
        "specpipe_request_steps_total",
        "counter",
        "Draft-verify rounds summed over finished requests",
    ),
    MetricFamily(
        _BY_DRAFT_LENGTH,
        "counter",
        "Draft-verify rounds summed over finished requests, by their number of draft tokens",
        label="num_draft_tokens",
    ),
    MetricFamily("specpipe_draft_tokens_total", "counter", "Draft tokens that the target verified"),
    MetricFamily(
        _UNVERIFIED,
        "counter",
        "Draft tokens that TensorRT-LLM dropped under load instead of verifying them",
    ),
    MetricFamily(
        _DRAFTED_AT,
        "counter",
        "Draft tokens that the target verified, by their position in the step",
        label="position",
    ),
    MetricFamily(
        "specpipe_accepted_draft_tokens_total",
        "counter",
        "Draft tokens that the target accepted",
    ),
    MetricFamily(
        _ACCEPTED_AT,
        "counter",
        "Draft tokens that the target accepted, by their position in the step",
        label="position",
    ),
    MetricFamily(
        "specpipe_accepted_prediction_tokens_total",
        "counter",
        "Draft tokens that were copied from a request's prediction and accepted",
    ),
    MetricFamily(
        "specpipe_rejected_prediction_tokens_total",
        "counter",
        "Draft tokens that were copied from a request's prediction and not accepted",
    ),
    MetricFamily(
        _QUEUE,
        "histogram",
        "Time that finished requests waited before they were started",
        buckets=(0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
    ),
    MetricFamily(IN_FLIGHT, "gauge", "Requests that were taken and have not been answered in full"),
    MetricFamily(_RUNNING, "gauge", "Requests that hold a place in the running batch"),
    MetricFamily(_WAITING, "gauge", "Requests in the queue"),
    MetricFamily(
        _KV_TOKENS,
        "gauge",
        "Positions of the KV cache that hold a token or, where it has pages, that requests have",
        label="role",
        values=ROLES,
    ),
    MetricFamily(
        _KV_CAPACITY,
        "gauge",
        "Positions that the KV cache has in all",
        label="role",
        values=ROLES,
    ),
    MetricFamily(
        _KV_CACHED,
        "gauge",
        "Positions of the KV cache that hold prompts which no request has, until others need room",
        label="role",
        values=ROLES,
    ),
    MetricFamily(
        _KV_REUSED,
        "counter",
        "Prompt tokens that were found in the KV cache when a request was started",
        label="role",
        values=ROLES,
    ),
    MetricFamily(
        _PREEMPTED, "counter", "Times that a request gave way to others for want of KV cache"
    ),
    MetricFamily(
        _RECOMPUTED, "counter", "Tokens that were computed again after their request gave way"
    ),
    MetricFamily(
        LATE_COMPILATIONS,
        "counter",
        "GPU kernels that were compiled, or read from disk, while requests waited",
    ),
    MetricFamily(
        LATE_RECORDINGS, "counter", "CUDA graphs that were recorded while requests waited"
    ),
)

_STATISTICS = {
    "specpipe_input_tokens_total": "num_input_tokens",
    "specpipe_output_tokens_total": "num_output_tokens",
    "specpipe_request_steps_total": "num_steps",
    "specpipe_draft_tokens_total": "total_draft_tokens",
    "specpipe_accepted_draft_tokens_total": "total_accepted_draft_tokens",
    "specpipe_accepted_prediction_tokens_total": "accepted_prediction_tokens",
    "specpipe_rejected_prediction_tokens_total": "rejected_prediction_tokens",
}

Key = tuple[str, str]
"""The name of a family, and the value of its label; "" where it has none."""


class Counters:
    """All metrics of a model; `metric_family` is Triton's `pb_utils.MetricFamily`.

    Requests are counted on any thread, here. Triton hears of it in `report`, which one thread
    calls now and then: each change of a metric is a round trip to the server's process, and several
    threads that make them crash it (Triton 2.51).
    """

    def __init__(self, metric_family: Any, model: str = SPECULATIVE) -> None:
        self._model = model
        self._families = {
            family.name: (
                family,
                metric_family(
                    name=family.name,
                    description=family.description,
                    kind=getattr(metric_family, family.kind.upper()),
                ),
            )
            for family in METRIC_FAMILIES
        }
        self._metrics: dict[Key, Any] = {}
        for family in METRIC_FAMILIES:
            for value in family.values if family.label else ("",):
                self._metric((family.name, value))
        self._last_values: dict[Key, int] = {}
        self._lock = Lock()
        self._unreported: Counter[Key] = Counter()
        self._queue_times_s: list[float] = []
        self._num_in_flight = 0

    def close(self) -> None:
        """Takes the metrics from Triton's page, where those of a model that is gone would stay."""
        self._metrics.clear()
        self._families.clear()

    def begin_request(self) -> None:
        """Counts a request in."""
        with self._lock:
            self._num_in_flight += 1

    def end_request(self, last: Chunk | None = None) -> None:
        """Counts a request out, by its last chunk; one that was refused has none."""
        with self._lock:
            self._num_in_flight -= 1
            if last is None:
                self._unreported[_REFUSED, ""] += 1
                return
            assert last.finish_reason is not None
            self._unreported[_REQUESTS, last.finish_reason] += 1
            if last.queue_s is not None:
                self._queue_times_s.append(last.queue_s)
            self._unreported.update(_counted(last))

    def count_response(self) -> None:
        """Counts a response that was handed on."""
        with self._lock:
            self._unreported[RESPONSES, ""] += 1

    def count_gathered(self, num_chunks: int) -> None:
        """Counts chunks that need no response of their own."""
        with self._lock:
            self._unreported[_GATHERED, ""] += num_chunks

    def report(self, num_steps: int, occupancy: Occupancy) -> None:
        """Hands on what was counted, rounds of the loop, and what the pair holds."""
        with self._lock:
            unreported, self._unreported = self._unreported, Counter()
            queue_times_s, self._queue_times_s = self._queue_times_s, []
            num_in_flight = self._num_in_flight
        unreported[STEPS, ""] += num_steps
        for key, value in unreported.items():
            if value:
                self._metric(key).increment(value)
        for seconds in queue_times_s:
            self._metric((_QUEUE, "")).observe(seconds)
        self._set((_RUNNING, ""), occupancy.num_running)
        self._set((_WAITING, ""), occupancy.num_waiting)
        for role, used in occupancy.kv_caches.items():
            self._set((_KV_TOKENS, role), used.num_tokens)
            self._set((_KV_CAPACITY, role), used.capacity_tokens)
            self._set((_KV_CACHED, role), used.num_cached_tokens)
            self._raise((_KV_REUSED, role), used.num_reused_tokens)
        self._raise((_PREEMPTED, ""), occupancy.preempted.num_requests)
        self._raise((_RECOMPUTED, ""), occupancy.preempted.num_tokens)
        self._raise((LATE_COMPILATIONS, ""), occupancy.late_work.num_compilations)
        self._raise((LATE_RECORDINGS, ""), occupancy.late_work.num_recordings)
        self._set((IN_FLIGHT, ""), num_in_flight)

    def _set(self, key: Key, value: int) -> None:
        if self._last_values.get(key, 0) != value:
            self._metric(key).set(value)
            self._last_values[key] = value

    def _raise(self, key: Key, value: int) -> None:
        """Lets a counter have the value that another has reached, which nobody lowers."""
        before = self._last_values.get(key, 0)
        if value > before:
            self._metric(key).increment(value - before)
            self._last_values[key] = value

    def _metric(self, key: Key) -> Any:
        """Returns a metric, which is made when it first occurs."""
        if key not in self._metrics:
            name, value = key
            family, metric_family = self._families[name]
            labels = {"model": self._model, **({family.label: value} if family.label else {})}
            options = {"buckets": list(family.buckets)} if family.buckets else {}
            self._metrics[key] = metric_family.Metric(labels=labels, **options)
        return self._metrics[key]


def _counted(last: Chunk) -> Counter[Key]:
    """Returns what a request adds to the counters of tokens and steps."""
    counted: Counter[Key] = Counter()
    if last.statistics is not None:
        for name, field in _STATISTICS.items():
            counted[name, ""] = getattr(last.statistics, field)
    if last.counts is not None:
        counted[_UNVERIFIED, ""] = last.counts.num_unverified_tokens
        for name, by_value in (
            (_BY_DRAFT_LENGTH, last.counts.by_draft_length),
            (_DRAFTED_AT, last.counts.drafted_at),
            (_ACCEPTED_AT, last.counts.accepted_at),
        ):
            for value, count in by_value.items():
                counted[name, str(value)] = count
    return counted
