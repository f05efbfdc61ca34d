"""GPUs by name, by size and as nvidia-smi tells of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpipe.errors import ConfigError
from specpipe.machine.gpus import Gpu, find_gpu, gpus_here


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("H100", Gpu("H100", 80 * 10**9, 90)),
        ("nvidia h200", Gpu("H200", 141 * 10**9, 90)),
        ("A100 40GB", Gpu("A100 40 GB", 40 * 10**9, 80)),
        ("L4", Gpu("L4", 24 * 10**9, 89)),  # and not the L40S
        ("L40S", Gpu("L40S", 48 * 10**9, 89)),
        ("GeForce RTX 5090", Gpu("RTX 5090", 32 * 10**9, 120)),
        ("4090", Gpu("RTX 4090", 24 * 10**9, 89)),
        ("rtx-pro-6000", Gpu("RTX PRO 6000", 96 * 10**9, 120)),
        ("B200", Gpu("B200", 180 * 10**9, 100)),
        ("24", Gpu("24 GB", 24 * 10**9, None)),
        ("11.5 GB", Gpu("11.5 GB", 11_500_000_000, None)),
    ],
)
def test_what_is_found(text: str, expected: Gpu) -> None:
    assert find_gpu(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A100", "--gpu A100: say which, A100 40 GB or A100 80 GB"),
        ("6000", "--gpu 6000: say which, RTX 6000 Ada or RTX PRO 6000"),
        (
            "MI300",
            "--gpu MI300: expected the memory in GB, as 24, or one of A100 40 GB, A100 80 GB, H100,"
            " H200, B200, L4, L40S, RTX 4090, RTX 5090, RTX 6000 Ada, RTX PRO 6000",
        ),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_gpu(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["", "0", "-", "nVidia"])
def test_what_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected the memory in GB"):
        find_gpu(text)


def test_a_gpu_names_its_compute_capability() -> None:
    assert str(find_gpu("RTX 5090")) == "RTX 5090 (compute capability 12.0)"
    assert str(find_gpu("24")) == "24 GB"


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpus_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        "NVIDIA H100 80GB HBM3, 9.0, 81559",
        "NVIDIA L4, 8.9, 23034",
        "NVIDIA Thor, 11.0, [N/A]",
    )
    nvidia_smi(tmp_path, monkeypatch, "\n".join(f"echo '{row}'" for row in rows))
    assert gpus_here() == (
        Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20, 90),
        Gpu("NVIDIA L4", 23034 * 2**20, 89),
    )


@pytest.mark.parametrize("script", ["exit 9", "echo Failed to initialize NVML"])
def test_a_driver_that_does_not_answer(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, script)
    assert gpus_here() == ()


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_here() == ()
