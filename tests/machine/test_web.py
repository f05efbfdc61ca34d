"""URLs of servers, and which of them a proxy is asked for."""

from __future__ import annotations

import http.server
import socket
import threading
import urllib.error
from collections.abc import Iterator
from email.message import Message

import pytest

from specpipe.errors import ServerError
from specpipe.evaluate.endpoints import open_endpoint
from specpipe.machine.web import Address, fetch, is_here, parse_url, to_words


@pytest.fixture
def asked() -> Iterator[tuple[int, list[str]]]:
    """A server's port, and the paths that it was asked for: whole URLs where it is the proxy."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"here")

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, paths
        server.shutdown()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.8.9.10", "[::ffff:127.0.0.1]"])
def test_no_proxy_is_asked_for_this_machine(
    asked: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    port, paths = asked
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    if host != "127.8.9.10":
        assert fetch(f"http://{host}:{port}/metrics", timeout_s=10) == b"here"
        assert paths == ["/metrics"]
    assert is_here(host.strip("[]"))


def test_another_machine_is_asked_as_the_environment_says(
    asked: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, paths = asked
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
    assert fetch("http://192.0.2.1:8002/metrics", timeout_s=10) == b"here"
    assert paths == ["http://192.0.2.1:8002/metrics"]
    assert not is_here("nowhere.invalid")


def test_what_is_no_http_is_an_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(OSError, match="is no HTTP"):
            fetch(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout_s=10)


def test_words_of_an_error_begin_small_but_for_abbreviations() -> None:
    assert to_words(OSError(111, "Connection refused")) == "connection refused"
    refused = urllib.error.HTTPError("http://h:1/", 404, "Not Found", Message(), None)
    assert to_words(refused) == "HTTP Error 404: Not Found"


def test_a_host_in_brackets_comes_out_without_and_goes_in_with() -> None:
    address = parse_url("grpc://[::1]:8001", ("http", "grpc"))
    assert address == Address("grpc", "::1", 8001)
    assert str(address) == "[::1]:8001"


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "http://host",
        "http://host:0",
        "http://host:65536",
        "http://:80",
        "http://[::1",
        "http://host:80/v2",
        "http://host:80?model=a",
        "http://me:secret@host:80",
    ],
)
def test_what_is_no_url_of_a_server_is_one_sentence(url: str) -> None:
    with pytest.raises(ServerError) as caught:
        parse_url(url, ("http", "grpc"))
    assert str(caught.value) == f"{url!r} is not http://HOST:PORT or grpc://HOST:PORT"
    with pytest.raises(ServerError):
        open_endpoint(url)
