"""What is compiled or recorded after a pair was ready, while a request waits: nothing should be.

It is counted, not refused: text matters more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import triton

from specpipe.runtimes.pair.pair import LateWork

_LOGGER = logging.getLogger(__name__)

_is_preparing: ContextVar[bool] = ContextVar("is_preparing", default=False)


@contextmanager
def preparing() -> Iterator[None]:
    """Nothing that this thread compiles or records during a `with` block is late."""
    token = _is_preparing.set(True)
    try:
        yield
    finally:
        _is_preparing.reset(token)


class Lateness:
    """Counts what is late from now on; where a process has several pairs, that of all of them."""

    def __init__(self) -> None:
        _late.watch()
        self._before = _late.work

    def __call__(self) -> LateWork:
        before, now = self._before, _late.work
        return LateWork(
            num_compilations=now.num_compilations - before.num_compilations,
            num_recordings=now.num_recordings - before.num_recordings,
        )


def note_recording(key: Hashable) -> None:
    """Counts a recording, unless it was made while preparing."""
    if not _is_preparing.get():
        _late.add_recording(key)


class _Late:
    """The work of this process that was late; warns of it while somebody watches."""

    def __init__(self) -> None:
        self.work = LateWork()
        self._is_watched = False

    def watch(self) -> None:
        if self._is_watched:
            return
        self._is_watched = True
        # Triton 3.4 and later; what older ones compile is not counted.
        runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
        if runtime is not None:
            runtime.jit_post_compile_hook = _chained(runtime.jit_post_compile_hook)

    def add_recording(self, key: Hashable) -> None:
        self.work = replace(self.work, num_recordings=self.work.num_recordings + 1)
        self._warn(f"launch {key} was recorded")

    def add_compilation(self, name: str) -> None:
        self.work = replace(self.work, num_compilations=self.work.num_compilations + 1)
        self._warn(f"kernel {name} was compiled, or read from disk,")

    def _warn(self, what: str) -> None:
        if self._is_watched:
            _LOGGER.warning("%s after the pair was ready: requests waited for it", what)


_late = _Late()


def _chained(earlier: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns a hook for what Triton has compiled or found on disk, in front of an earlier one."""

    def hook(*, fn: Any, **facts: Any) -> Any:
        if not _is_preparing.get() and fn.module.startswith(__package__):
            _late.add_compilation(fn.name)
        return None if earlier is None else earlier(fn=fn, **facts)

    return hook
