"""Acceptance from a server's own counters: what its metrics endpoint gained during a load.

They count all that the server did in between, warm-up included; rates are not hurt by that. Some
servers report only here at which position of a draft tokens are accepted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from specpipe.errors import ServerError
from specpipe.evaluate.bench.metrics import AcceptanceTotals
from specpipe.machine.callables import Log
from specpipe.machine.prometheus import Samples, parse_samples, total
from specpipe.machine.web import fetch, to_words
from specpipe.triton.metrics import IN_FLIGHT, LATE_COMPILATIONS, LATE_RECORDINGS


@dataclass(frozen=True)
class _Names:
    """The counters of one kind of server.

    accepted_at, drafted_at  with a label `position`, the first of which is `first_position`; where
                             nothing counts what was drafted at one, each step did that drafted
    """

    drafted: str
    accepted: str
    steps: str
    accepted_at: str
    first_position: int
    drafted_at: str | None = None


_KNOWN = (
    _Names(
        drafted="specpipe_draft_tokens_total",
        accepted="specpipe_accepted_draft_tokens_total",
        steps="specpipe_request_steps_total",
        accepted_at="specpipe_accepted_draft_tokens_by_position_total",
        first_position=1,
        drafted_at="specpipe_draft_tokens_by_position_total",
    ),
    # vllm/v1/spec_decode/metrics.py; a "draft" there is a step with draft tokens.
    _Names(
        drafted="vllm:spec_decode_num_draft_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        steps="vllm:spec_decode_num_drafts_total",
        accepted_at="vllm:spec_decode_num_accepted_tokens_per_pos_total",
        first_position=0,
    ),
)

_SETTLE_TIMEOUT_S = 5.0
_SETTLE_INTERVAL_S = 0.02


def read_counters(url: str, *, timeout_s: float = 30.0) -> Samples:
    """Returns what a metrics endpoint reports in Prometheus' text format."""
    try:
        text = fetch(url, timeout_s=timeout_s).decode("utf-8", errors="replace")
    except (OSError, ValueError) as exc:
        raise ServerError(f"{url} does not answer with metrics: {to_words(exc)}") from exc
    samples = parse_samples(text)
    if not samples:
        raise ServerError(f"{url} does not answer with metrics: what it sends has none")
    return samples


def read_settled(url: str, *, report: Log, timeout_s: float = _SETTLE_TIMEOUT_S) -> Samples:
    """Returns what a metrics endpoint reports once every answered request is counted there.

    Ours counts a request a moment after its answer, and says with `specpipe_requests_in_flight` 0
    that it has counted all; other servers are read as they are. Requests of others may keep it from
    0: after `timeout_s` that is reported, and what is there is taken.
    """
    end = time.monotonic() + timeout_s
    while num_in_flight := total(samples := read_counters(url), IN_FLIGHT):
        if time.monotonic() >= end:
            report(
                f"warning: {url}: {num_in_flight:.0f} requests are still in flight after "
                f"{timeout_s:g} s, so the server's counters may hold what others ask it, and lack "
                "what was asked here"
            )
            break
        time.sleep(_SETTLE_INTERVAL_S)
    return samples


def gained(before: Samples, after: Samples) -> Samples:
    """Returns by how much each counter grew; one that is new grew from 0."""
    return {sample: value - before.get(sample, 0.0) for sample, value in after.items()}


def late_work(grown: Samples) -> str | None:
    """Returns what made requests wait that a server of ours does before it is ready; None: none."""
    compiled = round(total(grown, LATE_COMPILATIONS) or 0)
    recorded = round(total(grown, LATE_RECORDINGS) or 0)
    if not compiled and not recorded:
        return None
    return (
        f"{compiled} kernels were compiled and {recorded} launches recorded while requests waited"
    )


def acceptance(grown: Samples) -> dict[str, Any] | None:
    """Returns acceptance by the counters of a known server; None for those of any other."""
    for names in _KNOWN:
        num_draft_tokens = total(grown, names.drafted)
        if num_draft_tokens is None:
            continue
        steps = total(grown, names.steps) or 0.0
        totals = AcceptanceTotals(
            num_draft_tokens=round(num_draft_tokens),
            num_accepted_tokens=round(total(grown, names.accepted) or 0),
            num_steps=round(steps),
        )
        return {**totals.to_json(), "per_position": _per_position(grown, names, steps)}
    return None


def _per_position(grown: Samples, names: _Names, steps: float) -> list[float] | None:
    accepted = _by_position(grown, names.accepted_at)
    drafted = {} if names.drafted_at is None else _by_position(grown, names.drafted_at)
    rates = []
    position = names.first_position
    while position in accepted:
        num_drafted = steps if names.drafted_at is None else drafted.get(position, 0.0)
        if not num_drafted:
            break
        rates.append(accepted[position] / num_drafted)
        position += 1
    return rates or None


def _by_position(grown: Samples, name: str) -> dict[int, float]:
    """Returns the sums of a counter by its label `position`, over all other labels."""
    totals: dict[int, float] = {}
    for (counter, labels), value in grown.items():
        position = dict(labels).get("position", "")
        if counter == name and position.isdecimal():
            totals[int(position)] = totals.get(int(position), 0.0) + value
    return totals
