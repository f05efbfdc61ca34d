"""Where a server listens: its host, and ports that are free."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from specpipe.errors import ServerError

if TYPE_CHECKING:
    from specpipe.triton.server import ServeOptions

_PORTS = ("http_port", "grpc_port", "metrics_port")


def with_free_ports(options: ServeOptions) -> ServeOptions:
    """Replaces each port 0 by a free port."""
    with contextlib.ExitStack() as stack:
        ports = {}
        for name in _PORTS:
            if getattr(options, name) == 0:
                # Open until all are chosen, so that no two are the same.
                listener = stack.enter_context(socket.socket())
                listener.bind((options.host, 0))
                ports[name] = listener.getsockname()[1]
        return replace(options, **ports)


def check_ports(options: ServeOptions) -> None:
    """Another server on one of the ports would answer in our place until ours has failed."""
    for name in _PORTS:
        port = getattr(options, name)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((options.host, port))
            except OSError as exc:
                option = f"--{name.replace('_', '-')}"
                raise ServerError(
                    f"{options.host}:{port} cannot be listened on ({exc.strerror}): choose another "
                    f"port with {option}"
                ) from exc
