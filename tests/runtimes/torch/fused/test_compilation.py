from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import triton

from specpipe.runtimes.torch.fused.compilation import use_writable_cache


def prepared(cache: Path) -> tuple[dict[str, Any], str]:
    """Compiles in another process, as this one may interpret kernels; and what it warned of."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtimes.torch.fused.prepare_kernels"],
        env=environment,
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.stderr


def test_dry_launches_compile_each_kernel_once_and_what_comes_later_is_counted(
    tmp_path: Path,
) -> None:
    """By hand: a number that 16 divides, and a size, make another kernel of `add`; then of each
    kernel a third size, which comes late.
    """
    found, warned = prepared(tmp_path)
    assert found == {
        "loaded": ["add"] * 4 + ["double"] * 3,
        "counted": [[5, 5], [0, 0]],
        "late": [0, 2],
    }
    assert [line.split(",")[0] for line in sorted(warned.splitlines())] == [
        "kernel add was compiled",
        "kernel double was compiled",
    ]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's folder, with one kernel; what is made elsewhere is made in tmp_path, too."""
    folder = tmp_path / "cache"
    (folder / "KERNEL").mkdir(parents=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.cache, "dir", str(folder))
    return folder


def test_a_folder_that_can_be_written_is_used(cache: Path) -> None:
    use_writable_cache()
    assert triton.knobs.cache.dir == str(cache)
    assert [path.name for path in cache.iterdir()] == ["KERNEL"]


def test_kernels_of_a_folder_that_cannot_be_written_are_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    use_writable_cache()
    elsewhere = Path(triton.knobs.cache.dir)
    assert [path.resolve() for path in elsewhere.iterdir()] == [cache / "KERNEL"]
    assert f"{cache}: Read-only file system; kernels" in caplog.text


def test_without_a_folder_kernels_are_kept_elsewhere(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_folder = cache / "file" / "cache"
    (cache / "file").write_text("")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(no_folder))
    use_writable_cache()
    elsewhere = Path(triton.knobs.cache.dir)
    assert elsewhere != no_folder
    assert list(elsewhere.iterdir()) == []
