"""What passes is tried again, for a while: a server that is dead ends in one sentence."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from specpipe.errors import SpecpipeError, StoreError, to_sentence

PATIENCE_S = 60.0
"""How long a server may fail before a call does: a registry is restarted in less. A guess."""

CONNECT_S = 10.0
ANSWER_S = 30.0
"""Longest silence of a server that was asked. Guesses."""

_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 5.0
_PASSING = (errno.EBUSY, errno.EREMOTEIO, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

# By name, so that no library need be there: botocore, aiohttp, requests and urllib3, fsspec,
# paramiko. What refuses a password or a host key is of other classes.
_PASSING_NAMES = {
    "ChunkedEncodingError",
    "ClientConnectionError",
    "ClientConnectorError",
    "ClientPayloadError",
    "ConnectTimeout",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "EndpointConnectionError",
    "FSTimeoutError",
    "HTTPClientError",
    "IncompleteRead",
    "NoValidConnectionsError",
    "ProtocolError",
    "ReadTimeout",
    "ReadTimeoutError",
    "ResponseStreamingError",
    "SSHException",
    "ServerDisconnectedError",
}

_Result = TypeVar("_Result")


class Passing(Exception):
    """A refusal that may pass: an answer such as 503."""


class StoreFailed(StoreError):
    """A store does not answer or refuses, which says nothing of what it holds."""


def status_of(exc: BaseException) -> int | None:
    """Returns the HTTP status that a failure of S3's or GCS's library comes of."""
    for fault in _chain(exc):
        answer = getattr(fault, "response", None)  # botocore.exceptions.ClientError
        status = (
            answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(answer, dict)
            else getattr(fault, "code", None)  # gcsfs.retry.HttpError
        )
        if isinstance(status, int):
            return status
    return None


def passes(exc: BaseException) -> bool:
    """Returns whether a failure is one that may be gone at the next attempt."""
    status = status_of(exc) or 0
    # 409: another write of that name is under way (S3, "Conditional writes").
    return (
        status in (409, 429)
        or status >= 500
        or any(
            isinstance(fault, (ConnectionError, TimeoutError, EOFError, Passing))
            or type(fault).__name__ in _PASSING_NAMES
            or (isinstance(fault, OSError) and fault.errno in _PASSING)
            for fault in _chain(exc)
        )
    )


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def words(exc: BaseException) -> str:
    """Returns why a store failed, in words that hold nothing of what was sent to it.

    A library's message may have the request in it, and with that a key or a signature.
    """
    for fault in _chain(exc):
        if isinstance(fault, PermissionError) and fault.filename is not None:
            return to_sentence(fault)  # of this machine
        if isinstance(fault, PermissionError) or "Credentials" in type(fault).__name__:
            return "access is denied; see the credentials in the environment"
        if isinstance(fault, Passing):
            return str(fault)
        if isinstance(fault, ConnectionRefusedError):
            return "the connection is refused"
        if isinstance(fault, TimeoutError) or "Timeout" in type(fault).__name__:
            return "it does not answer in time"
    if status := status_of(exc):
        return f"it answers {status}"
    if passes(exc):
        return "it does not answer, or the connection broke"
    if isinstance(exc, OSError) and exc.strerror and type(exc).__module__ == "builtins":
        return to_sentence(OSError(exc.errno, exc.strerror).strerror or "")
    return f"{type(exc).__name__}"


class Patience:
    """Calls a store again while it fails for a reason that may pass.

    url  what messages name it by, without credentials
    """

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        self.url = url
        self._patience_s = patience_s

    def __call__(self, call: Callable[[], _Result]) -> _Result:
        """Returns what a call returns; raises StoreError for what does not pass in time."""
        attempts = Attempts(self)
        while True:
            try:
                return call()
            except Exception as exc:
                attempts.wait(exc)

    def error(self, exc: BaseException, after_s: float = 0.0) -> StoreFailed:
        """Returns the error for a call that failed."""
        tried = f", tried again for {after_s:.0f} s" if after_s >= 1 else ""
        return StoreFailed(f"store {self.url}: {words(exc)}{tried}")

    @property
    def seconds(self) -> float:
        return self._patience_s


class Attempts:
    """The attempts at one call; whatever comes of one, `progress` gives them all their time."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.progress()

    def progress(self) -> None:
        """Begins anew, since the store has answered something."""
        self._began = time.monotonic()
        self._delay_s = _FIRST_DELAY_S

    def wait(self, exc: Exception) -> None:
        """Waits before the next attempt; raises what is no use to try again, or for too long."""
        if isinstance(exc, SpecpipeError):
            raise exc
        # The caller tells by these what is there; everything else is a sentence.
        if isinstance(exc, (FileNotFoundError, FileExistsError)) and not passes(exc):
            raise exc
        waited_s = time.monotonic() - self._began
        if not passes(exc) or waited_s + self._delay_s > self._patience.seconds:
            raise self._patience.error(exc, waited_s) from exc
        # Several wait for one server, and should not come back at one moment.
        time.sleep(self._delay_s * random.uniform(0.5, 1.0))
        self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)
