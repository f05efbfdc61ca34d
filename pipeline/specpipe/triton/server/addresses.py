"""Where a server listens: its host in the form of each door of Triton, and free ports."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specpipe.errors import MOST_SHOWN, ServerError
from specpipe.machine.web import bracketed, local_address

if TYPE_CHECKING:
    from specpipe.triton.server.options import ServeOptions

_PORTS = ("http_port", "grpc_port", "metrics_port")


def resolve(options: ServeOptions) -> ServeOptions:
    """Returns options with the host's address; raises ServerError."""
    return replace(options, host=_resolve(options.host))


def settle(options: ServeOptions) -> tuple[ServeOptions, contextlib.ExitStack]:
    """Returns options with the host's address and a free port for each 0; raises ServerError.

    Until the second is closed, nobody else gets these ports by chance: they are bound, which keeps
    no one from them who asks for them by number, with SO_REUSEADDR as Triton does.
    """
    options = resolve(options)
    with contextlib.ExitStack() as kept:
        ports: dict[str, Any] = {}
        for name in _ports(options):
            port = getattr(options, name)
            if not 0 <= port <= 65535:
                raise ServerError(f"{_option(name)} {port} is no port: choose one up to 65535")
            if port == 0:
                listener = kept.enter_context(socket.socket(_family(options.host)))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((options.host, 0))
                port = listener.getsockname()[1]
            elif port in ports.values():
                first = next(other for other in ports if ports[other] == port)
                raise ServerError(
                    f"{_option(first)} and {_option(name)} are both {port}: choose two ports"
                )
            ports[name] = port
        return replace(options, **ports), kept.pop_all()


def check_ports(options: ServeOptions) -> None:
    """Raises ServerError where a port is taken: the other server would answer in our place."""
    for name in _ports(options):
        port = getattr(options, name)
        with socket.socket(_family(options.host)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((options.host, port))
            except OSError as exc:
                raise ServerError(
                    f"{bracketed(options.host)}:{port} cannot be listened on ({exc.strerror}): "
                    f"choose another port with {_option(name)}"
                ) from exc


def check_apart(options: ServeOptions, host: str, port: int) -> None:
    """Raises ServerError where the door for OpenAI's clients stands at a port of Triton's: it is
    bound there but does not listen yet, so that the system lets both.
    """
    for name in _ports(options):
        meet = options.host == host or any(
            ipaddress.ip_address(address).is_unspecified for address in (options.host, host)
        )
        if meet and getattr(options, name) == port:
            raise ServerError(f"{_option(name)} and --openai are both {port}: choose two ports")


def client_host(host: str) -> str:
    """Returns the host by which this machine asks its own server, as a URL writes it."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return bracketed(host)


def http_address(host: str) -> str:
    """Returns a host as Triton's options for HTTP and metrics take it.

    libevent knows an IPv6 address by the word before it.
    """
    return f"ipv6:{host}" if ":" in host else host


def _resolve(host: str) -> str:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    option = f"--host {host[:MOST_SHOWN]!r}"
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        if not bare or ":" in bare or "/" in bare:
            raise ServerError(
                f"{option} is no host: give a name or an address alone (ports have options of "
                "their own)"
            ) from None
    else:
        if address.version == 6 and address.scope_id is not None:
            raise ServerError(f"{option}: Triton takes no scope: give an address without one")
        if address.version == 6 and address.ipv4_mapped is not None:
            bare = str(address.ipv4_mapped)
    try:
        address_text = local_address(bare)
    except (OSError, UnicodeError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else "no valid name"
        raise ServerError(f"{option} cannot be resolved ({reason}): give an address") from exc
    if address_text is None:
        raise ServerError(
            f"{option} is no address of this machine: 127.0.0.1 serves this machine alone, 0.0.0.0 "
            "whoever reaches it"
        )
    return address_text


def _ports(options: ServeOptions) -> tuple[str, ...]:
    """Returns the options that name a port that will be listened on."""
    return _PORTS if options.allow_http else _PORTS[1:]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
