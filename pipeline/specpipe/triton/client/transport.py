"""What the client needs of a protocol: http_transport.py and grpc_transport.py have one each."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from specpipe.errors import to_sentence

Responses = Generator[Mapping[str, Any], None, None]
"""The outputs of each response by name; closing it early cancels the request."""


@dataclass(frozen=True)
class Served:
    """What a model's configuration says of its answers."""

    is_decoupled: bool
    has_finish_reason: bool


class Transport(Protocol):
    """Yields responses until the server says that there are no more, and raises NoAnswer else."""

    def ask_served(self) -> Served: ...

    def infer(self, inputs: Mapping[str, Any], *, is_decoupled: bool) -> Responses: ...

    def close(self) -> None: ...


def plain(message: str) -> str:
    """Returns the model's own sentence, without the name of the ensemble that Triton puts first."""
    return to_sentence(re.sub(r"^in ensemble '[^']*', ", "", message))
