"""A server that listens for gRPC alone: it is found ready, answers, is watched and drained."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from specpipe.errors import SpecpipeError
from specpipe.triton.client import Client
from specpipe.triton.server import launcher, processes
from specpipe.triton.server.addresses import check_ports
from specpipe.triton.server.options import ServeOptions
from specpipe.triton.server.server import Server
from tests.waiting import PATIENCE_S

OPTIONS = ServeOptions(http_port=0, grpc_port=0, metrics_port=0, allow_http=False)


@pytest.fixture
def server(echo_repository: Callable[..., Path]) -> Iterator[Server]:
    with launcher.running(echo_repository(), OPTIONS) as running:
        yield running


def test_it_answers_and_lets_streams_finish_at_the_end(
    server: Server, wait_until: Callable[..., bool], tmp_path: Path
) -> None:
    assert server.urls == (server.grpc_url,)
    assert not any("HTTPService" in line for line in server.triton.last_log_lines)
    server.probe()
    begun, go = threading.Semaphore(0), tmp_path / "go"

    def ask() -> tuple[str, str | None]:
        with Client(server.grpc_url) as client:
            stream = client.stream(f"<until {go}> a b c", max_tokens=60, end_id=-1)
            text = next(stream).text
            begun.release()
            *others, last = stream
            return "".join([text, *(chunk.text for chunk in others), last.text]), last.finish_reason

    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask) for _ in range(4)]
        for _ in answers:
            assert begun.acquire(timeout=PATIENCE_S)
        stopping = pool.submit(server.stop)
        assert not wait_until(stopping.done, seconds=1.0)
        go.touch()
        stopping.result()
        ends = [answer.result() for answer in answers]
    assert ends == [(ends[0][0], "length")] * 4
    assert ends[0][0].startswith(f"<until {go}> a b c<until")
    log = server.triton.last_log_lines
    assert any("Found 0 model versions that have in-flight inferences" in line for line in log)


def test_a_stopped_model_does_not_hold_up_the_end(server: Server) -> None:
    names = server.needed_processes()._names
    (stub,) = (pid for pid, name in names.items() if name == "speculative")
    with Client(server.grpc_url, timeout_s=PATIENCE_S) as client, ThreadPoolExecutor() as pool:
        stream = client.stream("<slow> a b c", max_tokens=900, end_id=-1)
        next(stream)
        os.kill(stub, signal.SIGSTOP)
        rest = pool.submit(list, stream)
        server.stop()
        with pytest.raises(SpecpipeError):
            rest.result()
    left = processes.look(stub)
    assert left is None or left.state in processes.DEAD  # which nobody reaps in some containers


def test_a_taken_http_port_does_not_matter() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        made = Server(Path("repository"), replace(OPTIONS, http_port=port))
        assert 0 not in (made.options.grpc_port, made.options.metrics_port)
        check_ports(made.options)


def test_the_metrics_endpoint_takes_no_bodies(server: Server) -> None:
    """What of HTTP is left: what ends Triton 2.51 at its HTTP endpoint does not do so here."""
    for headers, body in (
        ("Content-Length: 7000000", b"[" * 7_000_000),
        ("Transfer-Encoding: chunked", b"1\r\n[\r\n" * 1_000_000 + b"0\r\n\r\n"),
    ):
        with socket.create_connection(("127.0.0.1", server.options.metrics_port)) as sender:
            sender.settimeout(PATIENCE_S)
            sender.sendall(
                f"POST /metrics HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n".encode() + body
            )
            response = http.client.HTTPResponse(sender)
            response.begin()
            assert response.status == 405
    server.probe()
