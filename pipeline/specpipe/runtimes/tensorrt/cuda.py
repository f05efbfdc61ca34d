"""CUDA's runtime, reached through cuda-python and nowhere else: memory, copies, GPUs."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specpipe.errors import RuntimeUnavailable
from specpipe.machine.gpus import Gpu
from specpipe.machine.libraries import with_extras
from specpipe.runtimes.tensorrt import library as libraries

Direction = Literal["HostToDevice", "DeviceToHost"]

_ALIGNMENT = 256
"""Bytes to which TensorRT wants addresses aligned."""


class Cuda:
    """CUDA's runtime, raising RuntimeUnavailable in CUDA's own words."""

    def __init__(self, cudart: Any) -> None:
        """`cudart` is the module cuda.bindings.runtime."""
        self._cudart = cudart

    @classmethod
    def load(cls, library: str) -> Cuda:
        """Imports cuda-python, which comes with the extra of a TensorRT library."""
        try:
            return cls(importlib.import_module("cuda.bindings.runtime"))
        except ImportError as exc:
            raise RuntimeUnavailable(
                f"runtime 'tensorrt' needs 'cuda-python': {with_extras(libraries.EXTRAS[library])}"
            ) from exc

    def __call__(self, function: str, *arguments: Any) -> Any:
        """Calls a function of CUDA; returns its results without the status."""
        status, *values = getattr(self._cudart, function)(*arguments)
        if int(status) != 0:
            _, text = self._cudart.cudaGetErrorString(status)
            raise RuntimeUnavailable(f"{function}: {text.decode()}")
        return values[0] if len(values) == 1 else tuple(values)

    def gpus(self) -> list[Gpu]:
        """Returns the GPUs that this process sees, in CUDA's order."""
        gpus = []
        for index in range(self("cudaGetDeviceCount")):
            properties = self("cudaGetDeviceProperties", index)
            sm = 10 * properties.major + properties.minor
            gpus.append(Gpu(properties.name.decode(), properties.totalGlobalMem, sm))
        return gpus

    def free_bytes(self, device: int) -> int:
        """Returns how much memory of a GPU is free."""
        self("cudaSetDevice", device)
        return int(self("cudaMemGetInfo")[0])

    def allocate(self, resources: ExitStack, num_bytes: int) -> int:
        """Returns the address of GPU memory, which `resources` gives back."""
        address = int(self("cudaMalloc", num_bytes))
        resources.callback(self, "cudaFree", address)
        return address

    def allocate_host(self, resources: ExitStack, num_bytes: int) -> NDArray[np.uint8]:
        """Returns page-locked memory of the host, which `resources` gives back."""
        address = int(self("cudaMallocHost", num_bytes))
        resources.callback(self, "cudaFreeHost", address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))

    def copy(
        self, to: int, source: int, num_bytes: int, direction: Direction, stream: Any = None
    ) -> None:
        """Copies between addresses: at once, or in the order of a stream."""
        kind = getattr(self._cudart.cudaMemcpyKind, f"cudaMemcpy{direction}")
        if stream is None:
            self("cudaMemcpy", to, source, num_bytes, kind)
        else:
            self("cudaMemcpyAsync", to, source, num_bytes, kind, stream)


class SharedArrays:
    """Arrays of 4-byte numbers on the GPU, and the same in page-locked memory of the host.

    All of one kind go over at once: a copy takes longer to start than to carry so few bytes.
    """

    def __init__(
        self,
        cuda: Cuda,
        resources: ExitStack,
        sizes: Mapping[str, int],
        dtype: type[np.int32] | type[np.float32],
    ) -> None:
        """sizes  the greatest number of elements of each array"""
        self._cuda = cuda
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name] = end
            end += -(-4 * size // _ALIGNMENT) * _ALIGNMENT
        self._host = cuda.allocate_host(resources, end)
        self._device = cuda.allocate(resources, end)
        self.host: dict[str, NDArray[Any]] = {
            name: self._host[starts[name] : starts[name] + 4 * size].view(dtype)
            for name, size in sizes.items()
        }
        self.addresses = {name: self._device + start for name, start in starts.items()}

    def to_device(self, stream: Any) -> None:
        host = self._host.ctypes.data
        self._cuda.copy(self._device, host, self._host.nbytes, "HostToDevice", stream)

    def to_host(self, stream: Any, size: int) -> None:
        """Copies the first `size` elements."""
        host = self._host.ctypes.data
        self._cuda.copy(host, self._device, 4 * size, "DeviceToHost", stream)
