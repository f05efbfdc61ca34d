"""What requests report, added up as counters on Triton's metrics endpoint."""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import Any

from specpipe.speculative.request import Chunk

STEPS = "specpipe_loop_steps_total"
"""Rounds of the loop, all requests together; the launcher reads it as a sign of life."""

IN_FLIGHT = "specpipe_requests_in_flight"
"""Requests that wait or run; the launcher reads when a server that is to stop has done its work."""

_REQUESTS = "specpipe_requests_total"

_DESCRIPTIONS = {
    _REQUESTS: "Finished requests by finish_reason",
    STEPS: "Draft-verify rounds of the loop, each for all running requests",
    "specpipe_input_tokens_total": "Prompt tokens of finished requests",
    "specpipe_output_tokens_total": "Output tokens of finished requests",
    "specpipe_request_steps_total": "Draft-verify rounds summed over finished requests",
    "specpipe_draft_tokens_total": "Draft tokens that the target verified",
    "specpipe_accepted_draft_tokens_total": "Draft tokens that the target accepted",
}

_STATISTICS = {
    "specpipe_input_tokens_total": "num_input_tokens",
    "specpipe_output_tokens_total": "num_output_tokens",
    "specpipe_request_steps_total": "num_steps",
    "specpipe_draft_tokens_total": "total_draft_tokens",
    "specpipe_accepted_draft_tokens_total": "total_accepted_draft_tokens",
}


class Counters:
    """The counters; `metric_family` is Triton's `pb_utils.MetricFamily`.

    Requests are counted on any thread, here. Triton hears of it in `report`, which one thread
    calls now and then: each change of a metric is a round trip to the server's process.
    """

    def __init__(self, metric_family: Any) -> None:
        families = {
            name: metric_family(name=name, description=text, kind=metric_family.COUNTER)
            for name, text in _DESCRIPTIONS.items()
        }
        in_flight = metric_family(
            name=IN_FLIGHT, description="Requests that wait or run", kind=metric_family.GAUGE
        )
        # A family that is collected takes its metrics with it.
        self._families = (families, in_flight)
        self._in_flight = in_flight.Metric(labels={})
        self._metrics = {name: families[name].Metric(labels={}) for name in (STEPS, *_STATISTICS)}
        self._metrics |= {
            reason: families[_REQUESTS].Metric(labels={"finish_reason": reason})
            for reason in ("stop", "length", "cancelled", "error")
        }
        self._lock = Lock()
        self._unreported: Counter[str] = Counter()
        self._num_in_flight = self._num_reported_in_flight = 0

    def begin_request(self) -> None:
        """Counts a request in."""
        with self._lock:
            self._num_in_flight += 1

    def end_request(self, last: Chunk | None = None) -> None:
        """Counts a request out, by its last chunk; one that was refused has none."""
        with self._lock:
            self._num_in_flight -= 1
            if last is None:
                return
            assert last.finish_reason is not None
            self._unreported[last.finish_reason] += 1
            if last.statistics is not None:
                for name, field in _STATISTICS.items():
                    self._unreported[name] += getattr(last.statistics, field)

    def report(self, num_steps: int) -> None:
        """Adds rounds of the loop and hands on all that was counted."""
        with self._lock:
            unreported, self._unreported = self._unreported, Counter()
            num_in_flight = self._num_in_flight
        unreported[STEPS] += num_steps
        for name, value in unreported.items():
            if value:
                self._metrics[name].increment(value)
        if num_in_flight != self._num_reported_in_flight:
            self._in_flight.set(num_in_flight)
            self._num_reported_in_flight = num_in_flight
