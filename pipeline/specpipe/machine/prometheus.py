"""Prometheus' text format, in which servers show their metrics.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Samples = Mapping[str, float]
"""Values by name and labels, written as `name{label="value"}`."""

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan)"
_SAMPLE = re.compile(
    rf"([a-z_:][\w:]*(?:\{{.*\}})?)\s+({_NUMBER})(?:\s|$)", re.IGNORECASE | re.ASCII
)


def parse_samples(page: str) -> dict[str, float]:
    """Returns the samples of a page; a line that is none is passed over."""
    return {match[1]: float(match[2]) for match in map(_SAMPLE.match, page.splitlines()) if match}


def by_labels(samples: Samples, name: str) -> dict[str, float]:
    """Returns the samples of a name by their labels, `{…}`, or "" without any."""
    return {
        sample.removeprefix(name): value
        for sample, value in samples.items()
        if sample.partition("{")[0] == name
    }


def total(samples: Samples, *names: str, label: str = "") -> float | None:
    """Returns the sum of the samples of these names with a label, `key="value"`; None for none."""
    values = [
        value
        for name in names
        for labels, value in by_labels(samples, name).items()
        if label in labels
    ]
    return sum(values) if values else None
