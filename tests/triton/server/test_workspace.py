"""The temporary folder in which Triton finds the repository, Python and its packages."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from specpipe.errors import ServerError
from specpipe.triton.client import Client
from specpipe.triton.server import server, workspace
from specpipe.triton.server.installation import TritonBinary, find_tritonserver
from specpipe.triton.server.workspace import Workspace

# The stub's interpreter is isolated, and reads paths as ASCII.
AS_THE_STUB = ("-I", "-X", "utf8=0")
LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("name", ["a b", 'it\'s "ünï-日本"\n$(false);`no`&,%s'])
def test_a_repository_is_served_from_a_folder_of_any_name(
    echo_repository: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name / "model_repo"
    folder.parent.mkdir()
    echo_repository().rename(folder)
    with server.running(folder) as running, Client(running.http_url) as client:
        assert client.generate("Hello", max_tokens=3).text == "Hello"


def test_the_stubs_python_has_this_processs_packages_under_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pâckages of ours"
    (folder / "only_here").mkdir(parents=True)
    (folder / "only_here" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    with contextlib.closing(Workspace(TritonBinary(Path("tritonserver")))) as made:
        found = subprocess.run(
            [
                *(made.python_dir / "python3", *AS_THE_STUB, "-c"),
                "import numpy, only_here, specpipe; print(only_here.__file__.isascii())",
            ],
            env=LOCALE,
            capture_output=True,
            text=True,
        )
    assert (found.stdout, found.stderr) == ("True\n", "")


@pytest.mark.skipif(not sysconfig.get_config_var("Py_ENABLE_SHARED"), reason="a static Python")
def test_libpython_alone_is_put_before_the_loader() -> None:
    needed = sysconfig.get_config_var("INSTSONAME")
    stub = Path(sys.executable)  # any file with the name in it
    binary = TritonBinary(Path("tritonserver"), python_stub=stub)
    assert binary.needed_libpython() == needed
    with contextlib.closing(Workspace(binary)) as made:
        libraries = [path.name for path in made.library_dir.iterdir() if path.is_file()]
        assert libraries == [needed]


def test_a_temporary_folder_whose_name_triton_cannot_take_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    monkeypatch.setattr(workspace.tempfile, "tempdir", str(folder))
    with contextlib.closing(Workspace(TritonBinary(Path("tritonserver")))) as made:
        assert made.library_dir.is_dir()
        assert " " not in str(made.repository)
    assert not os.path.lexists(made.library_dir)
    monkeypatch.setattr(workspace, "_PARENTS", ("/nonexistent", "/proc"))
    with pytest.raises(ServerError, match="none of /nonexistent, /proc can be written; set TMPDIR"):
        Workspace(TritonBinary(Path("tritonserver")))


def test_the_wheels_backends_are_gathered_with_this_pythons_stub() -> None:
    binary = find_tritonserver()
    if binary.python_stub is None:
        pytest.skip("this Triton is not the pip-installed one")
    with contextlib.closing(Workspace(binary)) as made:
        assert made.backends is not None
        assert (made.backends / "python" / binary.python_stub.name).samefile(binary.python_stub)
