"""The door to JSON that specpipe itself wrote: results, manifests, and what stands in a repository.

Between writing and reading anything may have come over such a file.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specpipe.errors import show, to_sentence

_MAX_BYTES = 256 << 20
"""The records of a long benchmark take some MB."""


def read_object(path: Path, *, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """Reads a JSON object; OSError or ValueError says why it cannot be read."""
    return parse_object(read_bytes(path, max_bytes=max_bytes))


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """Reads a file; OSError or ValueError says why it cannot be read."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a file")
    if status.st_size > max_bytes:
        raise ValueError(f"it has {status.st_size} bytes, expected at most {max_bytes}")
    with path.open("rb") as file:
        return file.read(status.st_size)


def parse_object(data: bytes) -> dict[str, Any]:
    """Returns the JSON object of a file; ValueError says why it is none."""
    try:
        value = json.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as exc:
        raise ValueError(f"byte {exc.start} is not UTF-8") from None
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object, a key a line."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def reason(exc: Exception) -> str:
    """Returns in a few words why a file cannot be read, without repeating what it holds."""
    if isinstance(exc, ValidationError):
        fault = exc.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        return to_sentence(f"{show(place)}: {fault['msg']}" if place else fault["msg"])
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    if isinstance(exc, KeyError):
        return f"it has no {show(exc.args[0])}"
    return to_sentence(exc)
