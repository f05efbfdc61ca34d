"""Marks in a text that comes in pieces."""

from __future__ import annotations

SPACE = " \t\n\r"

_MOST_SPACE = 256
"""Characters of white space that wait for what follows; a model may write them without end."""


def num_certain(text: str, mark: str) -> int:
    """Returns how much of a text can be passed on before more comes: not what may begin a mark, nor
    the white space before that.
    """
    most = min(len(mark) - 1, len(text))
    held = next((n for n in range(most, 0, -1) if mark.startswith(text[-n:])), 0)
    return num_trimmed(text[: len(text) - held])


def num_trimmed(text: str) -> int:
    """Returns the length of a text less the white space at its end."""
    return max(len(text.rstrip(SPACE)), len(text) - _MOST_SPACE)
