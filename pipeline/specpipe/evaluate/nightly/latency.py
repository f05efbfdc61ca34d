"""What users wait for, out of a benchmark: percentiles with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from specpipe.evaluate.nightly.record import Latency

if TYPE_CHECKING:
    from specpipe.evaluate.bench.run import Measurements
    from specpipe.evaluate.endpoints.base import TimedAnswer

PERCENTILES: tuple[Literal[50, 99], ...] = (50, 99)
_NUM_RESAMPLES = 1000
_BOUNDS = (2.5, 97.5)  # of a 95 % interval


def latencies(measured: Measurements) -> list[Latency]:
    """Returns the percentiles of the pair as it was served, at each concurrency."""
    from specpipe.evaluate.bench.sides import WITH

    found = []
    for concurrency, by_side in measured.by_concurrency.items():
        for what, times in _times_ms(by_side[WITH].answers_by_prompt()).items():
            for percentile in PERCENTILES if times else ():
                found.append(estimate(times, concurrency, what, percentile))
    return found


def estimate(
    times_ms: Sequence[Sequence[float]],
    concurrency: int,
    what: Literal["first token", "later token"],
    percentile: Literal[50, 99],
) -> Latency:
    """Returns the percentile over [prompts][rounds] times.

    Its interval is found by drawing prompts, each with all its rounds, and is widened to hold the
    percentile of each round: what a machine does for a while hits many prompts at once.
    """
    table = np.array(times_ms, dtype=np.float64)
    value = float(np.percentile(table, percentile))
    low = high = None
    if len(table) > 1:
        drawn = np.random.default_rng(0).integers(len(table), size=(_NUM_RESAMPLES, len(table)))
        resampled = np.percentile(table[drawn].reshape(_NUM_RESAMPLES, -1), percentile, axis=1)
        by_round = np.percentile(table, percentile, axis=0)
        low, high = (float(bound) for bound in np.percentile(resampled, _BOUNDS))
        low, high = min(low, *by_round.tolist()), max(high, *by_round.tolist())
    return Latency(
        concurrency=concurrency, what=what, percentile=percentile, ms=value, low=low, high=high
    )


def _times_ms(
    answers: Mapping[str, Sequence[TimedAnswer]],
) -> dict[Literal["first token", "later token"], list[list[float]]]:
    """Returns the times of the prompts that were answered whole in every round."""
    from specpipe.evaluate.bench.metrics import time_answer

    whole = [
        [time_answer(answer) for answer in rounds]
        for rounds in answers.values()
        if all(answer.is_complete for answer in rounds)
    ]
    first = [[timing.first_output_s for timing in rounds] for rounds in whole]
    later = [[timing.output_token_s for timing in rounds] for rounds in whole]
    return {"first token": list(_known(first)), "later token": list(_known(later))}


def _known(times_s: Sequence[Sequence[float | None]]) -> Iterator[list[float]]:
    for rounds in times_s:
        known = [1e3 * time_s for time_s in rounds if time_s is not None]
        if known and len(known) == len(rounds):
            yield known
