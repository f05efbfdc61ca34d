"""Where the door listens, and who may reach it there."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from specpipe.errors import ServerError, show
from specpipe.machine.web import bracketed, local_address

_UNSENT_MS = 60_000
"""After which a client that reads nothing is cut off, with its request: nothing else would end it
(tcp(7), TCP_USER_TIMEOUT).
"""


@dataclass(frozen=True)
class Listen:
    """An address of this machine, in numbers, and a port; 0: any free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def parse_listen(text: str) -> Listen:
    """Reads [HOST:]PORT; raises ServerError for what is none, or no address of this machine."""
    match = re.fullmatch(r"(?:(?P<host>\[[^\[\]]+\]|[^:\[\]]+):)?(?P<port>\d{1,5})", text)
    if match is None or int(match["port"]) > 65535:
        raise ServerError(f"{show(text)} is not [HOST:]PORT, as in 8080 or 0.0.0.0:8080")
    host = (match["host"] or "127.0.0.1").strip("[]")
    try:
        address = local_address(host)
    except (OSError, UnicodeError, ValueError):
        address = None
    if address is None:
        raise ServerError(f"{show(host)} is no address of this machine: give one, or 127.0.0.1")
    return Listen(address, int(match["port"]))


def check_open(listen: Listen, *, has_keys: bool, allow_no_keys: bool) -> None:
    """Raises ServerError where anyone who reaches the address would be answered."""
    if listen.is_loopback or has_keys or allow_no_keys:
        return
    raise ServerError(
        f"{listen.host} can be reached from elsewhere, and no keys are set: give --keys FILE or "
        "SPECPIPE_API_KEYS, or add --allow-no-keys"
    )


def bind(listen: Listen, *, unsent_ms: int = _UNSENT_MS) -> socket.socket:
    """Returns a socket that is bound, and does not listen yet; ServerError for a taken port."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unsent_ms)
        listener.bind((listen.host, listen.port))
    except OSError as exc:
        listener.close()
        raise ServerError(
            f"{listen} cannot be listened on ({exc.strerror}): choose another port"
        ) from exc
    return listener


def url_of(listener: socket.socket) -> str:
    """Returns the URL by which this machine asks whoever listens there."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://{bracketed(host)}:{port}"
