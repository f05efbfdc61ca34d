"""Contents by name in a place that fsspec reaches: what differs between places is in subclasses.

Everything that is written appears whole; what exists can be refused to be written again.
"""

from __future__ import annotations

import datetime
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from specpipe.errors import StoreError
from specpipe.stores.patience import status_of
from specpipe.stores.records import MAX_BYTES

BLOCK_BYTES = 8 << 20  # asked for at once: what a broken connection costs at most. A guess.
STAGING = "staging"
"""The folder of what is being written, where there are folders."""


@dataclass(frozen=True)
class Entry:
    """What is there: its size in bytes, and when it was written, in seconds since 1970."""

    size: int
    modified: float


class Objects(ABC):
    """Contents by names with "/", below a root; raises what fsspec and the libraries below it do.

    fs   how fsspec reaches the place
    root the path there that names are below
    """

    num_threads = 8

    def __init__(self, fs: Any, root: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/")

    def path(self, name: str) -> str:
        """Returns where a content is, as fsspec calls it."""
        return f"{self.root}/{name}"

    def entry(self, name: str) -> Entry | None:
        """Returns what is there by a name."""
        try:
            info = self.fs.info(self.path(name))
        except FileNotFoundError:
            return None
        return None if info["type"] == "directory" else _entry(info)

    def entries(self, prefix: str) -> dict[str, Entry]:
        """Returns what is below a folder, by whole name."""
        try:
            found = self._find(self.path(prefix))
        except FileNotFoundError:
            return {}
        start = len(self.path(""))
        return {path[start:]: _entry(info) for path, info in found.items() if len(path) > start}

    def _find(self, path: str) -> Any:
        return self.fs.find(path, detail=True)

    def read(self, name: str) -> bytes | None:
        """Returns a document; None where there is none."""
        entry = self.entry(name)
        if entry is None:
            return None
        if entry.size > MAX_BYTES:
            raise StoreError(f"{name} has {entry.size} bytes, expected at most {MAX_BYTES}")
        try:
            return self.read_range(name, 0, entry.size) if entry.size else b""
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes from `start` to before `end`, or to where the content ends."""
        return bytes(self.fs.cat_file(self.path(name), start=start, end=end))

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Writes a document, in place of what is there."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Writes a document where there is nothing; returns whether it did."""

    @abstractmethod
    def put(self, name: str, blocks: Iterable[bytes], size: int) -> None:
        """Writes a content that is large; what an exception of `blocks` ends does not appear."""

    def remove(self, name: str) -> None:
        """Removes a content, if it is there."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def leftovers(self) -> dict[str, Entry]:
        """Returns what interrupted writes left, by name."""
        return self.entries(STAGING)


class Buckets(Objects):
    """S3 and GCS: a request writes a whole content, or with a condition none."""

    def replace(self, name: str, data: bytes) -> None:
        with _naming_bucket(self.root):
            self.fs.pipe_file(self.path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        try:
            # If-None-Match: * (S3), ifGenerationMatch=0 (GCS)
            with _naming_bucket(self.root):
                self.fs.pipe_file(self.path(name), data, mode="create")
        except FileExistsError:
            return False
        except OSError as exc:
            if status_of(exc) == 412:  # said without the condition that is not met
                return False
            raise
        return True

    def put(self, name: str, blocks: Iterable[bytes], size: int) -> None:
        if size <= BLOCK_BYTES:
            self.replace(name, b"".join(blocks))
            return
        with _naming_bucket(self.root):
            file = self.fs.open(self.path(name), "wb", block_size=self._part_bytes(size))
            try:
                for block in blocks:
                    file.write(block)
            except BaseException:
                # close() would make a content of what was written so far.
                with suppress(Exception):
                    file.discard()
                file.closed = True
                raise
            file.close()

    @staticmethod
    def _part_bytes(size: int) -> int:
        """S3 takes 10,000 parts of a content at most."""
        return max(BLOCK_BYTES, -(-size // 9_000))


class Tree(Objects):
    """Files in folders: written in a folder of their own, and renamed when they are whole."""

    def replace(self, name: str, data: bytes) -> None:
        self.put(name, [data], len(data))

    def create(self, name: str, data: bytes) -> bool:
        staged = self._stage([data], len(data))
        try:
            self._make_parent(name)
            return self.rename_new(staged, self.path(name))
        finally:
            self._discard(staged)

    def put(self, name: str, blocks: Iterable[bytes], size: int) -> None:
        staged = self._stage(blocks, size)
        try:
            self._make_parent(name)
            self.fs.mv(staged, self.path(name))
        except BaseException:
            self._discard(staged)
            raise

    @abstractmethod
    def rename_new(self, staged: str, path: str) -> bool:
        """Gives a file a name that none has; returns whether it did."""

    @abstractmethod
    def settle(self, file: Any) -> None:
        """Waits until what was written to an open file would outlive the machine."""

    def _find(self, path: str) -> Any:
        # Without, a folder that cannot be read would be one with nothing in it.
        return self.fs.find(path, detail=True, on_error="raise")

    def _stage(self, blocks: Iterable[bytes], size: int) -> str:
        name = f"{STAGING}/{uuid.uuid4().hex}"
        self._make_parent(name)
        staged = self.path(name)
        try:
            with self.fs.open(staged, "wb") as file:
                for block in blocks:
                    file.write(block)
                self.settle(file)
            if (written := int(self.fs.info(staged)["size"])) != size:
                raise StoreError(f"only {written} of {size} bytes were taken: the disk may be full")
        except BaseException:
            self._discard(staged)
            raise
        return staged

    def _make_parent(self, name: str) -> None:
        self.fs.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)

    def _discard(self, staged: str) -> None:
        with suppress(Exception):
            self.fs.rm_file(staged)


class _naming_bucket:
    """Says that a bucket is missing where a write finds nothing to write to."""

    def __init__(self, root: str) -> None:
        self._bucket = root.partition("/")[0]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        if isinstance(exc, FileNotFoundError):
            raise StoreError(f"there is no bucket {self._bucket}: create it") from exc


def _entry(info: dict[str, Any]) -> Entry:
    modified = info.get("mtime", info.get("LastModified", 0.0))
    if isinstance(modified, datetime.datetime):
        modified = modified.timestamp()
    return Entry(int(info["size"] or 0), float(modified))


def in_blocks(objects: Objects, name: str, start: int, end: int) -> Iterator[bytes]:
    """Yields a content from `start` on, a request a block."""
    while start < end:
        block = objects.read_range(name, start, min(start + BLOCK_BYTES, end))
        if not block:
            return
        yield block
        start += len(block)
