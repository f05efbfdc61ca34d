"""Servers by their URLs; this machine's own are asked without a proxy.

A proxy that the environment names would be asked for 127.0.0.1, too, where no_proxy is not set.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import urllib.parse
import urllib.request
from dataclasses import dataclass

from specpipe.errors import ServerError

_MAX_SHOWN = 80


@dataclass(frozen=True)
class Address:
    """A host, without brackets, and its port."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def parse_url(url: str, schemes: tuple[str, ...]) -> Address:
    """Reads SCHEME://HOST:PORT; raises ServerError for what is none."""
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in schemes and parts.hostname and parts.port:
            return Address(parts.scheme, parts.hostname, parts.port)
    except ValueError:  # a port beyond 65535, or brackets around what is no IPv6 address
        pass
    expected = " or ".join(f"{scheme}://HOST:PORT" for scheme in schemes)
    raise ServerError(f"{url[:_MAX_SHOWN]!r} is not {expected}")


def bracketed(host: str) -> str:
    """A host as URLs and gRPC write it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def local_address(host: str) -> str | None:
    """The address in numbers, IPv4 if it has one; None where no socket can be bound to it here.

    Raises OSError or UnicodeError for a name that cannot be resolved.
    """
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    for family, _, _, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        with socket.socket(family, socket.SOCK_DGRAM) as bound:
            try:
                bound.bind(address)
            except OSError:
                continue
        return str(ipaddress.ip_address(address[0]))
    return None


def fetch(url: str, *, timeout_s: float) -> bytes:
    """Returns what a URL answers; raises OSError where that is no 200, or nothing."""
    handlers = []
    if is_here(urllib.parse.urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=timeout_s) as response:
            return bytes(response.read())
    except http.client.HTTPException as exc:
        raise OSError(f"{url} answers with what is no HTTP: {exc!r}") from exc


def is_here(host: str) -> bool:
    """Whether a name or an address is this machine's own."""
    try:
        return local_address(host) is not None
    except (OSError, UnicodeError):
        return False
