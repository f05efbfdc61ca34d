"""The versions that are on this machine: `engines/NAME/versions/N/`, and a note beside each.

The note, `.N.json`, says what version N consists of, and what its files were when they came: one
that was not touched since needs not be hashed again. It is this machine's own, and no part of what
is signed.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from pydantic import TypeAdapter

from specpipe.build import cache
from specpipe.errors import show
from specpipe.machine.callables import Log
from specpipe.machine.manifest import Compared, FileRecord, compare_files
from specpipe.machine.own_json import read_object, write_object
from specpipe.machine.signals import deferred
from specpipe.machine.whole_file import written_whole
from specpipe.runtimes.repository_layout import ENSEMBLE, VERSION
from specpipe.stores.store import Blob, VersionRecord

REPOSITORY_NAME = "model_repo"


@dataclass(frozen=True, kw_only=True)
class LocalVersion:
    """A version on this machine.

    store  where it was published or fetched
    files  what its files were when it was last looked at, by path below the folder
    """

    folder: Path
    number: int
    digest: str
    store: str
    files: Mapping[str, FileRecord]

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    @property
    def repository(self) -> Path:
        return self.folder / REPOSITORY_NAME


_NOTES = TypeAdapter(LocalVersion)


@contextmanager
def locked(versions: Path, work: str, log: Log) -> Iterator[None]:
    """Keeps what else publishes, promotes or prunes this pair on this machine waiting."""
    versions.mkdir(parents=True, exist_ok=True)
    lock = FileLock(versions / f".{work}.lock")
    with cache.locked(lock, lambda: log(f"another {work} of this pair goes on, waiting")):
        yield


def local_numbers(versions: Path) -> list[int]:
    """Returns the numbers of the versions that have a folder here, in order."""
    names = [path.name for path in versions.glob("[1-9]*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def find_local(versions: Path, number: int) -> LocalVersion | None:
    """Returns a version that is here, as its note has it; None where either is missing."""
    folder = versions / str(number)
    try:
        data = read_object(_note_path(folder))
        version = _NOTES.validate_python({**data, "folder": folder})
    except (OSError, ValueError):  # it is fetched again then, from what is whole of it
        return None
    return version if version.number == number and folder.is_dir() else None


def note(folder: Path, record: VersionRecord, store: str) -> LocalVersion:
    """Notes what a folder is that was just made of checked files, and returns it."""
    files = {
        name: FileRecord.of((folder / name).stat(), blob.sha256)
        for name, blob in record.files.items()
    }
    version = LocalVersion(
        folder=folder, number=record.number, digest=record.digest, store=store, files=files
    )
    _write(version)
    return version


def check_whole(version: LocalVersion, *, trust_times: bool = True) -> Compared:
    """Compares a version with its note; what is found whole is not hashed again next time."""
    compared = compare_files(version.folder, version.files, trust_times=trust_times)
    if not compared.differences and compared.current != version.files:
        with suppress(OSError):  # a folder that only others may write to
            _write(dataclasses.replace(version, files=compared.current))
    return compared


def whole_version(versions: Path, number: int, log: Log) -> LocalVersion | None:
    """Returns a version that is here and whole; None, with a word on it, where it is not."""
    version = find_local(versions, number)
    if version is None:
        return None
    compared = check_whole(version)
    if compared.hashed.num_files:
        log(f"version {number}: touched since it was made, {compared.hashed}")
    if compared.differences:
        name, difference = next(iter(compared.differences.items()))
        more = f" and {len(compared.differences) - 1} more" if len(compared.differences) > 1 else ""
        log(f"version {number}: {show(name)} {difference}{more}: it is fetched again")
        return None
    return version


def contents(versions: Path) -> dict[Blob, Path]:
    """Returns the files of all versions here that nobody touched, by what they hold.

    They may be read, and are not to be linked: another link is a change of status (ctime), after
    which the file is hashed again, and Triton 2.51 may load anew the model that it belongs to.
    """
    found = {}
    for number in local_numbers(versions):
        if (version := find_local(versions, number)) is None:
            continue
        for name, file in version.files.items():
            if _is_untouched(version, name, file):
                found[Blob(file.sha256, file.size)] = version.folder / name
    return found


def put_in_place(staging: Path, record: VersionRecord, store: str) -> LocalVersion:
    """Gives a folder of checked files the name of its version, in place of one that is damaged."""
    folder = staging.with_name(str(record.number))
    # Triton wants the version's folder of an ensemble, which is empty, so that no file tells of it.
    (staging / REPOSITORY_NAME / ENSEMBLE / VERSION).mkdir(parents=True, exist_ok=True)
    with deferred():
        if os.path.lexists(folder):
            remove_folder(folder)
        staging.rename(folder)
        return note(folder, record, store)


def remove_local(versions: Path, number: int) -> int:
    """Removes a version from this machine; returns the bytes that this set free."""
    folder = versions / str(number)
    freed = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    with deferred():
        _note_path(folder).unlink(missing_ok=True)
        remove_folder(folder)
    return freed


def remove_folder(folder: Path) -> None:
    """Removes a folder at once: whoever looks finds all of it, or nothing."""
    leaving = folder.with_name(f".{folder.name}.leaving")
    shutil.rmtree(leaving, ignore_errors=True)
    if folder.is_dir() and not folder.is_symlink():
        folder.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)
    else:
        folder.unlink(missing_ok=True)


def _is_untouched(version: LocalVersion, name: str, file: FileRecord) -> bool:
    try:
        return file.is_untouched((version.folder / name).stat())
    except OSError:
        return False


def _write(version: LocalVersion) -> None:
    data = dataclasses.asdict(version)
    del data["folder"]
    with written_whole(_note_path(version.folder)) as staged:
        write_object(staged, data)


def _note_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.json")
