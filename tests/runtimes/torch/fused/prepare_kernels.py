"""Compiles what dry launches need, for a GPU that is not here; prints JSON.

Run by test_compilation.py in a process of its own: one that interprets kernels cannot compile them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from specpipe.progress import shown
from specpipe.runtimes.torch.fused import kernels
from specpipe.runtimes.torch.fused.compilation import compile_kernels, launch
from specpipe.runtimes.torch.fused.lateness import Lateness, preparing
from tests.recorder import Recorder

LOADED: list[str] = []


class Driver:
    """Of one GPU, which runs nothing."""

    launcher_cls = staticmethod(lambda source, metadata: None)

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
            load_binary=self._load,
        )

    @staticmethod
    def _load(name: str, *_: Any) -> tuple[int, ...]:
        LOADED.append(name)
        return (1, 1, 32, 0, 1024)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@triton.jit
def add(x_ptr, y_ptr, number, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(y_ptr + places, tl.load(x_ptr + places) + number)


@triton.jit
def double(x_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(x_ptr + places, 2 * tl.load(x_ptr + places))


def adding(number: int, size: int = 64) -> Callable[[], None]:
    x, y = torch.ones(2, 512)

    def run() -> None:
        launch(add, (1,), [x, y, number], {"SIZE": size})
        launch(double, (1,), [y], {"SIZE": size, "num_warps": 1})

    return run


def main() -> None:
    driver.set_active(Driver())
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    for kernel in (add, double):  # as if they were the package's own
        kernel.fn.__module__ = kernels.__name__
    late = Lateness()
    told = Recorder()
    with shown(told), preparing():
        compile_kernels([adding(3), adding(5), adding(16), adding(3, size=128)])
        compile_kernels([adding(7)])
    before = late().num_compilations
    compile_kernels([adding(3, size=256)])
    found = {
        "loaded": sorted(LOADED),
        "late": [before, late().num_compilations],
        "counted": [[count.done, count.total] for count in told.counts],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
