"""What a caller may hand in to be called: to read the time, or to be told something."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since any moment, never going back."""

Log = Callable[[str], None]
"""Takes one line, which does not end in a newline."""
