"""Marks in a text that comes in pieces."""

from __future__ import annotations


def num_held_back(text: str, mark: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of a mark."""
    most = min(len(mark) - 1, len(text))
    return next((n for n in range(most, 0, -1) if mark.startswith(text[-n:])), 0)
