"""`specpipe publish`: a proved pair becomes the next version in a store.

assemble → claim → sign → upload → commit. The record is written last, so that an interrupted
publish leaves what was published before as it was; the next one removes what is left of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.errors import RepositoryError, StoreError, to_sentence
from specpipe.evaluate.verification.record import repository_digest
from specpipe.machine.callables import Log
from specpipe.machine.manifest import read_manifest, record_files
from specpipe.machine.memory import format_bytes
from specpipe.machine.own_json import read_object
from specpipe.machine.signals import deferred
from specpipe.release.assembly import assemble
from specpipe.release.local import locked
from specpipe.release.readiness import objection
from specpipe.release.release_file import RELEASE_NAME, SIGNATURE_NAME
from specpipe.stores.store import Blob, NumberTaken, Store, Transferred, VersionRecord

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig

_MOST_CLAIMS = 5
"""Numbers that are lost to other publishers before this one gives up: each of them got through."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """What became of a publish, or would.

    number       of the version
    is_dry_run   whether it only would be published
    is_new       False: the same content is that version already, and nothing was done
    transferred  what was moved, or would be
    """

    pair: str
    number: int
    digest: str
    store: str
    is_new: bool
    is_signed: bool
    is_dry_run: bool
    transferred: Transferred

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Returns which version it is, and what was moved."""
        version = f"version {self.number} of {self.pair} ({self.digest[:12]})"
        if not self.is_new:
            return [f"{version} in {self.store} has this content already: nothing is published"]
        moved = self.transferred
        files = "1 file" if moved.num_files == 1 else f"{moved.num_files} files"
        amounts = f"{format_bytes(moved.num_bytes)} in {files}"
        there = format_bytes(moved.num_bytes_present)
        signed = "signed" if self.is_signed else "not signed"
        if self.is_dry_run:
            return [
                f"it would be {version}, {signed}, in {self.store}",
                f"to move: {amounts}; {there} are there",
            ]
        return [
            f"{version} published, {signed}: {self.store}",
            f"moved: {amounts}; {there} were there",
        ]


def publish(
    config: PipelineConfig,
    store: Store,
    sign: Callable[[Path], object] | None,
    *,
    allow_unproved: bool = False,
    dry_run: bool = False,
    log: Log,
) -> Published:
    """Publishes what is built of a pair; another publish of it on this machine waits.

    sign  signs a folder; None: the version is not signed. A dry run changes nothing in the store
    and leaves nothing here. Raises RepositoryError for what is not proved, or not what was built.
    """
    versions = config.artifacts.versions
    with locked(versions, "publish", log):
        check_proved(config, allow_unproved=allow_unproved, log=log)
        publication = _Publication(config, store, sign, versions / ".publishing", log)
        try:
            return publication.preview() if dry_run else publication.run()
        except OSError as exc:
            raise RepositoryError(
                f"no version of {config.name} can be put together in {versions}: "
                f"{to_sentence(exc)}; nothing was published"
            ) from exc
        finally:
            with deferred():
                publication.remove()


def check_proved(config: PipelineConfig, *, allow_unproved: bool, log: Log) -> None:
    """Raises RepositoryError where the last proof of a pair does not let it be published."""
    manifest = read_manifest(config.artifacts.repository)
    digest = "" if manifest is None else repository_digest(manifest.outputs)
    found = objection(config, digest)
    if found is None:
        return
    if not (found.is_unproved and allow_unproved):
        hint = ", or publish it as it is with --allow-unproved" if found.is_unproved else ""
        raise RepositoryError(f"{found.sentence}{hint}")
    log(f"warning: {found.sentence}; allowed by --allow-unproved")


class _Publication:
    """The steps of one publish; what is published is put together in `folder`."""

    def __init__(
        self,
        config: PipelineConfig,
        store: Store,
        sign: Callable[[Path], object] | None,
        folder: Path,
        log: Log,
    ) -> None:
        self._config, self._store, self._sign = config, store, sign
        self._folder, self._log = folder, log
        self._pair = config.name

    def preview(self) -> Published:
        record, same = self._next()
        if same is not None:
            return self._done(same, is_new=False, is_dry_run=True)
        missing = self._store.missing(set(record.files.values()))
        present = set(record.files.values()) - missing
        moved = Transferred(len(missing), _size(missing), _size(present))
        return self._done(
            record, is_new=True, moved=moved, will_sign=self._sign is not None, is_dry_run=True
        )

    def run(self) -> Published:
        for phrase in self._store.clean(self._pair):
            self._log(f"{self._store.url}: {phrase}")
        record, same = self._next()
        if same is not None:
            return self._done(same, is_new=False)
        moved = Transferred(0, 0, 0)
        for _ in range(_MOST_CLAIMS):
            number = self._store.claim(self._pair)
            if number != record.number:
                others = [other.number for other in self._store.versions(self._pair)]
                record = self._assemble(number, previous=max(others, default=None))
            if self._sign is not None:
                self._sign(self._folder)
                record = self._record(record.number)
            uploaded = self._store.upload(
                {blob: self._folder / name for name, blob in record.files.items()}
            )
            moved = replace(
                uploaded,
                num_files=moved.num_files + uploaded.num_files,
                num_bytes=moved.num_bytes + uploaded.num_bytes,
            )
            try:
                self._store.commit(record)
            except NumberTaken as exc:
                self._log(f"{exc}: claiming another number")
                continue
            return self._done(record, is_new=True, moved=moved)
        raise StoreError(
            f"{self._store.url}: {_MOST_CLAIMS} numbers in a row went to other publishers of "
            f"{self._pair}: publish again"
        )

    def _next(self) -> tuple[VersionRecord, VersionRecord | None]:
        """Puts the next version together; also returns the version that has the same content."""
        published = self._store.versions(self._pair)
        last = max((record.number for record in published), default=0)
        record = self._assemble(last + 1, previous=last or None)
        alike = (
            other
            for other in reversed(published)
            if other.digest == record.digest
            and (self._sign is None or SIGNATURE_NAME in other.files)
        )
        return record, next(alike, None)

    def _assemble(self, number: int, previous: int | None) -> VersionRecord:
        self.remove()
        assemble(self._config, number, self._folder, previous=previous)
        return self._record(number)

    def _record(self, number: int) -> VersionRecord:
        release = read_object(self._folder / RELEASE_NAME)
        return VersionRecord(
            pair=self._pair,
            number=number,
            digest=release["digest"],
            files={
                name: Blob(file.sha256, file.size)
                for name, file in record_files(self._folder).items()
            },
            requires=release["requires"],
            published_at=release["published_at"],
        )

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _done(
        self,
        record: VersionRecord,
        *,
        is_new: bool,
        moved: Transferred | None = None,
        will_sign: bool = False,
        is_dry_run: bool = False,
    ) -> Published:
        return Published(
            pair=self._pair,
            number=record.number,
            digest=record.digest,
            store=self._store.url,
            is_new=is_new,
            is_signed=will_sign or SIGNATURE_NAME in record.files,
            is_dry_run=is_dry_run,
            transferred=moved or Transferred(0, 0, _size(record.files.values())),
        )


def _size(blobs: Iterable[Blob]) -> int:
    return sum(blob.size for blob in blobs)
