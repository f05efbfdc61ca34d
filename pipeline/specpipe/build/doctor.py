"""What this machine has for specpipe, and what it can therefore do."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from specpipe.build.stages.calibrate import require_libraries
from specpipe.errors import SpecpipeError
from specpipe.machine import libraries
from specpipe.machine.gpus import gpus_here
from specpipe.machine.provenance import versions
from specpipe.runtimes.launch import Launch
from specpipe.runtimes.runtime import RUNTIMES, load_runtime
from specpipe.runtimes.tensorrt_llm.engines.toolbox import docker_version

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
        *(DoctorLine(program, shutil.which(program) or "not on PATH") for program in _PROGRAMS),
        *_gpus(),
        DoctorLine("docker", _docker()),
        *(DoctorLine(f"runtime {name}", _runtime(name)) for name in RUNTIMES),
        DoctorLine("quantization", _quantization()),
    )


def _tritonserver() -> Iterator[DoctorLine]:
    from specpipe.triton.server import installation, known_holes
    from specpipe.triton.server.command import server_environment
    from specpipe.triton.server.workspace import Workspace

    try:
        binary = installation.find_tritonserver()
    except SpecpipeError as exc:
        yield DoctorLine("tritonserver", str(exc))
        return
    try:
        with contextlib.closing(Workspace(binary)) as workspace:
            environment = server_environment(binary, Launch(), os.environ, workspace)
            installation.check(binary, environment)
    except SpecpipeError as exc:
        yield DoctorLine("tritonserver", f"{binary.path}, which does not start here: {exc}")
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


def _docker() -> str:
    docker = shutil.which("docker")
    if docker is None:
        return "not on PATH"
    version = docker_version(docker)
    return (
        f"{docker}, but its daemon does not answer" if version is None else f"{version} ({docker})"
    )


def _runtime(name: str) -> str:
    """Returns what a runtime can do here; building and serving say which library they miss."""
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
    """Returns whether formats that calibrate can be used here; the others need torch alone."""
    try:
        require_libraries()
    except SpecpipeError as exc:
        return f"plans here (--dry-run); {exc}"
    return "has what calibrating needs"
