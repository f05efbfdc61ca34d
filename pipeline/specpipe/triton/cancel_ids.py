"""Requests that whoever sent them may cancel by an id of their own.

Triton 2.51 tells no model that the client of an ensemble is gone before something is sent to it: a
request that waits, or answers as a whole, would run to its end for nobody. Its id is handed on to
the models, though. So a caller that has the secret (secret.py) gives its request a random id that
begins as here, and may send the same to `speculative` as `cancel`. Ids of others are not kept:
clients choose `1`, `2`, `3`.
"""

from __future__ import annotations

import uuid

from specpipe.triton.serving.tensor_values import LONGEST_ID

_PREFIX = "cancellable-"


def new_cancel_id() -> str:
    """Returns an id that nobody else has or can guess."""
    return f"{_PREFIX}{uuid.uuid4().hex}"


class CancelIds:
    """The streams of open requests by the ids that their senders gave; for several threads."""

    def __init__(self) -> None:
        self._streams: dict[str, str] = {}

    def open(self, request_id: str, stream_id: str) -> None:
        """Takes in that a request begins."""
        if request_id.startswith(_PREFIX) and len(request_id) <= LONGEST_ID:
            self._streams[request_id] = stream_id

    def close(self, request_id: str, stream_id: str) -> None:
        """Takes in that a request ended."""
        if self._streams.get(request_id) == stream_id:
            del self._streams[request_id]

    def stream_id(self, cancel_id: str) -> str:
        """Returns which stream is meant: the one of that id, or the one that is called so."""
        return self._streams.get(cancel_id, cancel_id)
