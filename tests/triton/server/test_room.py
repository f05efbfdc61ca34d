"""Whether a second version fits, by what the first one holds and what is free."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specpipe.triton.server import processes, room
from specpipe.triton.server.served_models import Version

MB = 10**6


@pytest.fixture
def server(tmp_path: Path) -> Any:
    """One whose models hold 300 MB; its files are 10 MB."""
    return SimpleNamespace(
        version=Version(repository(tmp_path / "old", 10 * MB)),
        processes_of=lambda version: SimpleNamespace(pids={4, 5}),
        triton=SimpleNamespace(triton_pid=lambda: 3),
    )


def repository(folder: Path, size: int) -> Path:
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    return folder


@pytest.mark.parametrize(
    ("size", "free", "gpus", "sentence"),
    [
        (10 * MB, 300 * MB, {}, None),
        (10 * MB, 299 * MB, {}, "it needs some 300.0 MB of memory, 299.0 MB are free"),
        (60 * MB, 300 * MB, {}, "it needs some 350.0 MB of memory, 300.0 MB are free"),
        (60 * MB, None, {}, None),
        (10 * MB, 900 * MB, {0: (0, 0), 1: (500 * MB, 500 * MB)}, None),
        (
            11 * MB,
            900 * MB,
            {0: (0, 0), 1: (500 * MB, 500 * MB)},
            "it needs some 501.0 MB of GPU 1, 500.0 MB are free",
        ),
    ],
)
def test_it_needs_what_the_other_holds_and_more_for_larger_files(
    server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    free: int | None,
    gpus: dict[int, tuple[int, int]],
    sentence: str | None,
) -> None:
    def held_by(pids: set[int]) -> dict[int, tuple[int, int]]:
        assert pids == {3, 4, 5}
        return gpus

    monkeypatch.setattr(room.memory, "available_bytes", lambda: free)
    monkeypatch.setattr(room.processes, "memory_bytes", {4: 100 * MB, 5: 200 * MB}.get)
    monkeypatch.setattr(room.gpus, "held_by", held_by)
    assert room.shortage(server, Version(repository(tmp_path / "new", size), 7)) == sentence


def test_a_process_tells_its_memory_and_one_that_is_gone_none() -> None:
    assert 10 * MB < processes.memory_bytes(os.getpid()) < 10**10
    assert processes.memory_bytes(2**22 + 1) == 0
