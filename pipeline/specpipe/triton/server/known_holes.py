"""What a client can do to a Triton of some version, and who may reach such a one."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpipe.errors import ServerError

if TYPE_CHECKING:
    from specpipe.triton.server.installation import TritonBinary
    from specpipe.triton.server.options import ServeOptions

NEWER_IMAGE = "nvcr.io/nvidia/tritonserver:26.07-py3"

Version = tuple[int, ...]

# By the wheel's version, the only one that it names: the version of Triton that /v2 answered.
_OF_THE_WHEEL = {"0.7.0": "2.51.0"}


@dataclass(frozen=True)
class Hole:
    """What a request does, in which release of triton-inference-server that ended, and where.

    is_http      whether it comes in by HTTP alone
    ends_server  whether what the server is answering is lost
    """

    what: str
    fixed_in: Version
    source: str
    is_http: bool = True
    ends_server: bool = True


# The releases are the first tags of triton-inference-server/server with the change. All but the
# second were seen in 2.51; that one is NVIDIA's and a user's word, and some bodies of 6 MiB pass.
HOLES = (
    Hole("a body of a million chunks ends the server", (2, 59, 1), "server#8305, CVE-2025-23310"),
    Hole("a body of 4 MiB ends the server", (2, 59, 1), "server#8305, CVE-2025-23311"),
    Hole("a body of a million '[' ends the server", (2, 58, 0), "server#8172"),
    Hole(
        "to ask for the classes of a text output ends the server",
        (2, 59, 1),
        "server#8267",
        is_http=False,
    ),
    Hole(
        "an error tells the name of private memory, which is of use with the admin key alone",
        (2, 59, 1),
        "python_backend#403, CVE-2025-23320",
        is_http=False,
        ends_server=False,
    ),
)


def find_version(binary: TritonBinary, environment: Mapping[str, str]) -> str | None:
    """Returns the version of a tritonserver without starting it; None where nothing names it.

    NVIDIA's images have a file and a variable for it (build.py), a wheel has neither.
    """
    if binary.python_stub is not None:
        return _OF_THE_WHEEL.get(importlib.metadata.version("nvidia-pytriton"))
    try:
        return (binary.path.resolve().parents[1] / "TRITON_VERSION").read_text().strip()
    except OSError:
        return environment.get("TRITON_SERVER_VERSION") or None


def find(version: str | None, *, allow_http: bool = True) -> tuple[Hole, ...]:
    """Returns the holes that are open in a version; of an unknown version none is known."""
    number = _parse(version)
    if number is None:
        return ()
    return tuple(
        hole for hole in HOLES if number < hole.fixed_in and (allow_http or not hole.is_http)
    )


def describe(version: str | None, *, allow_http: bool = True) -> str:
    """Returns one line on the holes of a tritonserver."""
    if _parse(version) is None:
        return "unknown, as its version is: TRITON_SERVER_VERSION may tell it"
    holes = find(version, allow_http=allow_http)
    if not holes:
        return f"none in tritonserver {version}"
    return f"tritonserver {version}: {'; '.join(hole.what for hole in holes)}"


def check(version: str | None, options: ServeOptions) -> None:
    """Raises ServerError for a server that others could reach and end, unless that was allowed."""
    if options.allow_known_holes or _is_loopback(options.host):
        return
    is_known = _parse(version) is not None
    open_holes = find(version, allow_http=options.allow_http)
    holes = [hole.what for hole in open_holes if hole.ends_server]
    if is_known and not holes:
        return
    if is_known:
        reason = f"tritonserver {version} has known holes ({'; '.join(holes)})"
        cure = (
            f"serve with a newer one ({NEWER_IMAGE}), let others reach the front door alone "
            "(--openai HOST:PORT)"
        )
    else:
        reason = "the version of this tritonserver is unknown, and so are its holes"
        cure = "set TRITON_SERVER_VERSION to it"
    raise ServerError(
        f"{options.host} can be reached from elsewhere, and {reason}: {cure}, or add "
        "--allow-known-holes"
    )


def _parse(version: str | None) -> Version | None:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    return None if numbers is None else tuple(map(int, numbers.groups()))


def _is_loopback(host: str) -> bool:
    """Returns whether an address, or every address of a name, is this machine's own."""
    try:
        addresses = {str(address[4][0]) for address in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # UnicodeError: no name that DNS could have
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
