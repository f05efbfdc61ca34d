"""GPUs: those of this machine, as NVML tells, and those to plan for, by name.

NVML is the library of NVIDIA's driver that nvidia-smi asks, too: it counts the GPUs as nvidia-smi
does, whatever CUDA_VISIBLE_DEVICES says. Of a GPU in MIG mode it tells the whole GPU, with no
utilisation, and with its memory only to those who may manage it (NVML API reference,
nvmlDeviceGetUtilizationRates and nvmlDeviceGetMemoryInfo).
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from specpipe.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    memory_bytes  by name, 10^9 for each GB that it is sold with; of one here what its driver
                  tells, a little more, or 0 where that tells nothing (it shares the host's memory)
    sm            compute capability, times 10; None: unknown
    driver        the version that runs it; empty: it is not of this machine
    """

    name: str
    memory_bytes: int
    sm: int | None
    driver: str = ""

    def __str__(self) -> str:
        if self.sm is None:
            return self.name
        return f"{self.name} (compute capability {self.compute_capability})"

    @property
    def compute_capability(self) -> str:
        """As in configs and manifests: "9.0"; or "unknown"."""
        return "unknown" if self.sm is None else capability_of(self.sm)


def sm_of(compute_capability: str) -> int:
    """Returns 90 for "9.0", 120 for "12.0"."""
    major, _, minor = compute_capability.partition(".")
    return int(major) * 10 + int(minor)


def capability_of(sm: int) -> str:
    """Returns "9.0" for 90, "12.0" for 120."""
    return f"{sm // 10}.{sm % 10}"


KNOWN_GPUS = tuple(
    Gpu(name, gigabytes * 10**9, sm)
    for name, gigabytes, sm in (
        ("A100 40 GB", 40, 80),
        ("A100 80 GB", 80, 80),
        ("H100", 80, 90),
        ("H200", 141, 90),
        ("B200", 180, 100),
        ("L4", 24, 89),
        ("L40S", 48, 89),
        ("RTX 4090", 24, 89),
        ("RTX 5090", 32, 120),
        ("RTX 6000 Ada", 48, 89),
        ("RTX PRO 6000", 96, 120),
    )
)
"""NVIDIA's data sheets; compute capabilities: developer.nvidia.com/cuda-gpus."""


def find_gpu(text: str) -> Gpu:
    """Returns the GPU of that name, or one of so many GB; refuses what is neither."""
    amount = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:gb)?\s*", text, re.IGNORECASE)
    if amount is not None and 0 < float(amount[1]) < 1000:  # 4090 is a name
        return Gpu(f"{amount[1]} GB", int(float(amount[1]) * 10**9), None)
    wanted = _letters(text)
    found = [gpu for gpu in KNOWN_GPUS if _letters(gpu.name) == wanted]
    if not found and len(wanted) > 1:
        found = [gpu for gpu in KNOWN_GPUS if wanted in _letters(gpu.name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"--gpu {text}: say which, {' or '.join(gpu.name for gpu in found)}")
    raise ConfigError(
        f"--gpu {text}: expected the memory in GB, as 24, or one of "
        + ", ".join(gpu.name for gpu in KNOWN_GPUS)
    )


def gpus_here() -> tuple[Gpu, ...]:
    """Returns this machine's GPUs; none without a driver.

    One that does not answer is left out: it is lost, or this process may not use it.
    """
    found = []
    with _nvml() as handles:
        for handle in handles.values():
            name = _told("nvmlDeviceGetName", handle)
            capability = _told("nvmlDeviceGetCudaComputeCapability", handle)
            driver = _told("nvmlSystemGetDriverVersion")
            if None not in (name, capability, driver):
                major, minor = capability
                memory = _memory(handle)
                size = 0 if memory is None else memory.total
                found.append(Gpu(name, size, 10 * major + minor, driver))
    return tuple(found)


def gpus_with_memory() -> tuple[Gpu, ...]:
    """Returns this machine's GPUs whose memory is known, for plans of what fits."""
    return tuple(gpu for gpu in gpus_here() if gpu.memory_bytes)


def watch_use(
    interval_s: float,
    is_over: threading.Event,
    report: Callable[[int, int | None, int | None], None],
) -> None:
    """Reports on each GPU here, at once and then every so often, until it is over.

    report  takes a GPU's number, the bytes of its memory that anyone uses, and the percent of the
            time before in which a kernel ran; None: not told
    """
    with _nvml() as handles:
        while handles:
            for index, handle in handles.items():
                memory = _memory(handle)
                rates = _told("nvmlDeviceGetUtilizationRates", handle)
                report(index, memory and memory.used, rates and rates.gpu)
            if is_over.wait(interval_s):
                return


def held_by(pids: Collection[int]) -> dict[int, tuple[int, int]]:
    """Returns the bytes that processes hold of each GPU here, and those that are free, by number.

    Without the GPUs that tell neither.
    """
    found = {}
    with _nvml() as handles:
        for index, handle in handles.items():
            memory = _memory(handle)
            running = _told("nvmlDeviceGetComputeRunningProcesses", handle)
            if memory is not None and running is not None:
                held = sum(p.usedGpuMemory or 0 for p in running if p.pid in pids)
                found[index] = held, memory.total - memory.used
    return found


@contextlib.contextmanager
def _nvml() -> Iterator[dict[int, Any]]:
    """Opens NVML for a block; yields NVML's handles of the GPUs, by number."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or one that does not answer: the CPU can still build
        yield {}
        return
    try:
        handles = {
            index: _told("nvmlDeviceGetHandleByIndex", index)
            for index in range(_told("nvmlDeviceGetCount") or 0)
        }
        yield {index: handle for index, handle in handles.items() if handle is not None}
    finally:
        _told("nvmlShutdown")


def _memory(handle: Any) -> Any:
    """Total and used bytes; version 2 counts as nvidia-smi does, without the driver's own."""
    import pynvml

    return _told("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)


def _told(function: str, *arguments: Any) -> Any:
    """Calls a function of NVML; None where the GPU, its driver or our rights do not give that."""
    import pynvml

    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError:
        return None


def _letters(name: str) -> str:
    letters = re.sub("[^a-z0-9]", "", name.lower())
    return letters.removeprefix("nvidia").removeprefix("geforce")
