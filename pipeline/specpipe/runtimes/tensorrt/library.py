"""The door to TensorRT: one of two libraries with one network API.

`tensorrt_rtx` (TensorRT for RTX) builds without a GPU, for every compute capability at once; the
rest is compiled on the GPU that runs the engine. `tensorrt` builds on the GPU that will run it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from specpipe.errors import RuntimeUnavailable
from specpipe.runtimes.runtime import require_library

DISTRIBUTIONS = {"tensorrt_rtx": "tensorrt-rtx-cu13", "tensorrt": "tensorrt"}
"""The distribution that each library comes with, whose version an engine is tied to."""

EXTRAS = {"tensorrt_rtx": "tensorrt-rtx", "tensorrt": "tensorrt"}

_NEEDED = ("KVCacheMode", "CausalMaskKind", "IAttention", "IRotaryEmbeddingLayer")


def is_installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def require(library: str) -> None:
    """Raises RuntimeUnavailable when a library is not installed."""
    require_library("tensorrt", library, extra=EXTRAS[library])


def load(library: str) -> Any:
    """Imports a library; RuntimeUnavailable where it lacks a layer that a decoder needs."""
    require(library)
    trt = importlib.import_module(library)
    missing = [name for name in _NEEDED if not hasattr(trt, name)]
    if missing:
        raise RuntimeUnavailable(
            f"{library} {trt.__version__} lacks {', '.join(missing)}: a decoder needs KV cache "
            "updates, rotary embedding and attention with a causal mask aligned to the lower "
            "right; install a newer one"
        )
    return trt


def make_logger(trt: Any) -> Any:
    """Makes a logger of the library that keeps the last errors in `errors`."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors = [*self.errors[-4:], message]

    return Logger()


def last_errors(logger: Any) -> str:
    """Returns the last errors of a logger, a line each, or a sentence that there are none.

    Without a GPU tensorrt_rtx adds to each error that it could not ask CUDA for one too.
    """
    errors: Sequence[str] = logger.errors
    own_errors = [error for error in errors if "::catchCudaError" not in error]
    return "\n".join(own_errors or errors) or "the library gave no reason"
