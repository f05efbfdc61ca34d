"""GPUs for tests: one in host memory, which checks what is done to it, and a real one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

Status = int


class Gpu(Protocol):
    """What a stand-in for TensorRT needs of the GPU that it runs on."""

    cudart: Any

    def read(self, address: int, num_bytes: int) -> bytes: ...

    def write(self, address: int, data: bytes) -> None: ...

    def enqueue(self, stream: Any, work: Callable[[], None]) -> None:
        """Does the work after all that the stream was given before."""


class HostGpu:
    """CUDA's runtime over host memory; fresh memory holds NaN, whatever is read from it as.

    What a stream is given happens when it is waited for, so that a result used too early is wrong.
    It is its own `cudart`. Memory is only reached inside one allocation.
    """

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)

    def __init__(
        self,
        *gpus: tuple[str, int, int],
        free_bytes: int = 1 << 34,
        failing: Mapping[str, Status] | None = None,
    ) -> None:
        """gpus are name and compute capability; failing functions return another status than 0."""
        self.cudart = self
        self.gpus = gpus or (("NVIDIA GeForce RTX 4090", 8, 9),)
        self.free_bytes, self.failing = free_bytes, dict(failing or {})
        self.device_memory: dict[int, Any] = {}
        self.host_memory: dict[int, Any] = {}
        self.streams: dict[int, list[Callable[[], None]]] = {}
        self.device: int | None = None

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cuda") and name in (failing := super().__getattribute__("failing")):
            return lambda *arguments: (failing[name], None)
        return super().__getattribute__(name)

    def cudaGetErrorString(self, status: Status) -> tuple[Status, bytes]:
        return 0, {2: b"out of memory", 100: b"no CUDA-capable device is detected"}[status]

    def cudaGetDeviceCount(self) -> tuple[Status, int]:
        return 0, len(self.gpus)

    def cudaGetDeviceProperties(self, device: int) -> tuple[Status, Any]:
        name, major, minor = self.gpus[device]
        return 0, SimpleNamespace(
            name=name.encode(), major=major, minor=minor, totalGlobalMem=self.free_bytes
        )

    def cudaSetDevice(self, device: int) -> tuple[Status]:
        self.device = device
        return (0,)

    def cudaMemGetInfo(self) -> tuple[Status, int, int]:
        return 0, self.free_bytes, self.free_bytes

    def cudaStreamCreate(self) -> tuple[Status, int]:
        stream = 1 + len(self.streams)
        self.streams[stream] = []
        return 0, stream

    def cudaStreamDestroy(self, stream: int) -> tuple[Status]:
        del self.streams[stream]
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Status]:
        work, self.streams[stream] = self.streams[stream], []
        for call in work:
            call()
        return (0,)

    def cudaMalloc(self, num_bytes: int) -> tuple[Status, int]:
        return 0, self._allocate(self.device_memory, num_bytes)

    def cudaMallocHost(self, num_bytes: int) -> tuple[Status, int]:
        return 0, self._allocate(self.host_memory, num_bytes)

    def cudaFree(self, address: int) -> tuple[Status]:
        del self.device_memory[address]
        return (0,)

    def cudaFreeHost(self, address: int) -> tuple[Status]:
        del self.host_memory[address]
        return (0,)

    def cudaMemcpy(self, to: int, source: int, num_bytes: int, kind: int) -> tuple[Status]:
        device = to if kind == 1 else source
        self._check(self.device_memory, device, num_bytes)
        ctypes.memmove(to, source, num_bytes)
        return (0,)

    def cudaMemcpyAsync(
        self, to: int, source: int, num_bytes: int, kind: int, stream: int
    ) -> tuple[Status]:
        self._check(self.host_memory, source if kind == 1 else to, num_bytes)
        self.enqueue(stream, lambda: self._done(self.cudaMemcpy(to, source, num_bytes, kind)))
        return (0,)

    def cudaMemset2DAsync(
        self, address: int, pitch: int, value: int, width: int, height: int, stream: int
    ) -> tuple[Status]:
        assert width <= pitch
        self._check(self.device_memory, address, (height - 1) * pitch + width)

        def fill() -> None:
            for row in range(height):
                ctypes.memset(address + row * pitch, value, width)

        self.enqueue(stream, fill)
        return (0,)

    def read(self, address: int, num_bytes: int) -> bytes:
        self._check(self.device_memory, address, num_bytes)
        return ctypes.string_at(address, num_bytes)

    def write(self, address: int, data: bytes) -> None:
        self._check(self.device_memory, address, len(data))
        ctypes.memmove(address, data, len(data))

    def enqueue(self, stream: int, work: Callable[[], None]) -> None:
        self.streams[stream].append(work)

    def _allocate(self, memory: dict[int, Any], num_bytes: int) -> int:
        assert self.device is not None and num_bytes > 0
        block = (ctypes.c_uint8 * (num_bytes + 256))()
        ctypes.memset(block, 0xFF, num_bytes + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        memory[address] = (block, num_bytes)
        return address

    def _check(self, memory: dict[int, Any], address: int, num_bytes: int) -> None:
        """Raises AssertionError for what is not inside one allocation."""
        assert any(
            start <= address and address + num_bytes <= start + size
            for start, (_, size) in memory.items()
        ), f"{num_bytes} bytes at {address:#x} are not allocated"

    @staticmethod
    def _done(result: tuple[Status]) -> None:
        assert result == (0,)


class CudaGpu:
    """A real GPU; what a stream is to do is waited for at once."""

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self.cudart = runtime

    def read(self, address: int, num_bytes: int) -> bytes:
        found = np.empty(num_bytes, np.uint8)
        kind = self.cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpy", found.ctypes.data, address, num_bytes, kind)
        return found.tobytes()

    def write(self, address: int, data: bytes) -> None:
        given = np.frombuffer(data, np.uint8)
        kind = self.cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpy", address, given.ctypes.data, len(data), kind)

    def enqueue(self, stream: Any, work: Callable[[], None]) -> None:
        self._call("cudaStreamSynchronize", stream)
        work()

    def _call(self, function: str, *arguments: Any) -> None:
        status, *_ = getattr(self.cudart, function)(*arguments)
        assert int(status) == 0, self.cudart.cudaGetErrorString(status)
