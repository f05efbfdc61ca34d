"""What requests report, added up as counters on Triton's metrics endpoint."""

from __future__ import annotations

from typing import Any

from specpipe.speculative.request import Chunk

STEPS = "specpipe_loop_steps_total"
"""Rounds of the loop, all requests together; the launcher reads it as a sign of life."""

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
    """The counters; `metric_family` is Triton's `pb_utils.MetricFamily`."""

    def __init__(self, metric_family: Any) -> None:
        families = {
            name: metric_family(name=name, description=text, kind=metric_family.COUNTER)
            for name, text in _DESCRIPTIONS.items()
        }
        # A family that is collected takes its metrics with it.
        self._families = families
        self._metrics = {name: families[name].Metric(labels={}) for name in (STEPS, *_STATISTICS)}
        self._requests = {
            reason: families[_REQUESTS].Metric(labels={"finish_reason": reason})
            for reason in ("stop", "length", "cancelled", "error")
        }

    def count_steps(self, num_steps: int) -> None:
        """Adds rounds of the loop."""
        self._metrics[STEPS].increment(num_steps)

    def count_request(self, last: Chunk) -> None:
        """Adds a finished request by its last chunk."""
        assert last.finish_reason is not None
        self._requests[last.finish_reason].increment(1)
        if last.statistics is None:
            return
        for name, field in _STATISTICS.items():
            self._metrics[name].increment(getattr(last.statistics, field))
