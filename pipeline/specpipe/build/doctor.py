"""What this machine has for specpipe, and what it can therefore do."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpipe.build.stages.calibrate import require_libraries
from specpipe.errors import ServerError, SpecpipeError
from specpipe.machine import libraries
from specpipe.machine.gpus import gpus_here
from specpipe.machine.provenance import versions
from specpipe.runtimes.launch import Launch
from specpipe.runtimes.runtime import RUNTIMES, Runtime, load_runtime

if TYPE_CHECKING:
    from specpipe.triton.server.installation import TritonBinary

LIBRARIES = (
    "huggingface_hub",
    "numpy",
    "protobuf",
    "tokenizers",
    "transformers",
    "nvidia-modelopt",
    "tritonclient",
    "nvidia-pytriton",
)


@dataclass(frozen=True)
class DoctorLine:
    """One thing, and what there is of it."""

    subject: str
    text: str


def examine() -> tuple[DoctorLine, ...]:
    """Returns what the environment has; starts nothing but a Triton that ends at once."""
    return (
        DoctorLine("python", f"{platform.python_version()} ({sys.executable})"),
        DoctorLine("installed", libraries.describe()),
        *(DoctorLine("conflict", text) for text in libraries.conflicts()),
        *(DoctorLine(library, text) for library, text in versions(LIBRARIES).items()),
        *_tritonserver(),
        *_gpus(),
        *(line for name in RUNTIMES for line in _runtime(name)),
        DoctorLine("quantization", _quantization()),
    )


def find_triton() -> TritonBinary:
    """Returns the tritonserver of this machine; ServerError where its models cannot start here."""
    from specpipe.triton.server import installation
    from specpipe.triton.server.command import server_environment
    from specpipe.triton.server.workspace import Workspace

    binary = installation.find_tritonserver()
    try:
        with contextlib.closing(Workspace(binary)) as workspace:
            environment = server_environment(binary, Launch(), os.environ, workspace)
            installation.check(binary, environment)
    except SpecpipeError as exc:
        raise ServerError(f"{binary.path}, which does not start here: {exc}") from exc
    return binary


def describe_stub() -> str:
    """Returns which Python and NumPy Triton's models work with, beside those that are here.

    Raises ServerError where they cannot start here.
    """
    import numpy as np

    binary = find_triton()
    numpy = {True: "1 and 2", False: "1", None: "unknown"}[binary.takes_numpy_2()]
    return (
        f"{binary.stub} works with Python {binary.python_version() or 'unknown'} and NumPy "
        f"{numpy}; here are {platform.python_version()} and {np.__version__}"
    )


def _tritonserver() -> Iterator[DoctorLine]:
    from specpipe.triton.server import known_holes

    try:
        binary = find_triton()
    except SpecpipeError as exc:
        yield DoctorLine("tritonserver", str(exc))
        return
    version = known_holes.find_version(binary, os.environ)
    yield DoctorLine("tritonserver", f"{version or 'version unknown'} ({binary.path})")
    yield DoctorLine("known holes", known_holes.describe(version))


def _gpus() -> Iterator[DoctorLine]:
    found = gpus_here()
    if not found:
        yield DoctorLine("GPU", "none that NVIDIA's driver shows")
    for number, gpu in enumerate(found):
        yield DoctorLine(
            f"GPU {number}",
            f"{gpu.name}, compute capability {gpu.compute_capability}, driver {gpu.driver}",
        )


def _runtime(name: str) -> Iterator[DoctorLine]:
    """Yields what a runtime finds here, and what it can therefore do."""
    runtime = load_runtime(name)
    for subject, text in runtime.machine_facts().items():
        yield DoctorLine(subject, text)
    yield DoctorLine(f"runtime {name}", _what_it_does(runtime))


def _what_it_does(runtime: Runtime) -> str:
    """Returns what a runtime can do here; building and serving say which library they miss."""
    try:
        runtime.require()
    except SpecpipeError as exc:
        return f"plans here (--dry-run); {exc}"
    try:
        runtime.require_serving()
    except SpecpipeError as exc:
        return f"builds here; not served here: {exc}"
    return "builds here, and is served here"


def _quantization() -> str:
    """Returns whether formats that calibrate can be used here; the others need torch alone."""
    try:
        require_libraries()
    except SpecpipeError as exc:
        return f"plans here (--dry-run); {exc}"
    return "has what calibrating needs"
