"""The record beside an artifact, and the comparison of recorded files with those of today.

Where times are trusted, a file with the recorded size, times and inode counts as unchanged. The
time of its last change of status (ctime, inode(7)) is set by the kernel alone, so that what was
written over or replaced is seen even where its size and modification time were kept. Anything else
is hashed, so that a file that was touched, moved, copied or fetched again still counts as the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from specpipe.machine.own_json import read_object
from specpipe.machine.signals import thread_pool

MANIFEST_SUFFIX = ".manifest.json"
_FORMAT = 1  # of manifests; one of another format counts as none
_BUFFER_BYTES = 1 << 20  # read at a time, to be hashed while it is in a core's cache: a guess
# Coarsest tick of file times on Linux (10 ms at 100 Hz), doubled.
_TIME_TICK_NS = 20_000_000


@dataclass(frozen=True)
class FileRecord:
    """One file as it was when it was read.

    ctime_ns, inode  0 where an earlier specpipe wrote the record, which no file has
    """

    size: int
    mtime_ns: int
    sha256: str
    ctime_ns: int = 0
    inode: int = 0

    @classmethod
    def of(cls, status: os.stat_result, sha256: str) -> FileRecord:
        return cls(status.st_size, status.st_mtime_ns, sha256, status.st_ctime_ns, status.st_ino)

    def is_untouched(self, status: os.stat_result) -> bool:
        """Returns whether the file was not written, replaced, or changed in any other way."""
        return (self.size, self.mtime_ns, self.ctime_ns, self.inode) == (
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
        )


Files = Mapping[str, FileRecord]  # by path below the root, with "/"; a root that is a file: "."


@dataclass(frozen=True)
class InputRecord:
    """One input, a file or a folder, and every file that it consists of."""

    path: str
    files: Files


@dataclass(frozen=True)
class Manifest:
    """The record beside an artifact: what it was made from, and what it is."""

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


_MANIFESTS = TypeAdapter(Manifest)


def read_manifest(artifact: Path) -> Manifest | None:
    """Returns the manifest of an artifact; None where there is none that this version can read."""
    return parse_manifest(manifest_path(artifact))


def parse_manifest(path: Path) -> Manifest | None:
    """Returns what a manifest's file says; None where this version cannot read it."""
    try:
        data = read_object(path)
        return _MANIFESTS.validate_python(data) if data.pop("format", None) == _FORMAT else None
    except (OSError, ValueError):
        return None


def manifest_path(artifact: Path) -> Path:
    named = artifact if artifact.name else artifact.absolute()
    return named.with_name(named.name + MANIFEST_SUFFIX)


@dataclass(frozen=True)
class Hashed:
    """What was read to get digests."""

    num_files: int
    num_bytes: int
    duration_s: float

    def __add__(self, other: Hashed) -> Hashed:
        return Hashed(
            self.num_files + other.num_files,
            self.num_bytes + other.num_bytes,
            self.duration_s + other.duration_s,
        )

    @property
    def amount(self) -> str:
        """How much it was, in words: the same in each run."""
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        return f"{files} hashed, {self.num_bytes / 1e6:,.1f} MB"

    def __str__(self) -> str:
        speed = self.num_bytes / 1e9 / max(self.duration_s, 1e-9)
        return f"{self.amount} at {speed:.2f} GB/s"


@dataclass(frozen=True)
class Compared:
    """Files compared with their records.

    differences  what differs, by name
    current      the equal files with what they are today
    """

    differences: Mapping[str, str]
    current: Files
    hashed: Hashed


def compare_files(root: Path, old: Files, *, trust_times: bool) -> Compared:
    """Compares the files below `root` with records; without `trust_times` all of them are hashed.

    As many are hashed at once as there are cores.
    """
    present = files_below(root)
    paths = {name: path for name, path in present.items() if name in old}
    touched = [n for n, path in paths.items() if not (trust_times and _is_untouched(path, old[n]))]
    today = {name: _Today(old[name]) for name in paths}
    started = time.monotonic()
    if touched:
        with thread_pool(len(os.sched_getaffinity(0))) as pool:
            records = pool.map(lambda name: _today(paths[name], old[name]), touched)
            today |= zip(touched, records, strict=True)
    duration_s = time.monotonic() - started
    differences = {name: "is gone" for name in old if name not in present}
    current = {}
    for name in present:
        if name not in old:
            differences[name] = "is new"
        elif (record := today[name].record) is None:  # another build is just replacing the artifact
            differences[name] = "is gone"
        elif record.sha256 != old[name].sha256:
            differences[name] = "changed"
        else:
            current[name] = record
    sizes = [file.num_bytes_read for file in today.values() if file.num_bytes_read is not None]
    return Compared(differences, current, Hashed(len(sizes), sum(sizes), duration_s))


def file_faults(differences: Mapping[str, str]) -> list[str]:
    """Returns sentences for what differs between an artifact and the records of its outputs."""
    words = {"is new": "was not built", "changed": "is not what was built", "is gone": "is missing"}
    return [f"file {name} {words[difference]}" for name, difference in differences.items()]


@dataclass(frozen=True)
class _Today:
    """A file as it is now; without a record it is gone, without a digest its size differs."""

    record: FileRecord | None
    num_bytes_read: int | None = None


def _is_untouched(path: Path, old: FileRecord) -> bool:
    try:
        return old.is_untouched(path.stat())
    except FileNotFoundError:
        return False


def _today(path: Path, old: FileRecord) -> _Today:
    try:
        status = path.stat()
        if old.size != status.st_size:
            return _Today(FileRecord.of(status, ""))
        was_read = _key(status) in _digests
        record = FileRecord.of(status, _digest(path, status))
        return _Today(record, None if was_read else record.size)
    except FileNotFoundError:
        return _Today(None)


def files_below(root: Path) -> dict[str, Path]:
    """Returns the files that make up an input or an artifact, by name; links to files count."""
    if root.is_file():
        return {".": root}
    files = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s != "__pycache__"]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                files[path.relative_to(root).as_posix()] = path
    return dict(sorted(files.items()))


def record_files(root: Path) -> dict[str, FileRecord]:
    """Records all files of an input or an artifact; hashes as many at once as there are cores."""
    files = files_below(root)
    with thread_pool(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(files, pool.map(record_file, files.values()), strict=True))


def record_file(path: Path) -> FileRecord:
    """Records one file; its digest is that of before where this process read it unchanged."""
    status = path.stat()
    return FileRecord.of(status, _digest(path, status))


# An artifact is hashed when it is made, and is then an input of the next stage; packaging links
# engines into the repository. Within one build each of them is read once.
_digests: dict[tuple[int, ...], str] = {}


def _key(status: os.stat_result) -> tuple[int, ...]:
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _digest(path: Path, status: os.stat_result) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    key = _key(status)
    if key not in _digests:
        # A change within the same tick of the clock would leave the time of change as it is.
        age_ns = time.time_ns() - status.st_ctime_ns
        if 0 <= age_ns < _TIME_TICK_NS:
            time.sleep((_TIME_TICK_NS - age_ns) / 1e9)
        with path.open("rb") as file:
            _digests[key] = hash_file(file).hexdigest()
    return _digests[key]


def hash_file(file: BinaryIO) -> hashlib._Hash:
    """Returns the SHA-256 of what a file holds from where it stands, to be gone on with."""
    digest = hashlib.sha256()
    while block := file.read(_BUFFER_BYTES):
        digest.update(block)
    return digest


def read_anew() -> None:
    """Forgets what was hashed in this process, for a command that is to read it all itself."""
    _digests.clear()


@contextmanager
def relinked(files: Iterable[Path]) -> Iterator[None]:
    """Keeps digests of files whose hard links are made or removed meanwhile, by this process.

    That is a change of status to the kernel, so that they would all be read again.
    """
    before = [(path, path.stat()) for path in files]
    yield
    for path, was in before:
        if (digest := _digests.get(_key(was))) is None:
            continue
        now = path.stat()
        if _key(now)[:-1] == _key(was)[:-1]:
            _digests[_key(now)] = digest
