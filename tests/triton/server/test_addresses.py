"""Where a server listens: hosts by any name, ports, and what each door of Triton takes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specpipe.errors import ServerError
from specpipe.triton.client import Client
from specpipe.triton.server import server
from specpipe.triton.server.addresses import check_apart, check_ports, resolve, settle
from specpipe.triton.server.installation import TritonBinary
from specpipe.triton.server.options import ServeOptions
from specpipe.triton.server.server import Server
from tests.waiting import wait_until

FREE = ServeOptions(http_port=0, grpc_port=0, metrics_port=0)


def refusal(options: ServeOptions) -> str:
    with pytest.raises(ServerError) as caught:
        settled, kept = settle(options)
        with kept:
            check_ports(settled)
    return str(caught.value)


@pytest.mark.parametrize(
    ("host", "address", "url"),
    [
        ("localhost", "127.0.0.1", "http://127.0.0.1:"),
        ("127.1", "127.0.0.1", "http://127.0.0.1:"),
        ("0.0.0.0", "0.0.0.0", "http://127.0.0.1:"),
        ("::1", "::1", "http://[::1]:"),
        ("[::1]", "::1", "http://[::1]:"),
        ("0:0::1", "::1", "http://[::1]:"),
        ("::", "::", "http://[::1]:"),
        ("::ffff:127.0.0.1", "127.0.0.1", "http://127.0.0.1:"),
    ],
)
def test_a_host_is_an_address_from_the_start(host: str, address: str, url: str) -> None:
    made = Server(
        Path("repository"), replace(FREE, host=host), binary=TritonBinary(Path("tritonserver"))
    )
    assert made.options.host == address
    assert made.http_url == f"{url}{made.options.http_port}"
    ports = {made.options.http_port, made.options.grpc_port, made.options.metrics_port}
    assert len(ports) == 3 and 0 not in ports


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("", "--host '' is no host"),
        ("localhost:8000", "--host 'localhost:8000' is no host"),
        ("[::1]:8000", r"--host '\[::1\]:8000' is no host"),
        ("http://localhost", "--host 'http://localhost' is no host"),
        ("fe80::1%lo", "--host 'fe80::1%lo': Triton takes no scope"),
        ("nowhere.invalid", "--host 'nowhere.invalid' cannot be resolved"),
        ("a b", "--host 'a b' cannot be resolved"),
        ("x" * 300, "--host '" + "x" * 80 + "' cannot be resolved"),
        ("nul\0", r"--host 'nul\\x00' cannot be resolved"),
        ("192.0.2.1", "--host '192.0.2.1' is no address of this machine"),
    ],
)
def test_what_is_no_host_of_this_machine_is_refused_at_once(host: str, expected: str) -> None:
    with pytest.raises(ServerError, match=expected):
        settle(replace(FREE, host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_a_free_port_stays_free_for_who_asked_for_it(host: str) -> None:
    made = Server(
        Path("repository"), replace(FREE, host=host), binary=TritonBinary(Path("tritonserver"))
    )
    for port in (made.options.http_port, made.options.grpc_port, made.options.metrics_port):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
            other.bind((host, port))
    check_ports(made.options)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_in_use_is_named_with_its_option(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as other:
        other.bind((host, 0))
        other.listen()
        port = other.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        assert refusal(replace(FREE, host=host, grpc_port=port)) == (
            f"{shown}:{port} cannot be listened on (Address already in use): choose another port "
            "with --grpc-port"
        )


def test_ports_that_are_none_or_twice_the_same_are_refused() -> None:
    assert refusal(replace(FREE, http_port=65536)) == (
        "--http-port 65536 is no port: choose one up to 65535"
    )
    assert refusal(replace(FREE, metrics_port=-1)) == (
        "--metrics-port -1 is no port: choose one up to 65535"
    )
    assert refusal(replace(FREE, http_port=8001, metrics_port=8001)) == (
        "--http-port and --metrics-port are both 8001: choose two ports"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_door_has_a_port_of_its_own(host: str) -> None:
    options = replace(FREE, http_port=8000)
    with pytest.raises(ServerError) as caught:
        check_apart(resolve(options), host, 8000)
    assert str(caught.value) == "--http-port and --openai are both 8000: choose two ports"
    check_apart(resolve(replace(options, allow_http=False)), host, 8000)
    check_apart(resolve(options), "127.0.0.2", 8000)


def test_ipv6_is_served_at_every_door_and_no_proxy_is_asked_for_it(
    echo_repository: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        for spelling in (name, name.upper()):
            monkeypatch.setenv(spelling, "http://127.0.0.1:9")  # discard: nobody listens
    with server.running(echo_repository(), replace(FREE, host="::")) as running:
        for url in (running.http_url, running.grpc_url):
            with Client(url) as client:
                assert client.generate("Hello", max_tokens=3).text == "Hello"
        # Whoever stops it reads the metrics, which may have yet to hear of these answers' steps.
        assert running.makes_progress() is False
        assert running._num_steps is not None
        assert wait_until(lambda: running.makes_progress() is False)
