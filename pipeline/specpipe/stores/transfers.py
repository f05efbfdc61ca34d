"""Many files moved at once: each checked against its SHA-256, and gone on with where it stopped."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from specpipe import progress
from specpipe.errors import StoreError, to_sentence
from specpipe.machine.manifest import hash_file
from specpipe.machine.memory import disk_shortage, existing_parent
from specpipe.machine.signals import thread_pool
from specpipe.stores.patience import Attempts, Patience
from specpipe.stores.store import Blob, Transferred

_BLOCK_BYTES = 1 << 20  # hashed and written while it is in a core's cache: a guess

Read = Callable[[Blob, int], Iterator[bytes]]
"""Yields the content of a blob from an offset on."""
Put = Callable[[Blob, Iterable[bytes]], None]
"""Stores the content of a blob; an exception of the blocks leaves nothing."""
ReportDamage = Callable[[Blob], str]
"""Notes that a blob has another digest than its name says; returns what to do about it."""


def in_parallel(calls: Collection[Callable[[], object]], num_threads: int) -> None:
    """Makes calls, several at once; raises the first failure, and begins none after it."""
    with thread_pool(max(1, min(num_threads, len(calls)))) as pool:
        futures: list[Future[object]] = [pool.submit(call) for call in calls]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()


def upload(
    files: Mapping[Blob, Path],
    missing: Collection[Blob],
    put: Put,
    *,
    patience: Patience,
    num_threads: int,
) -> Transferred:
    """Puts the missing ones there; a broken one begins anew, and what is whole stays."""
    num_bytes = sum(blob.size for blob in missing)
    stop = threading.Event()
    with progress.count(num_bytes, "bytes") as counter:

        def send(blob: Blob) -> None:
            attempts = Attempts(patience)
            while True:
                sent = _Sent(counter)
                try:
                    put(blob, sent.counting(_checked(blob, files[blob], stop)))
                    return
                except Exception as exc:
                    sent.take_back()
                    attempts.wait(exc)

        _all(lambda: in_parallel([_of(send, b) for b in sorted(missing)], num_threads), stop)
    present = sum(blob.size for blob in files if blob not in missing)
    return Transferred(len(missing), num_bytes, present)


def download(
    files: Mapping[Path, Blob],
    read: Read,
    report_damage: ReportDamage,
    *,
    patience: Patience,
    num_threads: int,
) -> Transferred:
    """Fetches contents to paths, each of which appears when it is whole and checked.

    What is there already is left; what several paths hold is fetched once, and linked.
    """
    with _naming_os_faults(patience.url):
        wanted = _Wanted.of(files, num_threads)
        to_fetch = {blob: paths[0] for blob, paths in wanted.missing.items()}
        left = {blob: blob.size - _partial_bytes(blob, path) for blob, path in to_fetch.items()}
        _check_space({path: left[blob] for blob, path in to_fetch.items()})
    stop = threading.Event()
    with progress.count(sum(left.values()), "bytes") as counter:

        def fetch(blob: Blob) -> None:
            with _naming_os_faults(patience.url, to_fetch[blob]):
                _Fetch(blob, to_fetch[blob], read, report_damage, patience, counter, stop).run()

        _all(lambda: in_parallel([_of(fetch, b) for b in sorted(to_fetch)], num_threads), stop)
    with _naming_os_faults(patience.url):
        for paths in wanted.missing.values():
            for path in paths[1:]:
                _link(paths[0], path)
        for source, path in wanted.copies:
            _link(source, path)
    return Transferred(len(to_fetch), sum(left.values()), wanted.num_bytes_present)


class _Stopped(StoreError):
    """Another file of the same call failed."""


def _all(work: Callable[[], None], stop: threading.Event) -> None:
    """Does work in threads; when it fails, those that still run end soon."""
    try:
        work()
    finally:
        stop.set()


def _of(call: Callable[[Blob], None], blob: Blob) -> Callable[[], None]:
    return lambda: call(blob)


class _Sent:
    """What was counted of an attempt, to be taken back where it failed."""

    def __init__(self, counter: progress.Count) -> None:
        self._counter, self._amount = counter, 0

    def counting(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            yield block
            self._counter.advance(len(block))
            self._amount += len(block)

    def take_back(self) -> None:
        self._counter.advance(-self._amount)


def _checked(blob: Blob, path: Path, stop: threading.Event) -> Iterator[bytes]:
    """Yields a file; raises StoreError at its end where it is not what its digest says."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                _check_running(stop)
                digest.update(block)
                size += len(block)
                if size > blob.size:
                    break
                yield block
    except OSError as exc:
        raise StoreError(to_sentence(exc)) from exc
    if Blob(digest.hexdigest(), size) != blob:
        raise StoreError(f"{path} has changed since it was hashed: nothing of it was published")


def _check_running(stop: threading.Event) -> None:
    if stop.is_set():
        raise _Stopped("another file failed")


@dataclass
class _Fetch:
    """One content on its way to a path, beside which it grows."""

    blob: Blob
    path: Path
    read: Read
    report_damage: ReportDamage
    patience: Patience
    counter: progress.Count
    stop: threading.Event

    def run(self) -> None:
        with _locked_partial(self.blob, self.path) as (file, partial):
            digest, size = _resume(file, self.blob)
            was_begun = size > 0
            digest, size = self._receive(file, digest, size)
            if was_begun and self._is_other(digest, size):
                # What was there of it may be at fault: once more, all of it.
                self._restart(file, size)
                digest, size = self._receive(file, hashlib.sha256(), 0)
            if self._is_other(digest, size):
                self._restart(file, size)
                partial.unlink()
                advice = self.report_damage(self.blob)
                raise StoreError(
                    f"store {self.patience.url}: blob {self.blob.sha256} is damaged there, of "
                    f"which {size} of {self.blob.size} bytes were read: {advice}"
                )
            os.fsync(file.fileno())
            partial.replace(self.path)

    def _is_other(self, digest: hashlib._Hash, size: int) -> bool:
        return Blob(digest.hexdigest(), size) != self.blob

    def _restart(self, file: BinaryIO, size: int) -> None:
        file.truncate(0)
        file.seek(0)
        self.counter.advance(-size)

    def _receive(
        self, file: BinaryIO, digest: hashlib._Hash, size: int
    ) -> tuple[hashlib._Hash, int]:
        for block in self._arriving(size):
            _check_running(self.stop)
            file.write(block)
            digest.update(block)
            size += len(block)
            self.counter.advance(len(block))
        file.flush()
        return digest, size

    def _arriving(self, size: int) -> Iterator[bytes]:
        """Yields the content from an offset on, up to where the store has no more of it."""
        attempts = Attempts(self.patience)
        while size < self.blob.size:
            before = size
            try:
                for arrived in self.read(self.blob, size):
                    block = arrived[: self.blob.size - size]
                    size += len(block)
                    attempts.progress()
                    yield block
            except FileNotFoundError:
                raise StoreError(
                    f"store {self.patience.url} does not hold blob {self.blob.sha256}"
                ) from None
            except Exception as exc:
                attempts.wait(exc)
            else:
                if size == before:
                    return


@dataclass(frozen=True)
class _Wanted:
    """What of the files is there already, and what is not.

    missing  paths by content that none of them has
    copies   pairs of a path that has the content, and one that lacks it
    """

    missing: Mapping[Blob, list[Path]]
    copies: list[tuple[Path, Path]]
    num_bytes_present: int

    @classmethod
    def of(cls, files: Mapping[Path, Blob], num_threads: int) -> _Wanted:
        whole: dict[Path, bool] = {}
        in_parallel([_whole_into(whole, p, b) for p, b in files.items()], num_threads)
        by_blob: dict[Blob, list[Path]] = defaultdict(list)
        for path, blob in sorted(files.items()):
            by_blob[blob].append(path)
        missing, copies = {}, []
        for blob, paths in by_blob.items():
            lacking = [path for path in paths if not whole[path]]
            present = [path for path in paths if whole[path]]
            if not present:
                missing[blob] = lacking
            copies += [(present[0], path) for path in lacking if present]
        return cls(missing, copies, sum(blob.size for p, blob in files.items() if whole[p]))


def _whole_into(whole: dict[Path, bool], path: Path, blob: Blob) -> Callable[[], None]:
    def find() -> None:
        whole[path] = _is_whole(path, blob)

    return find


def _is_whole(path: Path, blob: Blob) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != blob.size:
        return False
    with path.open("rb") as file:
        return hash_file(file).hexdigest() == blob.sha256


def _partial(blob: Blob, path: Path) -> Path:
    return path.with_name(f".{path.name[:100]}.{blob.sha256[:16]}.partial")


def _partial_bytes(blob: Blob, path: Path) -> int:
    try:
        return min(_partial(blob, path).lstat().st_size, blob.size)
    except FileNotFoundError:
        return 0


@contextmanager
def _locked_partial(blob: Blob, path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Yields the file in which a content grows, which no other process writes meanwhile."""
    partial = _partial(blob, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(f"{path} is being fetched by another process") from None
            # Another one may just have given it its final name.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), partial.lstat()):
                    yield file, partial
                    return


def _resume(file: BinaryIO, blob: Blob) -> tuple[hashlib._Hash, int]:
    """Returns the digest and the size of what an earlier call fetched."""
    if os.fstat(file.fileno()).st_size > blob.size:
        file.truncate(0)
    file.seek(0)
    digest = hash_file(file)
    return digest, file.tell()


def _link(source: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name[:100]}.{os.getpid()}.partial")
    staged.unlink(missing_ok=True)
    try:
        try:
            os.link(source, staged)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(source, staged)
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _check_space(needed: Mapping[Path, int]) -> None:
    """Refuses a download that its file systems have no room for, before the first byte."""
    by_device: dict[int, int] = defaultdict(int)
    folders: dict[int, Path] = {}
    for path, num_bytes in needed.items():
        folder = existing_parent(path)
        device = folder.stat().st_dev
        folders.setdefault(device, folder)
        by_device[device] += num_bytes
    for device, num_bytes in by_device.items():
        if (shortage := disk_shortage(folders[device], num_bytes)) is not None:
            raise StoreError(f"{shortage} are to be fetched: make room")


@contextmanager
def _naming_os_faults(url: str, path: Path | None = None) -> Iterator[None]:
    """Raises one sentence for what this machine refuses while something is fetched."""
    try:
        yield
    except OSError as exc:
        if exc.filename is None and path is not None:
            exc.filename = str(path)
        raise StoreError(f"fetching from store {url}: {to_sentence(exc)}") from exc
