"""The door to every file of a checkpoint: what is opened, and how much of it is read.

Opened are regular files that lie in the folder, or where the Hugging Face hub's cache keeps them:
`models--org--name/snapshots/COMMIT/config.json` is a link into `models--org--name/blobs/`. Whatever
else a link leads to would be read, and may be packaged and served, though no user named it. The
folder itself may be reached by links, since the user named it.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.errors import CheckpointError, show

LFS_POINTER = b"version https://git-lfs.github.com/spec/"

TEMPLATES_NAME = "additional_chat_templates"
"""The folder of a checkpoint that holds its chat templates but the default one; transformers (5,
utils/hub.py) writes and reads it.
"""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def quoted(value: object) -> str:
    """Writes a value of a file into a message, text in quotes."""
    return show(value if isinstance(value, int) else repr(value))


def is_there(path: Path) -> bool:
    """Returns whether a name leads anywhere; `check_file` decides whether it may be opened."""
    return os.path.exists(path)  # False also for a name that no file can have


def check_file(path: Path) -> None:
    """Raises CheckpointError for what is no regular file, and for links out of its folder."""
    try:
        folder = path.parent.parent if path.parent.name == TEMPLATES_NAME else path.parent
        folder, real = folder.resolve(strict=True), path.resolve(strict=True)
        mode = real.stat().st_mode
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path} does not exist; download the checkpoint again") from exc
    except (OSError, RuntimeError) as exc:  # RuntimeError: a loop of links, before Python 3.13
        reason = exc.strerror if isinstance(exc, OSError) else "a loop of links"
        raise CheckpointError(f"{path} cannot be read: {reason}") from exc
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise CheckpointError(f"{path} is {kind}, not a file; download the checkpoint again")
    if not real.is_relative_to(folder) and not _is_hub_blob(folder, real):
        raise CheckpointError(
            f"{path} is a link to {real}, which is outside the checkpoint; copy that file "
            "into the folder, or name the folder in which it is"
        )


def _is_hub_blob(folder: Path, real: Path) -> bool:
    if len(folder.parts) < 3 or folder.parent.name != "snapshots":
        return False
    repository = folder.parents[1]
    blobs = repository / "blobs"
    return repository.name.startswith("models--") and real.is_relative_to(blobs.resolve())


def open_file(path: Path) -> BinaryIO:
    """Opens a file of a checkpoint; CheckpointError says why it is not opened."""
    check_file(path)
    try:
        return path.open("rb")
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}") from exc


def copy_file(path: Path, destination: Path) -> None:
    """Copies a file of a checkpoint, without its permissions."""
    destination.parent.mkdir(exist_ok=True)
    with open_file(path) as source, destination.open("wb") as copy:
        shutil.copyfileobj(source, copy)


def read_text(path: Path, limits: FileLimits, limit: str) -> str:
    """Reads a file in UTF-8; `limit` names the one that says how large it may be."""
    data = _read_bytes(path, limits, limit)
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise CheckpointError(f"{path} cannot be read: byte {exc.start} is not UTF-8") from exc


def _read_bytes(path: Path, limits: FileLimits, limit: str) -> bytes:
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        limits.check(limit, size, f"{path} has {size} bytes")
        data = file.read(size)
    if data.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file; run `git lfs pull` in {path.parent}"
        )
    return data


def read_json(
    path: Path, *, default: dict[str, Any] | None = None, limits: FileLimits = FILE_LIMITS
) -> dict[str, Any]:
    """Reads a JSON object; a missing file is the default, and an error where there is none."""
    if default is not None and not is_there(path):
        return default
    data = _read_bytes(path, limits, "max_json_bytes")
    return parse_json(data, f"{path} cannot be read")


def parse_json(data: bytes, fault: str) -> dict[str, Any]:
    """Parses a JSON object in UTF-8 in which no key stands twice; `fault` begins the message."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique_keys)
    except RecursionError as exc:
        raise CheckpointError(f"{fault}: it is nested too deeply") from exc
    except ValueError as exc:
        raise CheckpointError(f"{fault}: {exc}") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{fault}: expected a JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        double, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key '{show(double)}' stands twice")
    return value
