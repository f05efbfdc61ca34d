from __future__ import annotations

from dataclasses import replace

import pynvml
import pytest

from specpipe.evaluate.bench import gpu
from specpipe.evaluate.bench.gpu import GpuUse, watched
from tests.fake_nvml import Device, be
from tests.waiting import wait_until

MIG = Device(
    used_mib=2000,
    failing={"nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_NOT_SUPPORTED},
)


def wait_for(use: GpuUse, *, num_samples: int) -> None:
    """Until so many samples of the last GPU were taken in."""
    assert wait_until(lambda: len(use.utilization.get(0, [])) >= num_samples)


def test_memory_and_utilisation_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_INTERVAL_S", 0.001)
    use = GpuUse()
    busy = Device(used_mib=3000, utilization=100)
    library = be(monkeypatch, busy, MIG)
    with watched(use):
        wait_for(use, num_samples=3)
        library.devices = (replace(busy, used_mib=1000), MIG)
        wait_for(use, num_samples=len(use.utilization[0]) + 3)
    assert library.num_open == 0
    assert use.memory_mib[0][-1] == 1000.0
    assert use.to_json() == [
        {"gpu": 0, "max_memory_mib": 3000.0, "mean_utilization_percent": 100.0},
        {"gpu": 1, "max_memory_mib": 2000.0, "mean_utilization_percent": None},
    ]


def test_utilisation_is_a_mean() -> None:
    use = GpuUse()
    for used_bytes, percent in ((None, 50), (1 << 30, 100), (1 << 31, None)):
        use.add(3, used_bytes, percent)
    assert use.to_json() == [{"gpu": 3, "max_memory_mib": 2048.0, "mean_utilization_percent": 75.0}]


def test_a_gpu_that_is_lost_meanwhile_keeps_what_it_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_INTERVAL_S", 0.001)
    lost = pynvml.NVML_ERROR_GPU_IS_LOST
    functions = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUtilizationRates")
    steady = Device(used_mib=10, utilization=20)
    library = be(monkeypatch, steady, replace(steady, used_mib=30, utilization=40))
    use = GpuUse()
    with watched(use):
        wait_for(use, num_samples=2)
        library.devices = (steady, replace(steady, failing=dict.fromkeys(functions, lost)))
        wait_for(use, num_samples=len(use.utilization[0]) + 3)
    assert use.to_json() == [
        {"gpu": 0, "max_memory_mib": 10.0, "mean_utilization_percent": 20.0},
        {"gpu": 1, "max_memory_mib": 30.0, "mean_utilization_percent": 40.0},
    ]


def test_nothing_is_said_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, Device(), nvmlInitWithFlags=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    use = GpuUse()
    with watched(use):
        pass
    assert use.to_json() == []


def test_a_server_elsewhere_says_nothing_of_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, Device())
    use = GpuUse()
    with watched(use, where=False):
        pass
    assert use.to_json() == []
