"""Writing a collection (collection.py), which an interrupted run leaves to be gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from specpipe.errors import ConfigError
from specpipe.machine.own_json import parse_object, reason, write_object
from specpipe.machine.whole_file import written_whole
from specpipe.training.collection import (
    INFO_NAME,
    SHARD_BYTES,
    Answer,
    Collection,
    CollectionInfo,
)
from specpipe.training.settings import setting_differences

LEFT_OUT_NAME = "left-out.jsonl"

_COUNTS = {"duplicate": "num_duplicates", "empty": "num_empty"}
"""Where answers that were not kept are counted, by the reason."""


class CollectionWriter:
    """Appends answers to a collection; of those that are there it has the ids in memory."""

    def __init__(self, folder: Path, info: CollectionInfo, *, shard_bytes: int) -> None:
        """Goes on with what the folder has; `info` has no counts yet."""
        self._folder, self._info, self._shard_bytes = folder, info, shard_bytes
        self._ids: set[str] = set()
        self._digests: set[int] = set()
        self._shard: BinaryIO | None = None
        self._num_shards = 0
        self._resume()

    @property
    def info(self) -> CollectionInfo:
        """What the collection holds by now."""
        return self._info

    def is_asked(self, question_id: str) -> bool:
        """Returns whether a question has been answered, by an answer that was there or not."""
        return question_id in self._ids

    def add(self, answer: Answer) -> bool:
        """Writes an answer; returns False where its prompt has the same one already."""
        if answer.digest in self._digests:
            self._leave_out(id=answer.id, reason="duplicate")
            self._count_left_out(answer.id, "duplicate")
            return False
        _append(self._open_shard(), answer.to_line())
        self._count(answer)
        return True

    def add_empty(self, question_id: str) -> None:
        """Notes an answer without a token."""
        self._leave_out(id=question_id, reason="empty")
        self._count_left_out(question_id, "empty")

    def fail(self, question_id: str, prompt: str, error: str) -> None:
        """Notes a question without an answer, with the name of its prompt; it stays to be asked."""
        self._leave_out(id=question_id, reason="failed", prompt=prompt, error=error)
        self._info = replace(self._info, num_failed=self._info.num_failed + 1)

    def complete(self, num_prompts: int) -> None:
        """Writes that all was asked, of so many prompts."""
        self.save(is_complete=True, num_prompts=num_prompts)

    def save(self, **changed: Any) -> None:
        """Writes `collection.json` as it is now, with what has changed."""
        self._info = replace(self._info, **changed)
        with written_whole(self._folder / INFO_NAME) as staged:
            write_object(staged, asdict(self._info))

    def close(self) -> None:
        if self._shard is not None:
            self._shard.close()

    def _resume(self) -> None:
        """Takes in what is there, cuts off a torn line, and forgets what failed."""
        if not (self._folder / INFO_NAME).exists():
            self.save()
            return
        there = Collection.open(self._folder)
        if _is_empty(there):  # so it may be asked otherwise
            (self._folder / LEFT_OUT_NAME).unlink(missing_ok=True)
            self.save()
            return
        _check_same(self._folder, there.info, self._info)
        info = replace(there.info, is_complete=False)
        self._info = replace(self._info, versions=info.versions, made_at=info.made_at)
        if shards := there.shards:
            self._num_shards = 1 + int(shards[-1].stem.rpartition("-")[2])
            _cut_torn_line(shards[-1])
        for answer in Collection(self._folder, info).answers():
            self._count(answer)
        left_out = [f for f in _left_out(self._folder) if f.get("reason") in _COUNTS]
        for fields in left_out:
            self._count_left_out(str(fields["id"]), fields["reason"])
        with written_whole(self._folder / LEFT_OUT_NAME) as staged:
            staged.write_bytes(b"".join(map(_line, left_out)))
        self.save()

    def _count(self, answer: Answer) -> None:
        self._ids.add(answer.id)
        self._digests.add(answer.digest)
        self._info = replace(
            self._info,
            num_answers=self._info.num_answers + 1,
            num_prompt_tokens=self._info.num_prompt_tokens + len(answer.prompt_token_ids),
            num_tokens=self._info.num_tokens + len(answer.token_ids),
            num_from_text=self._info.num_from_text + answer.is_from_text,
        )

    def _count_left_out(self, question_id: str, reason: str) -> None:
        self._ids.add(question_id)
        name = _COUNTS[reason]
        self._info = replace(self._info, **{name: getattr(self._info, name) + 1})

    def _open_shard(self) -> BinaryIO:
        """Returns the file that the next answer goes into."""
        if self._shard is None and self._num_shards:
            self._shard = self._shard_path(self._num_shards - 1).open("ab", buffering=0)
        if self._shard is None or self._shard.tell() >= self._shard_bytes:
            self.close()
            self._shard = self._shard_path(self._num_shards).open("ab", buffering=0)
            self._num_shards += 1
            self.save()
        return self._shard

    def _shard_path(self, number: int) -> Path:
        return self._folder / f"answers-{number:05}.jsonl"

    def _leave_out(self, **fields: str) -> None:
        with (self._folder / LEFT_OUT_NAME).open("ab", buffering=0) as file:
            _append(file, _line(fields))


@contextmanager
def open_writer(
    folder: Path, info: CollectionInfo, *, shard_bytes: int = SHARD_BYTES
) -> Iterator[CollectionWriter]:
    """Yields the writer of a collection that is begun, or gone on with where the folder has it.

    Whatever ends the `with` block, `collection.json` then says what the shards hold. Raises
    ConfigError where another process writes it, where it was asked otherwise, or where it is
    damaged. A folder that nothing came into is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = _acquired(folder)
    try:
        writer = CollectionWriter(folder, info, shard_bytes=shard_bytes)
        try:
            yield writer
        except BaseException:
            with suppress(OSError, ConfigError):  # a full disk: the shards say what there is
                writer.save()
                if not (Collection.open(folder).shards or (folder / LEFT_OUT_NAME).exists()):
                    (folder / INFO_NAME).unlink()
                    Path(lock.lock_file).unlink()
                    folder.rmdir()  # where it holds nothing else
            raise
        finally:
            writer.close()
    finally:
        lock.release()


@contextmanager
def kept_from_writers(collections: Iterable[Collection]) -> Iterator[None]:
    """Keeps those that are not complete as they are while they are read in a `with` block.

    Raises ConfigError where a process writes one of them now.
    """
    folders = {c.folder.resolve(): c.folder for c in collections if not c.info.is_complete}
    with ExitStack() as locks:
        for folder in folders.values():
            try:
                locks.callback(_acquired(folder).release)
            except OSError:  # a folder that may only be read has no writer here
                continue
        yield


def _acquired(folder: Path) -> FileLock:
    """Returns the lock of a collection, held; ConfigError where another process holds it."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"{folder} is being collected by another process: wait for it, or stop it"
        ) from None
    return lock


def _is_empty(collection: Collection) -> bool:
    """Returns whether nothing was answered so far."""
    left_out = _left_out(collection.folder)
    return not collection.shards and all(fields.get("reason") == "failed" for fields in left_out)


def _check_same(folder: Path, there: CollectionInfo, wanted: CollectionInfo) -> None:
    """Raises ConfigError where a collection was asked otherwise than it is to be gone on with."""
    differences = setting_differences(_decisive(there), _decisive(wanted))
    if there.tokenizer_digest != wanted.tokenizer_digest:
        differences.append("the tokenizer is another one")
    if differences:
        raise ConfigError(
            f"{folder} was collected otherwise: {'; '.join(differences)}: collect into another "
            "folder (--output), or as before"
        )


def _decisive(info: CollectionInfo) -> dict[str, Any]:
    """Returns what must not change while a collection grows, by name."""
    digest = info.prompts.get("digest")
    return {**info.answered_by, **info.settings, "SHA-256 of the prompts": digest}


def _append(file: BinaryIO, line: bytes) -> None:
    """Writes a whole line or, where the disk is full, none of it."""
    start = file.seek(0, 2)
    try:
        written = 0
        while written < len(line):
            written += file.write(line[written:])
    except BaseException as exc:
        with suppress(OSError):
            file.truncate(start)
        if isinstance(exc, OSError):
            exc.filename = file.name  # which the system leaves out where it cannot write
        raise


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        whole = 0
        for line in file:
            whole += len(line) if line.endswith(b"\n") else 0
        file.truncate(whole)


def _left_out(folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / LEFT_OUT_NAME
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield parse_object(line)
            except ValueError as exc:
                raise ConfigError(
                    f"{path}:{number} is damaged ({reason(exc)}): remove the file; what it lists "
                    "is then asked again"
                ) from exc


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"
