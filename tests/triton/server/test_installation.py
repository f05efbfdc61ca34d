"""Finding Triton, and what its Python models need of this machine, before it is started."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specpipe.errors import ServerError
from specpipe.machine.libraries import with_library
from specpipe.triton.server import installation
from specpipe.triton.server.installation import TritonBinary

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

OF_NUMPY_1 = "exit 1  # numpy.core.multiarray"


def stub_that(folder: Path, script: str, *, python: str = VERSION) -> TritonBinary:
    """A Triton of one's own whose stub is a script, linked with libpython as far as one can see."""
    stub = folder / "triton_python_backend_stub"
    linked = f"\0libpython{python}.so.1.0\0".encode()
    stub.write_bytes(f"#!/bin/sh\n{script}\nexit 127\n".encode() + linked)
    stub.chmod(0o755)
    return TritonBinary(folder / "tritonserver", python_stub=stub)


def refusal(binary: TritonBinary) -> str:
    with pytest.raises(ServerError) as caught:
        installation.check(binary, os.environ)
    return str(caught.value)


def test_tritonserver_on_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installation.find_tritonserver() == TritonBinary(binary)


def test_no_tritonserver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"pip install .*\[triton\]'"):
        installation.find_tritonserver()


def test_a_stub_that_starts_is_let_through(tmp_path: Path) -> None:
    installation.check(stub_that(tmp_path, "echo Expected 9 arguments >&2; exit 1"), os.environ)


def test_no_libpython_names_the_package_and_the_build_that_have_it(tmp_path: Path) -> None:
    missing = f"libpython{VERSION}.so.1.0"
    loader = (
        f"stub: error while loading shared libraries: {missing}: cannot open shared object file"
    )
    assert refusal(stub_that(tmp_path, f"echo '{loader}' >&2")) == (
        f"Triton's Python models need {missing}, which is not in {sys.base_prefix}: apt install "
        f"libpython{VERSION}, or use a Python built with --enable-shared "
        f"(PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install {VERSION})"
    )


def test_an_old_glibc_is_named(tmp_path: Path) -> None:
    loader = "stub: /lib/libc.so.6: version `GLIBC_2.35' not found (required by stub)"
    message = refusal(stub_that(tmp_path, f'echo "{loader.replace("`", chr(92) + "`")}" >&2'))
    assert message.startswith("the pip-installed Triton needs glibc 2.35 or newer, and here is ")


def test_any_other_library_is_said_in_the_loaders_words(tmp_path: Path) -> None:
    loader = "stub: error while loading shared libraries: libfoo.so.1: cannot open"
    assert refusal(stub_that(tmp_path, f"echo '{loader}' >&2")) == (
        "Triton's Python models cannot start: error while loading shared libraries: libfoo.so.1: "
        "cannot open"
    )


def test_a_stub_for_another_libc_is_refused(tmp_path: Path) -> None:
    binary = stub_that(tmp_path, "")
    binary.stub.write_bytes(binary.stub.read_bytes().replace(b"/bin/sh", b"/lib/ld-none.so"))
    assert refusal(binary) == (
        f"{binary.stub} cannot be run (No such file or directory): use a Linux with glibc 2.35 or "
        "newer on a file system that allows programs, or a Triton container"
    )


def test_a_triton_for_another_python_is_refused(tmp_path: Path) -> None:
    assert refusal(stub_that(tmp_path, "exit 1", python="3.99")) == (
        f"{tmp_path}/tritonserver runs models with Python 3.99, and specpipe is installed for "
        f"Python {VERSION}: install it with Python 3.99"
    )


def test_numpy_2_is_refused_with_the_cure_for_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(np, "__version__", "2.4.0")
    binary = stub_that(tmp_path, OF_NUMPY_1)
    found = "the pip-installed Triton needs NumPy 1, and this Python has NumPy 2.4.0"
    monkeypatch.setattr(installation, "_NO_WHEEL_OF_NUMPY_1", (3, 99))
    assert refusal(binary) == f"{found}: {with_library('numpy<2')}"
    monkeypatch.setattr(installation, "_NO_WHEEL_OF_NUMPY_1", (3, 0))
    assert refusal(binary) == (
        f"{found}: run inside a Triton container or with Python 3.10 to 3.12, or let NumPy 1 be "
        f"compiled for 10 to 20 minutes: {with_library('nvidia-pytriton', 'numpy<2')}"
    )


def test_numpy_2_is_refused_by_what_the_stub_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton in an image of one's own, copied from an older one."""
    binary = replace(stub_that(tmp_path, OF_NUMPY_1), python_stub=None, backends=tmp_path)
    (tmp_path / "python").mkdir()
    (tmp_path / "triton_python_backend_stub").rename(binary.stub)
    installation.check(binary, os.environ)
    monkeypatch.setattr(np, "__version__", "2.4.0")
    assert refusal(binary) == (
        f"{tmp_path}/tritonserver needs NumPy 1, and this Python has NumPy 2.4.0: take a newer "
        "Triton, whose models work with NumPy 2"
    )
    newer = binary.stub.read_text(errors="surrogateescape").replace("multiarray", "NumpyVersion")
    binary.stub.write_text(newer, errors="surrogateescape")
    installation.check(binary, os.environ)


def test_the_wheel_s_stub_takes_numpy_1_alone() -> None:
    binary = installation.find_tritonserver()
    if binary.python_stub is None:
        pytest.skip("this Triton is not the pip-installed one")
    assert binary.takes_numpy_2() is False


def test_a_triton_of_an_image_may_have_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "2.4.0")
    installation.check(TritonBinary(Path("/opt/tritonserver/bin/tritonserver")), os.environ)
