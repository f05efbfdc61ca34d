"""The files of a version, all of them, by digest."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from specpipe import progress
from specpipe.errors import SignatureError, show, to_sentence
from specpipe.machine.manifest import record_file
from specpipe.machine.signals import thread_pool
from specpipe.release.release_file import SIGNATURE_NAME
from specpipe.release.trust.signature import Files

_LISTED = 3  # files that a message names; the others are counted


def digests(folder: Path) -> Files:
    """Returns the SHA-256 of every file of a version but its signature, by path with "/".

    Hidden files and what lies in `__pycache__` count, since Python would run it. A link is refused:
    what it leads to may be another file when it is loaded. Folders without files do not count.
    """
    paths = _paths(folder)
    total = sum(path.stat().st_size for path in paths.values())
    with progress.phase(f"hash {folder}"), thread_pool(len(os.sched_getaffinity(0))) as pool:
        records = pool.map(record_file, paths.values())
        done = progress.counted(records, total, "bytes", lambda record: record.size)
        return {name: record.sha256 for name, record in zip(paths, done, strict=True)}


def _paths(folder: Path) -> dict[str, Path]:
    paths = {}
    for parent, folders, names in os.walk(folder, onerror=_raise):
        for name in (*folders, *names):
            path = Path(parent, name)
            below = path.relative_to(folder).as_posix()
            kind = path.lstat().st_mode
            if stat.S_ISREG(kind):
                paths[below] = path
            elif not stat.S_ISDIR(kind):
                what = "a link" if stat.S_ISLNK(kind) else "neither file nor folder"
                raise SignatureError(
                    f"{folder}: {show(below)} is {what}, which no signature covers: a version has "
                    "files alone"
                )
    paths.pop(SIGNATURE_NAME, None)
    return dict(sorted(paths.items()))


def _raise(error: OSError) -> None:
    raise SignatureError(f"a version cannot be read: {to_sentence(error)}") from error


def differences(signed: Files, present: Files) -> Mapping[str, str]:
    """Returns how the files of a folder differ from those that were signed, by name."""
    found = dict.fromkeys(signed.keys() - present.keys(), "is gone")
    found |= dict.fromkeys(present.keys() - signed.keys(), "was added")
    both = signed.keys() & present.keys()
    found |= {name: "was changed" for name in both if signed[name] != present[name]}
    return dict(sorted(found.items()))


def listed(found: Mapping[str, str]) -> str:
    """Writes differences into a message: the first few, and how many more there are."""
    shown = ", ".join(f"{show(name)} {what}" for name, what in list(found.items())[:_LISTED])
    return shown if len(found) <= _LISTED else f"{shown}, and {len(found) - _LISTED} more"
