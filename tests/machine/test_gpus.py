"""GPUs by name, by size and as NVML tells of them."""

from __future__ import annotations

import pynvml
import pytest

from specpipe.errors import ConfigError
from specpipe.machine import provenance
from specpipe.machine.gpus import (
    Gpu,
    capability_of,
    find_gpu,
    gpus_here,
    gpus_with_memory,
    held_by,
    sm_of,
)
from tests.fake_nvml import DRIVER, Device, be


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


H100 = Gpu("NVIDIA H100", 81559 << 20, 90, DRIVER)


def test_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_NOT_SUPPORTED}
    mig = {"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_NO_PERMISSION}
    library = be(
        monkeypatch,
        Device("NVIDIA RTX PRO 6000", (12, 0), 97887),
        Device("NVIDIA Thor", (11, 0), failing=shared),
        Device("NVIDIA A100", (8, 0), failing=mig),
        Device(),
    )
    pro = Gpu("NVIDIA RTX PRO 6000", 97887 << 20, 120, DRIVER)
    unsized = (Gpu("NVIDIA Thor", 0, 110, DRIVER), Gpu("NVIDIA A100", 0, 80, DRIVER))
    assert gpus_here() == (pro, *unsized, H100)
    assert gpus_with_memory() == (pro, H100)
    assert library.num_open == 0


@pytest.mark.parametrize(
    ("function", "status"),
    [
        ("nvmlDeviceGetHandleByIndex_v2", pynvml.NVML_ERROR_NO_PERMISSION),
        ("nvmlDeviceGetHandleByIndex_v2", pynvml.NVML_ERROR_GPU_IS_LOST),
        ("nvmlDeviceGetName", pynvml.NVML_ERROR_GPU_IS_LOST),
        ("nvmlDeviceGetCudaComputeCapability", pynvml.NVML_ERROR_UNKNOWN),
    ],
)
def test_a_gpu_that_does_not_answer_is_left_out(
    function: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(monkeypatch, Device("NVIDIA L4", failing={function: status}), Device())
    assert gpus_here() == (H100,)


@pytest.mark.parametrize(
    ("function", "status"),
    [
        ("nvmlInitWithFlags", pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
        ("nvmlInitWithFlags", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
        ("nvmlInitWithFlags", 12345),  # of a driver that is newer than the module
        ("nvmlDeviceGetCount_v2", pynvml.NVML_ERROR_UNKNOWN),
        ("nvmlSystemGetDriverVersion", pynvml.NVML_ERROR_UNKNOWN),
    ],
)
def test_a_driver_that_does_not_answer(
    function: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(monkeypatch, Device(), **{function: status})
    assert gpus_here() == ()


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    be(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)
    assert gpus_here() == ()


def test_a_driver_that_fails_at_the_end_has_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be(monkeypatch, Device(), nvmlShutdown=pynvml.NVML_ERROR_UNKNOWN)
    assert gpus_here() == (H100,)


def test_manifests_name_gpus_as_nvidia_smi_does(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, Device())
    assert provenance.gpus() == [
        {"name": "NVIDIA H100", "compute_cap": "9.0", "driver_version": DRIVER}
    ]


@pytest.mark.parametrize(("text", "sm"), [("7.5", 75), ("9.0", 90), ("12.1", 121)])
def test_compute_capabilities_as_text_and_number(text: str, sm: int) -> None:
    assert (sm_of(text), capability_of(sm)) == (sm, text)


def test_what_processes_hold_and_what_is_free_is_told_by_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the GPU that does not tell who holds what."""
    asked = "nvmlDeviceGetComputeRunningProcesses_v3"
    be(
        monkeypatch,
        Device(total_mib=100, used_mib=70, held={7: 30 << 20, 8: 20 << 20, 9: 5 << 20}),
        Device(total_mib=100, used_mib=1, failing={asked: pynvml.NVML_ERROR_NOT_SUPPORTED}),
        Device(total_mib=100),
    )
    mib = 1 << 20
    assert held_by({7, 8, 10}) == {0: (50 * mib, 30 * mib), 2: (0, 100 * mib)}
