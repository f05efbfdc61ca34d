"""Acceptance as a night counted it: rates with their intervals, as far as they can be told."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from specpipe.evaluate.nightly.acceptance import ALL, acceptance_figures
from specpipe.evaluate.nightly.intervals import Estimate
from specpipe.evaluate.nightly.record import Run


def acceptance_rates(night: Run | None) -> Mapping[str, Estimate]:
    """Returns the rate over all prompts, and those by position and by kind of prompt.

    Without the counts of each prompt, or SciPy, there is the one over all and no interval.
    """
    counted = None if night is None else night.acceptance
    if counted is None or not counted.num_draft_tokens:
        return {}
    if counted.prompts and importlib.util.find_spec("scipy") is not None:
        return {figure.what: figure.now for figure in acceptance_figures(counted, None)}
    return {ALL: Estimate(value=counted.rate)}
