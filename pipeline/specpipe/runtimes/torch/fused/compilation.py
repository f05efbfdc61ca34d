"""Kernels are compiled before they are launched, by all cores at once.

Launches are first made dry: each says which kernels it needs, and nothing runs. Triton keeps what
it compiled in a folder (TRITON_CACHE_DIR, else ~/.triton/cache): only a first start takes long.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from specpipe.progress import count

Launch = Callable[[], None]

_MOST_THREADS = 32
"""More would wait for Python, in which a part of the work is done, and take memory: a guess."""

_LOGGER = logging.getLogger(__name__)


class _Wanted:
    """The kernels that dry launches need; Triton takes 0.3 ms to see that it knows one."""

    def __init__(self) -> None:
        self._known: set[tuple[Any, ...]] = set()

    def add(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        """Asks Triton for a kernel, unless the same was asked for with equal arguments.

        Triton tells apart less: of a number no more than its type, and whether it is 1 or divisible
        by 16.
        """
        facts = (
            (value.dtype, value.data_ptr() % 16)
            if isinstance(value, Tensor)
            else (type(value), value)
            for value in arguments
        )
        key = (kernel, *facts, *options.items())
        if key not in self._known:
            self._known.add(key)
            kernel.warmup(*arguments, grid=grid, **options)


_wanted: ContextVar[_Wanted | None] = ContextVar("wanted", default=None)


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Launches a kernel, or notes, where launches are dry, that it is needed."""
    wanted = _wanted.get()
    if wanted is None:
        kernel[grid](*arguments, **options)
    else:
        wanted.add(kernel, grid, arguments, options)


def compile_kernels(launches: Iterable[Launch]) -> None:
    """Compiles all kernels that launches need, and loads them; no kernel runs.

    What launches do by torch itself is done.
    """
    if not hasattr(triton, "AsyncCompileMode"):  # before Triton 3.6
        for run in launches:
            run()
        return
    use_writable_cache()
    device = torch.cuda.current_device()
    num_threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    # Triton compiles in LLVM and ptxas, which leave Python to other threads meanwhile.
    with (
        ThreadPoolExecutor(
            num_threads, initializer=torch.cuda.set_device, initargs=(device,)
        ) as pool,
        triton.AsyncCompileMode(_Loading(pool)) as mode,
    ):
        token = _wanted.set(_Wanted())
        try:
            for run in launches:
                run()
        finally:
            _wanted.reset(token)
        with count(len(mode.raw_futures), "kernels") as counter:
            for _ in as_completed(mode.raw_futures):
                counter.advance()


class _Loading:
    """Triton's executor: a thread that has compiled a kernel puts it on the GPU, too.

    Else its first launch does, after compiling a launcher for its arguments in C; and that launch
    may be one that is recorded.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = compile_kernel()
            _ = kernel.run  # Triton 3.6: whoever asks for it first loads the kernel
            return kernel

        return self._pool.submit(compile_and_load)


def use_writable_cache() -> None:
    """Lets Triton write elsewhere if it cannot write to its folder; what is there is still read."""
    folder = Path(triton.knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as exc:
        reason = exc.strerror or type(exc).__name__
    elsewhere = Path(tempfile.mkdtemp(prefix="specpipe-kernels-"))
    known = folder.iterdir() if os.access(folder, os.R_OK | os.X_OK) else ()
    for entry in known:
        (elsewhere / entry.name).symlink_to(entry)
    triton.knobs.cache.dir = str(elsewhere)
    _LOGGER.warning(
        "%s: %s; kernels that are not there are compiled at every start; "
        "let TRITON_CACHE_DIR name a folder that can be written and stays",
        folder,
        reason,
    )
