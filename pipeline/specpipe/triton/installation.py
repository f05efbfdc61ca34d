"""The Triton of this machine: where it is, and its backends."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from specpipe.errors import ServerError


@dataclass(frozen=True)
class TritonBinary:
    """A tritonserver to run, with what it needs around it."""

    path: Path
    libraries_dir: Path | None = None
    # None: where the installation has them. Else a folder of them, `python` among them
    backends: Path | None = None
    python_stub: Path | None = None  # the process that runs a Python model, for this Python


def find_tritonserver() -> TritonBinary:
    """Finds `tritonserver` on PATH, else in the nvidia-pytriton wheel; raises ServerError."""
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return TritonBinary(Path(on_path))
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError(
            "tritonserver is not on PATH: run inside a Triton container, or pip install "
            "'specpipe[triton]'"
        )
    root = Path(spec.submodule_search_locations[0])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    server = root / "tritonserver"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise ServerError(
            f"nvidia-pytriton has no Python {version} backend: use Python 3.10 to 3.12"
        )
    return TritonBinary(
        path=server / "bin" / "tritonserver",
        libraries_dir=root.parent / "nvidia_pytriton.libs",
        backends=server / "backends",
        python_stub=stub,
    )


def gather_backends(binary: TritonBinary, folder: Path) -> Path:
    """The wheel keeps the stub of each Python version apart from the backend that runs it."""
    assert binary.backends is not None and binary.python_stub is not None
    for backend in binary.backends.iterdir():
        if backend.name != "python":
            (folder / backend.name).symlink_to(backend)
    (folder / "python").mkdir()
    for source in (binary.backends / "python").iterdir():
        (folder / "python" / source.name).symlink_to(source)
    (folder / "python" / binary.python_stub.name).symlink_to(binary.python_stub)
    return folder
