"""specpipe as others have it: a wheel of this checkout, and environments to install it into."""

from __future__ import annotations

import email.parser
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Libraries of the environment that runs the tests: nothing is fetched.
LIBRARIES = [path for path in sys.path if Path(path).name == "site-packages"]
FROM_HERE = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")


def copy_checkout(folder: Path) -> Path:
    """Copies what belongs to the distribution, so that nothing is built in the checkout itself."""
    for name in ("pipeline", "model_repo", "models", "configs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(hook: str, checkout: Path, out: Path) -> Path:
    """Calls one of setuptools' build hooks (PEP 517) in a checkout; returns what it built."""
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    run([sys.executable, "-c", code], cwd=checkout)
    (built,) = out.iterdir()
    return built


class Environment:
    """A virtual environment that sees the libraries of this one, but not its specpipe."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site_packages = folder / "lib" / version / "site-packages"
        (self.site_packages / "libraries.pth").write_text("\n".join(LIBRARIES))

    def install(self, *arguments: str | Path) -> None:
        """Installs here what may be among the libraries, too."""
        pip = [self.python, "-m", "pip", "install", "--quiet", "--ignore-installed"]
        run([*pip, *FROM_HERE, *arguments])

    def ask(self, expression: str, *, cwd: Path, **variables: str) -> str:
        """What an expression with the names of specpipe.machine.libraries is, printed."""
        code = f"from specpipe.machine.libraries import *; print({expression})"
        return run([self.python, "-c", code], cwd=cwd, **variables).rstrip("\n")


def run(command: list[str | Path], *, cwd: Path | None = None, **variables: str) -> str:
    """Runs a command that must succeed; returns its standard output."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def extras_of(wheel: Path) -> set[str]:
    """The extras that a wheel's metadata names."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.parser.Parser().parsestr(files.read(name).decode())
    return set(metadata.get_all("Provides-Extra", []))
