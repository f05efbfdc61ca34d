"""What this machine has for specpipe, and what it can therefore do."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from specpipe.errors import SpecpipeError
from specpipe.provenance import gpus, versions
from specpipe.runtimes.base import RUNTIMES, load_runtime
from specpipe.runtimes.tensorrt_llm.toolbox import docker_version
from specpipe.stages.calibrate import require_libraries

LIBRARIES = (
    "huggingface_hub",
    "numpy",
    "protobuf",
    "tokenizers",
    "torch",
    "transformers",
    "nvidia-modelopt",
    "tritonclient",
    "nvidia-pytriton",
    "tensorrt-rtx-cu13",
    "tensorrt",
    "cuda-bindings",
    "tensorrt_llm",
)
_PROGRAMS = ("trtllm-build", "mpirun")


@dataclass(frozen=True)
class Line:
    """One thing, and what there is of it."""

    subject: str
    found: str


def examine() -> tuple[Line, ...]:
    """Looks at the environment; nothing is started but `nvidia-smi` and `docker version`."""
    return (
        Line("python", f"{platform.python_version()} ({sys.executable})"),
        *(Line(library, found) for library, found in versions(LIBRARIES).items()),
        Line("tritonserver", _tritonserver()),
        *(Line(program, shutil.which(program) or "not on PATH") for program in _PROGRAMS),
        *_gpus(),
        Line("docker", _docker()),
        *(Line(f"runtime {name}", _runtime(name)) for name in RUNTIMES),
        Line("quantization", _quantization()),
    )


def _tritonserver() -> str:
    from specpipe.triton.server import find_tritonserver

    try:
        return str(find_tritonserver().path)
    except SpecpipeError as exc:
        return str(exc)


def _gpus() -> Iterator[Line]:
    found = gpus()
    if not found:
        yield Line("GPU", "none that nvidia-smi tells of")
    for number, gpu in enumerate(found):
        yield Line(
            f"GPU {number}",
            f"{gpu['name']}, compute capability {gpu['compute_cap']}, driver "
            f"{gpu['driver_version']}",
        )


def _docker() -> str:
    docker = shutil.which("docker")
    if docker is None:
        return "not on PATH"
    version = docker_version(docker)
    return (
        f"{docker}, but its daemon does not answer" if version is None else f"{version} ({docker})"
    )


def _runtime(name: str) -> str:
    """Planning needs no library; building and serving say what they miss."""
    runtime = load_runtime(name)
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
    """Formats that need no data want torch alone."""
    try:
        require_libraries()
    except SpecpipeError as exc:
        return f"plans here (--dry-run); {exc}"
    return "has what calibrating needs"
