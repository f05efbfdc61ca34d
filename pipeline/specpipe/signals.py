"""Ctrl-C and SIGTERM as exceptions: a command that is asked to end leaves nothing behind.

Both are for the main thread, which alone may handle signals; elsewhere they change nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_Handler = Callable[[int, FrameType | None], None]


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Lets SIGTERM unwind the stack, as Ctrl-C does; SystemExit with 143."""
    with _handled(lambda number, frame: _leave(number), signal.SIGTERM):
        yield


@contextmanager
def signals_deferred() -> Iterator[Callable[[], None]]:
    """Yields a function that raises what Ctrl-C or SIGTERM would have raised since.

    For libraries that an exception may not interrupt, such as tritonclient's gRPC (2.73 then prints
    a traceback). A second signal does not wait.
    """
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if received:
            _leave(number)
        received.append(number)

    def leave_if_asked() -> None:
        if received:
            _leave(received[0])

    with _handled(remember, signal.SIGINT, signal.SIGTERM):
        yield leave_if_asked
    leave_if_asked()


def _leave(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def _handled(handler: _Handler, *numbers: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
