"""Prometheus' text format, in which servers show their metrics.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

Sample = tuple[str, frozenset[tuple[str, str]]]
"""A name and its labels."""

Samples = Mapping[Sample, float]


def parse_samples(page: str) -> dict[Sample, float]:
    """Returns the samples of a page; a line that is none is passed over."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = {}
    # A line at a time: one that the library refuses ends its reading, and a counter's sample would
    # be called ..._total, which Triton's are not.
    for line in page.splitlines():
        with contextlib.suppress(ValueError, IndexError):
            for family in text_string_to_metric_families(line):
                for sample in family.samples:
                    samples[sample.name, frozenset(sample.labels.items())] = sample.value
    return samples


def total(samples: Samples, *names: str, **labels: str) -> float | None:
    """Returns the sum of the samples that have one of the names and all labels; None for none."""
    values = [
        value
        for (name, having), value in samples.items()
        if name in names and labels.items() <= having
    ]
    return sum(values) if values else None
