"""The one sentence in which a command ends: a failure, a refusal of the system, a fault of ours."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path

from specpipe.errors import SpecpipeError, to_sentence

_PACKAGE = Path(__file__).parent


def sentence(exc: Exception) -> str:
    """Returns what ended a command; a fault of ours is named by its place in the source."""
    if isinstance(exc, SpecpipeError):
        return str(exc)
    if isinstance(exc, OSError):
        return to_sentence(exc)
    if isinstance(exc, MemoryError):
        return "this machine has not enough memory for that"
    return to_sentence(
        f"a fault of specpipe itself, in {_place(exc)}: {type(exc).__name__}: {exc}; "
        "`specpipe --debug` before the command shows more, and a report of it is welcome"
    )


def flush_stdout() -> str | None:
    """Writes out what was printed; returns, as a sentence, why it cannot be.

    Python would say so at its end, with its own exit code 120. A closed pipe is no failure: its
    reader has read enough.
    """
    if sys.stdout is None:
        return None
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        reason = None
    except OSError as exc:
        reason = to_sentence(exc)
    else:
        return None
    # What is left in the buffer is written once more at the end of Python.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return reason


def _place(exc: Exception) -> str:
    """Returns the innermost line of ours that an exception came through."""
    frames = traceback.extract_tb(exc.__traceback__)
    our_frames = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    if not our_frames:
        return "its start"
    return f"{Path(our_frames[-1].filename).relative_to(_PACKAGE)}:{our_frames[-1].lineno}"
