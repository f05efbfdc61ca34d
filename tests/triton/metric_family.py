"""A small stand-in for Triton's metrics, which refuses what Triton refuses."""

from __future__ import annotations

from collections.abc import Sequence


class Metric:
    """One metric. `value` is that of a counter or gauge, `observed` what a histogram was told."""

    def __init__(self, kind: int, buckets: Sequence[float] | None) -> None:
        assert (kind == MetricFamily.HISTOGRAM) == (buckets is not None)
        self._kind = kind
        self.value = 0.0
        self.observed: list[float] = []
        self.num_changes = 0

    def increment(self, value: float) -> None:
        assert self._kind != MetricFamily.HISTOGRAM
        assert value > 0 or self._kind == MetricFamily.GAUGE
        self.value += value
        self.num_changes += 1

    def set(self, value: float) -> None:
        assert self._kind == MetricFamily.GAUGE
        self.value = value
        self.num_changes += 1

    def observe(self, value: float) -> None:
        assert self._kind == MetricFamily.HISTOGRAM
        self.observed.append(value)
        self.num_changes += 1


class MetricFamily:
    """`made` holds all metrics by family, and then by the value of their label, less the model."""

    COUNTER, GAUGE, HISTOGRAM = 0, 1, 2
    made: dict[str, dict[str, Metric]] = {}

    def __init__(self, name: str, description: str, kind: int) -> None:
        assert name not in self.made and description
        self._kind = kind
        self._metrics = self.made[name] = {}

    def Metric(self, labels: dict[str, str], buckets: Sequence[float] | None = None) -> Metric:
        assert labels["model"]
        value = ",".join(value for label, value in labels.items() if label != "model")
        assert value not in self._metrics
        self._metrics[value] = Metric(self._kind, buckets)
        return self._metrics[value]
