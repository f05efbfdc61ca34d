"""A library of NVIDIA's driver by hand, under the real pynvml: some GPUs, or failures.

NVML API reference: its functions return a status, and write where the arguments point to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

DRIVER = "590.44.01"


@dataclass(frozen=True)
class Device:
    """A GPU; failing functions return another status than 0."""

    name: str = "NVIDIA H100"
    capability: tuple[int, int] = (9, 0)
    total_mib: int = 81559
    used_mib: int = 0
    utilization: int = 0
    held: Mapping[int, int] = field(default_factory=dict)  # bytes by process
    failing: Mapping[str, int] = field(default_factory=dict)


def be(monkeypatch: pytest.MonkeyPatch, *devices: Device, **failing: int) -> Nvml:
    """Makes this machine one with these GPUs, or one whose library or driver fails."""
    library = Nvml(devices, failing)
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return library


class Nvml:
    """The functions that specpipe asks; a handle is a GPU's number and one."""

    def __init__(self, devices: tuple[Device, ...], failing: Mapping[str, int]) -> None:
        self.devices, self.failing = devices, dict(failing)
        self.num_open = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and (status := self.failing.get(name)):
            return lambda *arguments: status
        return super().__getattribute__(name)

    def nvmlInitWithFlags(self, flags: int) -> int:
        self.num_open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        text.value = DRIVER.encode()
        return self._status(None, "")

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return self._status(None, "")

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        address = ctypes.c_void_p(index.value + 1)
        ctypes.memmove(handle, ctypes.byref(address), ctypes.sizeof(address))
        return self._status(handle._obj, "nvmlDeviceGetHandleByIndex_v2")

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        text.value = self._device(handle).name.encode()
        return self._status(handle, "nvmlDeviceGetName")

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._device(handle).capability
        return self._status(handle, "nvmlDeviceGetCudaComputeCapability")

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> int:
        assert memory._obj.version == pynvml.nvmlMemory_v2
        device = self._device(handle)
        memory._obj.total = device.total_mib << 20
        memory._obj.used = device.used_mib << 20
        return self._status(handle, "nvmlDeviceGetMemoryInfo_v2")

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        rates._obj.gpu = self._device(handle).utilization
        return self._status(handle, "nvmlDeviceGetUtilizationRates")

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, infos: Any) -> int:
        held = self._device(handle).held
        room, count._obj.value = count._obj.value, len(held)
        if room < len(held):
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for info, (pid, used) in zip(infos or (), held.items(), strict=False):
            info.pid, info.usedGpuMemory = pid, used
        return self._status(handle, "nvmlDeviceGetComputeRunningProcesses_v3")

    def _device(self, handle: Any) -> Device:
        return self.devices[(ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1]

    def _status(self, handle: Any, function: str) -> int:
        if not self.num_open:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        return 0 if handle is None else self._device(handle).failing.get(function, 0)
