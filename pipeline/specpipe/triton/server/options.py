"""Where a server listens, and what it allows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where the server listens and how patient the launcher is. Port 0 takes a free one.

    allow_http  False: gRPC alone, the metrics aside
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    allow_http: bool = True
    allow_known_holes: bool = False  # beyond loopback (known_holes.py)
    startup_timeout_s: float = 600.0
    probe_interval_s: float = 5.0
    probe_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    max_restarts: int = 5  # in a row, none of which came to a server that answers
