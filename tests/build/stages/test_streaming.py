"""Memory of conversion and build does not grow with the model; each byte is read once."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.convert import measured, write_checkpoint
from specpipe.build.stages.convert import Convert
from tests.toy import write_toy_checkpoint

MIB = 2**20


def build_engine(checkpoint: Path, out: Path, dtype: str) -> None:
    """Runs in a process of its own."""
    from specpipe.runtimes.torch.build import BuildTorchEngine

    out.mkdir()
    BuildTorchEngine(
        role="target",
        checkpoint=checkpoint,
        max_batch_size=8,
        max_seq_len=128,
        max_draft_len=4,
        max_num_tokens=256,
        dtype=dtype,  # type: ignore[arg-type]
        device="cpu",
    ).run(out)


def convert_checkpoint(checkpoint: Path, out: Path, tp_size: int) -> None:
    """Runs in a process of its own."""
    out.mkdir()
    Convert("target", checkpoint, tp_size=tp_size).run(out)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that is not kept, as pytest would."""
    folder = tmp_path_factory.mktemp("streaming")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def checkpoint(work: Path) -> Path:
    """256 MB in shards of 50 MB; embedding and head have 66 MB each."""
    folder = work / "checkpoint"
    write_checkpoint(folder, 256_000_000, hidden_size=1024, shard_bytes=50_000_000)
    assert 240_000_000 < size_of(folder) < 270_000_000
    return folder


def set_dtype(checkpoint: Path, dtype: str) -> None:
    """Lets the conversion round the weights, which are stored in bfloat16."""
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"dtype": dtype}))


@pytest.mark.parametrize(("dtype", "tp_size"), [("bfloat16", 1), ("bfloat16", 2), ("float32", 2)])
def test_conversion_holds_blocks_only(
    work: Path, checkpoint: Path, dtype: str, tp_size: int
) -> None:
    set_dtype(checkpoint, dtype)
    result = measured(convert_checkpoint, checkpoint, work / "out", tp_size)
    shutil.rmtree(work / "out")
    num_threads = min(len(os.sched_getaffinity(0)), 8)
    assert result.peak_bytes - result.start_bytes < (16 + 8 * num_threads) * MIB
    assert 0 <= result.read_bytes - size_of(checkpoint) < MIB


def test_build_holds_one_tensor(work: Path, checkpoint: Path) -> None:
    pytest.importorskip("torch")
    set_dtype(checkpoint, "bfloat16")
    convert_checkpoint(checkpoint, work / "unified", 2)
    toy = write_toy_checkpoint(work / "toy")
    convert_checkpoint(toy, work / "toy-unified", 1)
    libraries = measured(build_engine, work / "toy-unified", work / "toy-engine", "float32")
    result = measured(build_engine, work / "unified", work / "engine", "float32")
    assert size_of(work / "engine") > 500_000_000
    # The embedding as it is read, perhaps once more in float32, and what the allocator keeps; two
    # such tensors at a time, or the model's 500 MB, would be more.
    embedding = 32000 * 1024 * 2
    assert result.peak_bytes - libraries.peak_bytes < 3 * embedding + 128 * MIB


@pytest.mark.slow
def test_four_gigabytes_stay_under_one_and_the_largest_tensor(work: Path) -> None:
    if shutil.disk_usage(work).free < 16e9:
        pytest.skip("needs 16 GB of disk")
    shapes = write_checkpoint(work / "big", 4_000_000_000)
    size = size_of(work / "big")
    assert size > 3_700_000_000
    limit = 2**30 + max(2 * math.prod(shape) for shape in shapes.values())
    conversion = measured(convert_checkpoint, work / "big", work / "big-unified", 2)
    assert conversion.peak_bytes < limit
    assert 0 <= conversion.read_bytes - size < MIB
    shutil.rmtree(work / "big")
    pytest.importorskip("torch")
    build = measured(build_engine, work / "big-unified", work / "big-engine", "float32")
    assert build.peak_bytes < limit
