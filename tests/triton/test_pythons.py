"""The real server on each other Python of this machine, with what core and extra `triton` bring.

Each gets an environment in .venv/pythons, which stays until its requirements change. There is no
torch in it: the pair is EchoPair.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv" / "pythons"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
OTHERS = [version for version in VERSIONS if version != "{}.{}".format(*sys.version_info)]

SERVE = """
import sys
from pathlib import Path
from specpipe.errors import ServerError
from specpipe.triton.client.client import Client
from specpipe.triton.server.server import running

try:
    with running(Path(sys.argv[1])) as server:
        for url in (server.http_url, server.grpc_url):
            with Client(url) as client:
                print(client.generate("Hello", max_tokens=3).text)
except ServerError as exc:
    print(exc)
"""


def find_python(version: str) -> Path | None:
    """One that can make environments, of pyenv's or on PATH; pyenv's shims may lead nowhere."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    on_path = shutil.which(f"python{version}")
    for python in [*found, *([Path(on_path)] if on_path else [])]:
        asked = subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True)
        if asked.returncode == 0:
            return python
    return None


def pip(environment: Path, *arguments: str) -> None:
    installed = subprocess.run(
        [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
        + ["--disable-pip-version-check", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if installed.returncode != 0:
        shutil.rmtree(environment)
        pytest.skip(f"pip: {installed.stderr.strip().splitlines()[-1]}")


# Installing takes a minute for each.
@pytest.fixture(
    scope="module", params=[pytest.param(version, marks=pytest.mark.slow) for version in OTHERS]
)
def environment(request: pytest.FixtureRequest) -> Path:
    """An environment with core and Triton; with NumPy 1 only where there is a wheel of it."""
    version: str = request.param
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    made = ENVIRONMENTS / version
    wanted = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    digest = hashlib.sha256(b"".join([*wanted, bytes(python.resolve())])).hexdigest()
    mark = made / "installed"
    if mark.is_file() and mark.read_text() == digest:
        return made
    shutil.rmtree(made, ignore_errors=True)
    subprocess.run([python, "-m", "venv", made], check=True)
    pip(made, "--constraint", "constraints.txt", "--editable", ".[triton]")
    if version == "3.13":  # where the extra leaves Triton out, since NumPy 1 has no wheel
        pip(made, "--constraint", "constraints.txt", "--no-deps", "nvidia-pytriton")
    mark.write_text(digest)
    return made


def run(environment: Path, *arguments: str | Path) -> tuple[str, int]:
    """What a program of the environment prints; no Python's own variables reach it."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    program, *rest = arguments
    ended = subprocess.run(
        [environment / "bin" / program, *rest],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return ended.stdout, ended.returncode


def test_the_ensemble_answers_with_text_or_says_what_it_needs(
    environment: Path, echo_repository: Callable[..., Path]
) -> None:
    printed, _ = run(environment, "python", "-c", SERVE, echo_repository())
    numpy, _ = run(environment, "python", "-c", "import numpy; print(numpy.__version__)")
    if numpy.startswith("1."):
        assert printed == "Hello\nHello\n"
    else:
        found = f"the pip-installed Triton needs NumPy 1, and this Python has NumPy {numpy.strip()}"
        assert printed.startswith(f"{found}: run inside a Triton container or with Python 3.10 to")
        assert len(printed.splitlines()) == 1


def test_what_needs_no_triton_runs(environment: Path) -> None:
    printed, status = run(environment, "specpipe", "check", "--config", "configs/quickstart.yaml")
    assert (printed.splitlines()[0], status) == (
        "draft and target fit: 4096 token ids in use; embedding rows: draft 4096, target 4096",
        0,
    )
    assert run(environment, "specpipe", "serve", "--help")[1] == 0
    printed, status = run(environment, "specpipe", "schema")
    assert (printed[:1], status) == ("{", 0)
