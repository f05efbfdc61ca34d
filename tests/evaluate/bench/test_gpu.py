from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from specpipe.evaluate.bench.gpu import GpuUse, watched

FAKE = """#!/bin/sh
# Checks that it is asked as nvidia-smi's manual has it, then writes what it would.
[ "$1" = "--query-gpu=index,memory.used,utilization.gpu" ] || exit 2
[ "$2" = "--format=csv,noheader,nounits" ] || exit 2
[ "$3" = "--loop-ms=500" ] || exit 2
echo "0, 1000, 50"
echo "1, 2000, [N/A]"
echo "0, 3000, 100"
echo "1, 1500, [N/A]"
exec sleep 60
"""


def test_memory_and_utilisation_of_each_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(FAKE)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    use = GpuUse()
    with watched(use):
        deadline = time.monotonic() + 30
        while len(use.memory_mib.get(1, [])) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert use.to_json() == [
        {"gpu": 0, "max_memory_mib": 3000.0, "mean_utilization_percent": 75.0},
        {"gpu": 1, "max_memory_mib": 2000.0, "mean_utilization_percent": None},
    ]


def test_nothing_is_said_without_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    use = GpuUse()
    with watched(use):
        pass
    assert use.to_json() == []


def test_a_server_elsewhere_says_nothing_of_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_of_ours(name: str) -> str:
        raise AssertionError(name)

    monkeypatch.setattr("shutil.which", none_of_ours)
    with watched(GpuUse(), where=False):
        pass


@pytest.mark.parametrize("line", ["", "No devices were found\n", "0, 1", "x, 1, 2"])
def test_other_lines_are_left_out(line: str) -> None:
    use = GpuUse()
    use.add(line)
    assert use.to_json() == []
