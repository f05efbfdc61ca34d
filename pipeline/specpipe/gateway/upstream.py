"""What the front door asks of the servers behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from specpipe.errors import RequestError
from specpipe.triton.client.completion import Completion


class Busy(RequestError):
    """The queue of every server that could answer is full; try again after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Upstream(Protocol):
    """The servers behind the door."""

    def answer(
        self, inputs: Mapping[str, Any], *, sticky_key: str = ""
    ) -> AsyncGenerator[Completion, None]:
        """Yields an answer in chunks; closing the generator cancels the request.

        inputs      those of the ensemble by name; `stream` says whether the answer comes in parts
        sticky_key  requests of one key go to one server, while that is well

        Raises RequestError with what the server says against the request, Busy, and ServerError
        where none answers, or where a request fails after its first chunk.
        """

    async def is_ready(self) -> bool:
        """Returns whether a request would be answered now."""

    async def close(self) -> None:
        """Ends all connections."""
