"""What the door counts by itself, as Prometheus reads it (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric

# Series with the time of each counter's birth, twice as many in all.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PATHS = frozenset(("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"))
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """The counters of one door; `servers` returns, by URL, which servers are asked now."""

    def __init__(self, servers: Callable[[], Mapping[str, bool]] = dict) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "specpipe_gateway_requests",
            "Requests that ended, by path and status.",
            ("path", "status"),
            registry=registry,
        )
        self._refused = Counter(
            "specpipe_gateway_refused_requests",
            "Requests that the door itself refused: key, rate, size, slow, draining.",
            ("reason",),
            registry=registry,
        )
        self._gone = Counter(
            "specpipe_gateway_gone_clients",
            "Requests whose client went away before the end of the answer.",
            registry=registry,
        )
        self._tokens = Counter(
            "specpipe_gateway_tokens",
            "Tokens of prompts and of answers, by key.",
            ("kind", "key"),
            registry=registry,
        )
        self._bodies = Counter(
            "specpipe_gateway_chunks",
            "Parts of answers that were sent on.",
            registry=registry,
        )
        self._first_s = Histogram(
            "specpipe_gateway_first_chunk_seconds",
            "Seconds from a request to the first part of its answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._whole_s = Histogram(
            "specpipe_gateway_request_seconds",
            "Seconds from a request to the end of its answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "specpipe_gateway_requests_in_flight",
            "Requests that are being answered.",
            registry=registry,
        )
        registry.register(_Servers(servers))

    def count(
        self,
        *,
        path: str,
        status: int,
        is_gone: bool,
        num_chunks: int,
        first_s: float | None,
        whole_s: float,
    ) -> None:
        """Takes in that a request ended; only of those that ask the model times are kept."""
        is_model = path in _PATHS
        self._requests.labels(path if is_model else "other", str(status)).inc()
        if is_gone:
            self._gone.inc()
        if not is_model:
            return
        self._bodies.inc(num_chunks)
        self._whole_s.observe(whole_s)
        if first_s is not None:
            self._first_s.observe(first_s)

    def count_refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def count_tokens(self, key: str, num_prompt: int, num_output: int) -> None:
        self._tokens.labels("prompt", key).inc(num_prompt)
        self._tokens.labels("completion", key).inc(num_output)

    def page(self) -> bytes:
        """Returns the page that Prometheus reads."""
        return generate_latest(self._registry)


class _Servers:
    def __init__(self, servers: Callable[[], Mapping[str, bool]]) -> None:
        self._servers = servers

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "specpipe_gateway_server_is_asked",
            "1 for a server that requests go to, 0 for one that is left out.",
            labels=("url",),
        )
        for url, is_asked in self._servers().items():
            family.add_metric((url,), float(is_asked))
        yield family
