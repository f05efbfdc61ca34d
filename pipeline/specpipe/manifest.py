"""What stands beside an artifact, and the comparison of recorded files with those of today.

Where times are trusted, a file with the recorded path, size and modification time counts as
unchanged; anything else is hashed, so a file that was touched, copied or fetched again still counts
as the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

_FORMAT = 1
_BUFFER_BYTES = 1 << 20
# Coarsest tick of file times on Linux (10 ms at 100 Hz), doubled.
_TIME_TICK_NS = 20_000_000


@dataclass(frozen=True)
class FileRecord:
    """One file as it was when it was read."""

    size: int
    mtime_ns: int
    sha256: str

    def has_times_of(self, status: os.stat_result) -> bool:
        return (self.size, self.mtime_ns) == (status.st_size, status.st_mtime_ns)


Files = Mapping[str, FileRecord]  # by path below the root, with "/"; a root that is a file: "."


@dataclass(frozen=True)
class InputRecord:
    """One input, a file or a folder, and every file that it consists of."""

    path: str
    files: Files


@dataclass(frozen=True)
class Manifest:
    """What stands beside an artifact."""

    stage: str
    inputs: tuple[InputRecord, ...]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    outputs: Files
    build: Mapping[str, Any]  # provenance; decides nothing

    def write(self, path: Path) -> None:
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True)
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(text + "\n")
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def read_manifest(artifact: Path) -> Manifest | None:
    """Returns the manifest of an artifact; None where there is none that this version can read."""
    try:
        data = json.loads(manifest_path(artifact).read_text())
        if data.pop("format") != _FORMAT:
            return None
        data["inputs"] = tuple(
            InputRecord(entry["path"], _files_from_json(entry["files"])) for entry in data["inputs"]
        )
        data["outputs"] = _files_from_json(data["outputs"])
        return Manifest(**data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def manifest_path(artifact: Path) -> Path:
    return artifact.with_name(f"{artifact.name}.manifest.json")


def _files_from_json(data: Mapping[str, Mapping[str, Any]]) -> dict[str, FileRecord]:
    return {name: FileRecord(**record) for name, record in data.items()}


def compare_files(root: Path, old: Files, *, trust_times: bool) -> tuple[dict[str, str], Files]:
    """Returns what differs from the records, by name, and the equal files with today's times."""
    present = _files_below(root)
    differences = {name: "is gone" for name in old if name not in present}
    current = {}
    for name, path in present.items():
        if name not in old:
            differences[name] = "is new"
            continue
        try:
            record = _equal_record(path, old[name], trust_times)
        except FileNotFoundError:  # another build is just replacing the artifact
            differences[name] = "is gone"
            continue
        if record is None:
            differences[name] = "changed"
        else:
            current[name] = record
    return differences, current


def damage(differences: Mapping[str, str]) -> list[str]:
    """Returns sentences for what differs between an artifact and the records of its outputs."""
    words = {"is new": "was not built", "changed": "is not what was built", "is gone": "is missing"}
    return [f"file {name} {words[what]}" for name, what in differences.items()]


def _equal_record(path: Path, old: FileRecord, trust_times: bool) -> FileRecord | None:
    """Returns the record with the file's time of today, or None if the file is not the same."""
    status = path.stat()
    if trust_times and old.has_times_of(status):
        return old
    if old.size != status.st_size or old.sha256 != _digest(path, status):
        return None
    return replace(old, mtime_ns=status.st_mtime_ns)


def _files_below(root: Path) -> dict[str, Path]:
    """Returns the files that make up an input or an artifact, by name; links to files count."""
    if root.is_file():
        return {".": root}
    found = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s != "__pycache__"]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                found[path.relative_to(root).as_posix()] = path
    return dict(sorted(found.items()))


def record_files(root: Path) -> dict[str, FileRecord]:
    """Records all files of an input or an artifact; hashes as many at once as there are cores."""
    files = _files_below(root)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(files, pool.map(_record, files.values()), strict=True))


def _record(path: Path) -> FileRecord:
    status = path.stat()
    return FileRecord(status.st_size, status.st_mtime_ns, _digest(path, status))


# An artifact is hashed when it is made, and is then an input of the next stage; packaging links
# engines into the repository. Within one build each of them is read once.
_digests: dict[tuple[int, int, int, int], str] = {}


def _digest(path: Path, status: os.stat_result) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if key not in _digests:
        # A change within the same tick of the clock would leave the modification time as it is.
        age_ns = time.time_ns() - status.st_mtime_ns
        if 0 <= age_ns < _TIME_TICK_NS:
            time.sleep((_TIME_TICK_NS - age_ns) / 1e9)
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BUFFER_BYTES):
                digest.update(block)
        _digests[key] = digest.hexdigest()
    return _digests[key]
