"""All HTTP of specpipe, on Python's own library; this machine's servers are asked without a proxy.

A proxy that the environment names would be asked for 127.0.0.1, too, where no_proxy is not set.

Why not httpx2, which huggingface_hub brings: `bench` measures servers, and each chunk of a stream
costs 40 to 80 µs more of one process's time with it (108 against 189 µs, the chunk's parsing
included; 32 streams, Python 3.11, httpx2 2.16). A server that sends each token as a chunk would
seem slower for that.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from specpipe.errors import MOST_SHOWN, CutStream, NoAnswer, ServerError

T = TypeVar("T")

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_BLOCK_BYTES = 1 << 16  # most that is read at once: a guess


@dataclass(frozen=True)
class Address:
    """A host, without brackets, and its port."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def parse_url(url: str, schemes: tuple[str, ...]) -> Address:
    """Reads SCHEME://HOST:PORT; raises ServerError for what is none, or would have no effect."""
    try:
        parts = urllib.parse.urlsplit(url)
        has_more = parts.username is not None or parts.path.strip("/") or parts.query
        if parts.scheme in schemes and parts.hostname and parts.port and not has_more:
            return Address(parts.scheme, parts.hostname, parts.port)
    except ValueError:  # a port beyond 65535, or brackets around what is no IPv6 address
        pass
    expected = " or ".join(f"{scheme}://HOST:PORT" for scheme in schemes)
    raise ServerError(f"{url[:MOST_SHOWN]!r} is not {expected}")


def bracketed(host: str) -> str:
    """Returns a host as URLs and gRPC write it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def local_address(host: str) -> str | None:
    """Returns the address in numbers, IPv4 if it has one; None where no socket can be bound to it
    here.

    Raises OSError or UnicodeError for a name that cannot be resolved.
    """
    infos = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    for family, _, _, _, address in sorted(infos, key=lambda entry: entry[0] != socket.AF_INET):
        with socket.socket(family, socket.SOCK_DGRAM) as bound:
            try:
                bound.bind(address)
            except OSError:
                continue
        return str(ipaddress.ip_address(address[0]))
    return None


@contextlib.contextmanager
def asked(
    url: str,
    body: Any = None,
    headers: Mapping[str, str] = _NO_HEADERS,
    *,
    server: str,
    timeout_s: float,
) -> Iterator[http.client.HTTPResponse]:
    """Yields the answer to a GET, or to a POST of a body in JSON, whatever its status; asks no
    proxy.

    The request has a connection of its own, which ends with the context: to close it early is how
    HTTP cancels. What becomes of it until then raises NoAnswer, in which `server` is its name.
    """
    parts = urllib.parse.urlsplit(url)
    is_encrypted = parts.scheme == "https"
    kind = http.client.HTTPSConnection if is_encrypted else http.client.HTTPConnection
    with (
        _answering(server, timeout_s=timeout_s),
        contextlib.closing(kind(parts.netloc, timeout=timeout_s)) as connection,
    ):
        if body is None:
            connection.request("GET", parts.path, headers=dict(headers))
        else:
            sent = {"Content-Type": "application/json", **headers}
            connection.request("POST", parts.path, json.dumps(body), sent)
        yield connection.getresponse()


def body_blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yields what comes of an answer's body as it comes; no memory is set aside for what may not
    come.

    Raises http.client.IncompleteRead where the body ends before its time.
    """
    # By read1(): read() makes room for the length that a server claims, and readline() takes a
    # chunked body that was cut for one that ended.
    while block := response.read1(_BLOCK_BYTES):
        yield block
    if response.length:  # of Content-Length; read1() reports no missing rest
        raise http.client.IncompleteRead(b"", response.length)


def fetch(url: str, *, timeout_s: float) -> bytes:
    """Returns what a URL answers; raises OSError where that is no 200, or nothing."""
    handlers = []
    if is_here(urllib.parse.urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=timeout_s) as response:
            return b"".join(body_blocks(response))
    except http.client.HTTPException as exc:
        raise OSError(f"{url}: {to_words(exc)}") from exc


@contextlib.contextmanager
def _answering(server: str, *, timeout_s: float) -> Iterator[None]:
    """Raises NoAnswer for what sockets and http.client raise inside it."""
    try:
        yield
    # A host that IDNA cannot encode is a UnicodeError.
    except (OSError, http.client.HTTPException, UnicodeError) as exc:
        is_silence = isinstance(exc, TimeoutError) and exc.errno is None
        reason = f"timed out after {timeout_s:g} s" if is_silence else to_words(exc)
        raise NoAnswer(server, reason) from exc


def receive(arriving: Iterator[T], num_received: int, server: str, *, is_whole: bool) -> T | None:
    """Returns what comes next of an answer, None at the end of the stream.

    A connection that breaks is the end of an answer that is whole, and a CutStream for another.
    """
    try:
        return next(arriving, None)
    except NoAnswer as exc:
        if is_whole:
            return None
        if num_received == 0:
            raise
        raise CutStream.after(num_received, server, exc.reason) from exc


def to_words(exc: Exception) -> str:
    """Returns what became of a connection, as the system calls it and without its number."""
    if isinstance(exc, urllib.error.URLError) and isinstance(exc.reason, OSError):
        return to_words(exc.reason)
    if isinstance(exc, (http.client.RemoteDisconnected, http.client.IncompleteRead)):
        return "the connection was closed before the end"
    if isinstance(exc, http.client.HTTPException):
        return "what it sends is no HTTP"
    if isinstance(exc, UnicodeError):
        return "there is no such host"
    words = getattr(exc, "strerror", None) or str(exc)
    return words if words[:2].isupper() else words[:1].lower() + words[1:]


def is_here(host: str) -> bool:
    """Returns whether a name or an address is this machine's own."""
    try:
        return local_address(host) is not None
    except (OSError, UnicodeError):
        return False
