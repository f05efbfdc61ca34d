"""The Triton of this machine: where it is, and whether its Python models can start here."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specpipe.errors import ServerError
from specpipe.machine.libraries import with_extras, with_library

_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_STUB = "triton_python_backend_stub"  # the process that runs a Python model
_LIBPYTHON = re.compile(rb"\0(libpython3(?:-\w+)?\.(\d+)\.so[\w.]*)\0")  # auditwheel adds a hash
_STUB_TIMEOUT_S = 20.0  # it ends at once where it can start: a guess for a slow disk
_LOADER_FAILURE = re.compile(
    r"error while loading shared libraries|version `GLIBC[\w.]*' not found"
)
_NO_WHEEL_OF_NUMPY_1 = (3, 13)  # the first Python that NumPy 1 has no wheel for


@dataclass(frozen=True)
class TritonBinary:
    """A tritonserver to run, with what it needs around it."""

    path: Path
    libraries_dir: Path | None = None
    # None: where the installation has them. Else a folder of them, `python` among them
    backends: Path | None = None
    python_stub: Path | None = None  # the stub for this Python, where there is one for each

    @property
    def stub(self) -> Path:
        """The process that runs a Python model."""
        backends = self.path.resolve().parents[1] / "backends"  # as in Triton's images
        return self.python_stub or (self.backends or backends) / "python" / _STUB

    def needed_libpython(self) -> str | None:
        """Returns the name of the library that the stub is linked with; None: unknown."""
        link = self._linked_libpython()
        return None if link is None else link[1].decode()

    def python_version(self) -> str | None:
        """Returns the Python that the stub runs, as in `3.12`; None where it is unknown."""
        link = self._linked_libpython()
        return None if link is None else f"3.{int(link[2])}"

    def takes_numpy_2(self) -> bool | None:
        """Returns whether the stub works with NumPy 2; None where it is unknown.

        Its pybind11 does from 2.12 on, where it asks NumPy for a `NumpyVersion`, which no older one
        does (include/pybind11/numpy.h of 2.11.1 and 2.13.6).
        """
        try:
            text = self.stub.read_bytes()
        except OSError:
            return None
        return b"NumpyVersion" in text if b"numpy" in text else None

    def _linked_libpython(self) -> re.Match[bytes] | None:
        try:
            return _LIBPYTHON.search(self.stub.read_bytes())
        except OSError:
            return None


def find_tritonserver() -> TritonBinary:
    """Finds `tritonserver` on PATH, else in the nvidia-pytriton wheel; raises ServerError."""
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return TritonBinary(Path(on_path))
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError(f"tritonserver is not on PATH: {_how_to_get_triton()}")
    root = Path(spec.submodule_search_locations[0])
    server = root / "tritonserver"
    stub = server / "python_backend_stubs" / _VERSION / _STUB
    if not stub.is_file():
        raise ServerError(
            f"nvidia-pytriton has no Python {_VERSION} backend: use Python 3.10 to 3.13"
        )
    return TritonBinary(
        path=server / "bin" / "tritonserver",
        libraries_dir=root.parent / "nvidia_pytriton.libs",
        backends=server / "backends",
        python_stub=stub,
    )


def check(binary: TritonBinary, environment: Mapping[str, str]) -> None:
    """Raises ServerError where Python models cannot start in the environment that they will have.

    Triton itself says only that a stub is not healthy, after most of a minute.
    """
    version = binary.python_version()
    if version not in (None, _VERSION):
        raise ServerError(
            f"{binary.path} runs models with Python {version}, and specpipe is installed for "
            f"Python {_VERSION}: install it with Python {version}"
        )
    if binary.takes_numpy_2() is False:
        _check_numpy(binary)
    if binary.stub.is_file():
        _check_stub(binary, environment)


def _check_numpy(binary: TritonBinary) -> None:
    """Refuses NumPy 2, with which such stubs die of the first tensor of strings (2.51)."""
    import numpy as np

    if int(np.__version__.partition(".")[0]) < 2:
        return
    which = str(binary.path) if binary.python_stub is None else "the pip-installed Triton"
    conflict = f"{which} needs NumPy 1, and this Python has NumPy {np.__version__}"
    if binary.python_stub is None:
        raise ServerError(f"{conflict}: take a newer Triton, whose models work with NumPy 2")
    if sys.version_info < _NO_WHEEL_OF_NUMPY_1:
        raise ServerError(f"{conflict}: {with_library('numpy<2')}")
    raise ServerError(f"{conflict}: {_how_to_get_triton()}")


def _how_to_get_triton() -> str:
    if sys.version_info < _NO_WHEEL_OF_NUMPY_1:
        return f"run inside a Triton container, or {with_extras('triton')}"
    # The extra leaves it out here (pyproject.toml).
    return (
        "run inside a Triton container or with Python 3.10 to 3.12, or let NumPy 1 be compiled for "
        f"10 to 20 minutes: {with_library('nvidia-pytriton', 'numpy<2')}"
    )


def _check_stub(binary: TritonBinary, environment: Mapping[str, str]) -> None:
    """Starts the stub without arguments: it refuses that, once the loader found all it needs."""
    try:
        started = subprocess.run(
            [binary.stub],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_STUB_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return  # it runs
    except OSError as exc:
        raise ServerError(
            f"{binary.stub} cannot be run ({os.strerror(exc.errno or 0)}): use a Linux with glibc "
            "2.35 or newer on a file system that allows programs, or a Triton container"
        ) from exc
    failed = [line for line in started.stderr.splitlines() if _LOADER_FAILURE.search(line)]
    if not failed:
        return
    needed = binary.needed_libpython()
    if needed is not None and needed in failed[0]:
        raise ServerError(
            f"Triton's Python models need {needed}, which is not in {sys.base_prefix}: apt install "
            f"libpython{_VERSION}, or use a Python built with --enable-shared "
            f"(PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install {_VERSION})"
        )
    if "GLIBC" in failed[0]:
        raise ServerError(
            f"the pip-installed Triton needs glibc 2.35 or newer, and here is "
            f"{' '.join(platform.libc_ver()) or 'none'}: use Ubuntu 22.04, Debian 12 or newer, or "
            "run inside a Triton container"
        )
    raise ServerError(f"Triton's Python models cannot start: {failed[0].partition(': ')[2]}")
