"""Where a soak takes place: two publishers, a host that serves, their store, and a disk.

All lie in one folder. Of root it is a small file system in memory, which can be filled; of another
user a full disk is a limit on the size of what a command may write (RLIMIT_FSIZE).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

from benchmarks.attack.server import build
from benchmarks.measure import ROOT
from benchmarks.soak.commands import Running
from benchmarks.soak.stores import FolderStore, Store, s3_store
from specpipe.errors import SpecpipeError

KindOfStore = Literal["folder", "s3"]

CONTENTS = ("A", "B")
"""What is published by turns: the quickstart's pair, and one with its draft as the target."""

_MODELS = ROOT / "models" / "python-code"
_DISK_BYTES = 512 << 20
_MIN_FILE_BYTES = 1 << 10
_YAML = """name: soak-pair
draft: {{checkpoint: {models}/draft}}
target: {{checkpoint: {models}/{target}}}
engine: {{max_batch_size: 8, max_seq_len: 1024}}
release: {{store: {store}}}
"""


class Place:
    """Publishers and host in a folder; `publishers` and `host` are their YAML files."""

    def __init__(self, folder: Path, store: Store, *, is_disk: bool) -> None:
        self._folder, self._is_disk = folder, is_disk
        self.store = store
        self._num_renewed = 0
        self._is_full = False
        self.publishers = {
            content: self._write(content, target)
            for content, target in zip(CONTENTS, ("target", "draft"), strict=True)
        }
        self.host = self._write("host", "target")

    @property
    def artifacts_dir(self) -> Path:
        """The host's folder of the pair."""
        return self.host.parent / "engines" / "soak-pair"

    @property
    def kind_of_full_disk(self) -> str:
        size = _DISK_BYTES >> 20
        return (
            f"a file system of {size} MiB that is filled (tmpfs)"
            if self._is_disk
            else "a limit on the size of files (RLIMIT_FSIZE), for want of the right to mount"
        )

    def _write(self, name: str, target: str) -> Path:
        config = self._folder / name / "soak.yaml"
        config.parent.mkdir()
        config.write_text(_YAML.format(models=_MODELS, target=target, store=self.store.url))
        return config

    def build(self) -> None:
        for config in self.publishers.values():
            build(config)

    def publish(self, content: str) -> Running:
        """Starts to publish a content, which a comment makes different from what there is."""
        if not self._is_full:
            self._renew(content)
        return self._run(self.publishers[content], "publish --allow-unproved")

    def _renew(self, content: str) -> None:
        self._num_renewed += 1
        config = self.publishers[content]
        text = config.read_text().partition("#")[0]
        config.write_text(f"{text}# {self._num_renewed:06d}\n")

    def on_host(self, words: str) -> Running:
        """Starts a command on the host."""
        return self._run(self.host, words)

    def _run(self, config: Path, words: str) -> Running:
        limit = _MIN_FILE_BYTES if self._is_full and not self._is_disk else None
        return Running(config, words, max_file_bytes=limit)

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Leaves no room on the disk for the time of a `with` block."""
        for content in self.publishers:
            self._renew(content)
        self._is_full = True
        ballast = self._folder / "ballast"
        try:
            if self._is_disk:
                _fill(ballast)
            yield
        finally:
            self._is_full = False
            ballast.unlink(missing_ok=True)


@contextmanager
def made(kind_of_store: KindOfStore) -> Iterator[Place]:
    """Makes a place, and removes it."""
    folder = Path(tempfile.mkdtemp(prefix="specpipe-soak-"))
    try:
        is_disk = _mount(folder)
        try:
            with _store(kind_of_store, folder) as store:
                yield Place(folder, store, is_disk=is_disk)
        finally:
            if is_disk:
                subprocess.run(["umount", "--lazy", folder], check=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _store(kind: KindOfStore, folder: Path) -> AbstractContextManager[Store]:
    return s3_store() if kind == "s3" else nullcontext(FolderStore(folder))


def _mount(folder: Path) -> bool:
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "none", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def _fill(ballast: Path) -> None:
    block = b"\0" * (1 << 20)
    with ballast.open("wb", buffering=0) as file:
        while len(block):
            try:
                file.write(block)
            except OSError:
                block = block[: len(block) // 2]
    if not ballast.stat().st_size:
        raise SpecpipeError(f"{ballast.parent} was full before it was filled")
