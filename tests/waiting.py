"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""For what takes a second or two where nothing else runs: only a failure is waited for so long."""


def wait_until(condition: Callable[[], bool], *, seconds: float = PATIENCE_S) -> bool:
    """Returns whether a condition became true within some seconds.

    What it looks at must last, or be counted: a state that may pass by itself is not always seen.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return condition()
        time.sleep(0.02)
    return True
