"""Makefile and scripts/check_python.py: which Python is taken, and which torch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def check_python() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", ROOT / "scripts" / "check_python.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Python that fits, outside virtual environments; tests change what does not."""
    monkeypatch.setattr(sys, "version_info", (3, 12, 1, "final", 0))
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.35"))
    return monkeypatch


def test_a_python_that_fits(check_python: ModuleType, python: pytest.MonkeyPatch) -> None:
    assert check_python.fault(False) is None


@pytest.mark.parametrize("version", [(2, 7), (3, 9), (3, 14)])
def test_too_old_and_too_new(
    check_python: ModuleType, python: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    python.setattr(sys, "version_info", (*version, 0, "final", 0))
    assert check_python.fault(True) == (
        f"Python {version[0]}.{version[1]} (/usr/bin/python3) does not fit: specpipe runs on 3.10 "
        "to 3.13; name one with PYTHON=python3.12"
    )


def test_numpy_is_compiled_only_when_asked(
    check_python: ModuleType, python: pytest.MonkeyPatch
) -> None:
    python.setattr(sys, "version_info", (3, 13, 0, "final", 0))
    assert check_python.fault(True) is None
    assert check_python.fault(False) == (
        "Python 3.13 (/usr/bin/python3): Triton's Python models need NumPy 1, which has no wheel "
        "for 3.13; name an older Python with PYTHON=python3.12, or let NumPy be compiled, 10 to 20 "
        "minutes, with COMPILE_NUMPY=1"
    )


@pytest.mark.parametrize(
    ("libc", "here"), [(("glibc", "2.31"), "glibc 2.31"), (("", ""), "another libc")]
)
def test_an_old_or_other_libc(
    check_python: ModuleType, python: pytest.MonkeyPatch, libc: tuple[str, str], here: str
) -> None:
    python.setattr("platform.libc_ver", lambda: libc)
    assert check_python.fault(False) == (
        "the Triton that pip installs needs glibc 2.35 or later, as Debian 12 and Ubuntu 22.04 "
        f"have it; here is {here}"
    )


def test_another_system(check_python: ModuleType, python: pytest.MonkeyPatch) -> None:
    python.setattr(sys, "platform", "darwin")
    assert check_python.fault(False) == (
        "the Triton that pip installs is for Linux, not for darwin"
    )


def test_debian_without_venv(check_python: ModuleType, python: pytest.MonkeyPatch) -> None:
    python.setitem(sys.modules, "ensurepip", None)
    assert check_python.fault(False) == (
        "Python 3.12 (/usr/bin/python3) cannot make virtual environments: install its package, as "
        "in apt-get install python3.12-venv"
    )


def test_an_environment_without_pip(check_python: ModuleType, python: pytest.MonkeyPatch) -> None:
    python.setattr(sys, "prefix", "/src/.venv")
    python.setitem(sys.modules, "pip", None)
    assert check_python.fault(False) == (
        "the environment /src/.venv has no pip: remove it, and it is made anew"
    )


def test_all_name_the_same_pythons(check_python: ModuleType) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert (check_python.OLDEST, check_python.NEWEST) == ((3, 10), (3, 13))
    assert 'requires-python = ">=3.10,<3.14"' in project
    classified = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', project)
    assert classified == ["10", "11", "12", "13"]
    # The extra `triton` stops where NumPy 1 has no wheel.
    triton = re.findall(r"\"(?:nvidia-pytriton|numpy<2).*python_version < '([\d.]+)'\"", project)
    assert triton == ["3.13", "3.13"]
    assert check_python.WITH_WHEELS == (3, 12)
    for name in ("README.md", "Makefile", ".github/workflows/nightly.yml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert set(re.findall(r"3\.10 to 3\.(\d+)", text)) == {"12"}, name
        assert "3.13" in text, name


def dry_run(folder: Path, target: str, **programs: str) -> str:
    """What make would run, with shell scripts as its programs."""
    found = folder / "bin"
    found.mkdir()
    for name, script in programs.items():
        (found / name).write_text(f"#!/bin/sh\n{script}\n")
        (found / name).chmod(0o755)
    for name in ("make", "sh", "grep"):
        (found / name).symlink_to(next(p for p in _paths(name) if p.exists()))
    done = subprocess.run(
        ["make", "-n", target, f"VENV={folder}/venv"],
        cwd=ROOT,
        env={"PATH": str(found)},  # not what a make around the tests was told
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _paths(name: str) -> list[Path]:
    return [Path(folder, name) for folder in os.environ["PATH"].split(":")]


@pytest.mark.parametrize(
    ("programs", "chosen"),
    [
        ({"python3": "exit 0", "python3.12": "exit 0"}, "python3"),
        ({"python3": "exit 1", "python3.11": "exit 0"}, "python3.11"),
        ({"python3": "exit 1", "python3.12": "exit 127", "python3.10": "exit 0"}, "python3.10"),
        ({"python3": "exit 1"}, "python3"),  # which says why
    ],
)
def test_the_first_python_that_fits_is_taken(
    tmp_path: Path, programs: dict[str, str], chosen: str
) -> None:
    printed = dry_run(tmp_path, f"{tmp_path}/venv/bin/python", **programs)
    assert printed.startswith(f"python={chosen} && ")


@pytest.mark.parametrize(
    ("programs", "index"),
    [
        ({}, CPU_INDEX),
        ({"nvidia-smi": "echo No devices were found"}, CPU_INDEX),
        ({"nvidia-smi": "echo Driver/library version mismatch; exit 18"}, CPU_INDEX),
        ({"nvidia-smi": "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'"}, ""),
    ],
)
def test_torch_has_cuda_where_there_is_a_gpu(
    tmp_path: Path, programs: dict[str, str], index: str
) -> None:
    assert f'index="{index}"; ' in dry_run(tmp_path, f"{tmp_path}/venv/.serve", **programs)


@pytest.mark.parametrize("has_torch", [True, False])
def test_an_index_without_torch_is_announced_and_passed_over(
    tmp_path: Path, has_torch: bool
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        '#!/bin/sh\necho "$*"\n'
        + ("" if has_torch else 'case "$*" in *--index-url*) exit 1;; esac\n')
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["make", f"{tmp_path}/.serve", f"VENV={tmp_path}", "TORCH_INDEX=https://torch.example/cpu"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    calls = [line for line in done.stdout.splitlines() if line.startswith(("-m", "scripts"))]
    pip = "-m pip install --quiet --constraint constraints.txt"
    assert calls == [
        "scripts/check_python.py",
        f"{pip} --no-deps --timeout 20 --retries 1 --index-url https://torch.example/cpu torch",
        f"{pip} --editable .[torch,triton]",
    ]
    told = "https://torch.example/cpu gave no torch: PyPI's follows, with some 5 GB of CUDA\n"
    assert done.stderr == ("" if has_torch else told)
