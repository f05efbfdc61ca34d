"""A temporary folder with a plain name, in which Triton and its Python stubs find everything.

repository/     the models that Triton loads (served_models.py)
backends/       the wheel's, with the stub of this Python beside its library
bin/python3     with pyvenv.cfg and lib/python3.X: an environment that has this process's packages
base            a link to this Python
lib/            libpython, as a link

Triton 2.51 starts a stub, the process of one Python model, with a line of bash that quotes no path
(python_backend, stub_launcher.cc), and its interpreter is isolated: it reads paths as ASCII
whatever the locale is, and knows of packages only what the `python3` on PATH has beside it, so
neither those of PYTHONPATH nor those that a user installed with --user.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from specpipe.errors import ServerError
from specpipe.triton.server.installation import TritonBinary

_PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
_PARENTS = ("/tmp", "/var/tmp", "/dev/shm")


class Workspace:
    """The folder, until `close`; raises ServerError where none can be made."""

    def __init__(self, binary: TritonBinary) -> None:
        self._folder = _plain_folder()
        self.repository = self._folder / "repository"
        self.backends = binary.backends
        self.python_dir = self._folder / "bin"
        self.library_dir = self._folder / "lib"
        self._write_environment()
        needed = binary.needed_libpython()
        libpython = None if needed is None else _find_libpython(needed)
        if libpython is not None:
            (self.library_dir / libpython.name).symlink_to(libpython)
        if binary.backends is not None and binary.python_stub is not None:
            self.backends = self._gather_backends(binary.backends, binary.python_stub)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write_environment(self) -> None:
        self.python_dir.mkdir()
        (self.python_dir / "python3").symlink_to(sys.executable)
        (self._folder / "base").symlink_to(sys.base_prefix)
        home = self._folder / "base" / "bin"
        (self._folder / "pyvenv.cfg").write_text(f"home = {home}\n", encoding="ascii")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = self.library_dir / version / "site-packages"
        packages.mkdir(parents=True)
        folders = (folder for folder in sys.path if os.path.isabs(folder))
        # Triton loads a model anew once its folder has changed, as when `__pycache__` gets into it.
        lines = ["import sys; sys.dont_write_bytecode = True\n"]
        lines += (f"import site; site.addsitedir({self._ascii(folder)!r})\n" for folder in folders)
        (packages / "specpipe.pth").write_text("".join(lines), encoding="ascii")

    def _ascii(self, folder: str) -> str:
        """Returns an ASCII name of a folder, since the stub reads paths as ASCII."""
        if folder.isascii():
            return folder
        link = self._folder / f"packages{len(list(self._folder.iterdir()))}"
        link.symlink_to(folder)
        return str(link)

    def _gather_backends(self, backends: Path, stub: Path) -> Path:
        """Returns a folder of backends with the stub in it; the wheel keeps them apart."""
        gathered = self._folder / "backends"
        (gathered / "python").mkdir(parents=True)
        for backend in backends.iterdir():
            if backend.name != "python":
                (gathered / backend.name).symlink_to(backend)
        for source in [*(backends / "python").iterdir(), stub]:
            (gathered / "python" / source.name).symlink_to(source)
        return gathered


def _plain_folder() -> Path:
    """Makes the folder where TMPDIR says, or where its name can be a plain one."""
    for parent in (*_temporary_folder(), *_PARENTS):
        if _PLAIN.fullmatch(parent):
            try:
                return Path(tempfile.mkdtemp(prefix="specpipe-triton-", dir=parent))
            except OSError:  # not there, read-only, or full
                continue
    raise ServerError(
        "Triton needs a folder for temporary files whose path is of ASCII letters and digits, "
        f"without a space: none of {', '.join(_PARENTS)} can be written; set TMPDIR to one"
    )


def _temporary_folder() -> tuple[str, ...]:
    try:
        return (tempfile.gettempdir(),)
    except FileNotFoundError:
        return ()


def _find_libpython(name: str) -> Path | None:
    """Returns libpython in this Python's folders, where not all loaders look (pyenv, uv, conda)."""
    folders = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib"]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch:
        folders.append(f"{sys.base_prefix}/lib/{multiarch}")
    # A Python that was moved has in LIBDIR where it was built, and maybe another one is.
    candidates = (Path(folder, name) for folder in reversed(folders) if folder)
    return next((path for path in candidates if path.is_file()), None)
