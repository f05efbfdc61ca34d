"""Asking a real Triton: for answers to several prompts at once, and for its metrics."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from specpipe.triton.client import Client
from specpipe.triton.server.server import Server
from tests.waiting import PATIENCE_S, wait_until


def texts(
    server: Server,
    prompts: Sequence[str],
    *,
    at_once: int,
    protocol: str = "grpc",
    stream: bool = False,
    **settings: Any,
) -> list[str]:
    """The answers to all prompts, in their order; each has a client of its own."""
    url = server.http_url if protocol == "http" else server.grpc_url

    def answer(prompt: str) -> str:
        with Client(url) as client:
            if stream:
                return "".join(chunk.text for chunk in client.stream(prompt, **settings))
            return client.generate(prompt, **settings).text

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(answer, prompts))


_OF_MODEL = re.compile(r'\{model="speculative"\}|model="speculative",|,model="speculative"')


class Measured(Protocol):
    """A server, or whoever knows its address."""

    @property
    def metrics_url(self) -> str: ...


def metrics(server: Measured, *prefixes: str) -> dict[str, float]:
    """The metrics that begin so, by name and labels as Prometheus writes them.

    Less the label `model` of specpipe's own, which is the same in all where one version is served.
    """
    with urllib.request.urlopen(server.metrics_url, timeout=PATIENCE_S) as response:
        page = response.read().decode()
    lines = [
        _OF_MODEL.sub("", line) if line.startswith("specpipe_") else line
        for line in page.splitlines()
    ]
    named = (line.rpartition(" ") for line in lines if line.startswith(prefixes))
    return {name: float(value) for name, _, value in named}


def settled_metrics(server: Measured) -> dict[str, float]:
    """All of specpipe's, once no request is in flight, which is told last: all are counted then."""
    in_flight = "specpipe_requests_in_flight"
    assert wait_until(lambda: metrics(server, f"{in_flight} ")[in_flight] == 0)
    return metrics(server, "specpipe_")


CANCELLED = 'specpipe_requests_total{finish_reason="cancelled"}'
