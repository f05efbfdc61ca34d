"""How specpipe came to be here: the command that would add to it, and the files it brings along.

The distribution is specpipe-llm, since `specpipe` on PyPI is another project; import and command
are `specpipe`. What installers leave behind: PyPA's specifications "Recording installed projects"
(INSTALLER, RECORD) and "Direct URL data structure" (direct_url.json).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import site
import sys
import urllib.parse
import urllib.request
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from specpipe.errors import RepositoryError, RuntimeUnavailable

DISTRIBUTION = "specpipe-llm"

_PACKAGE = Path(__file__).resolve().parents[1]  # specpipe/
_CHECKOUT = _PACKAGE.parents[1]  # above pipeline/, where there is one


def with_extras(*extras: str) -> str:
    """Returns the command line that adds extras of specpipe to what is installed here.

    A checkout is not copied by it, a wheel or repository is taken again from where it was, and a
    folder that `pip install --target` filled gets the libraries, too.
    """
    return f"{_installer('install')} {_arguments(*extras)}"


def require_installed(needed_by: str, *libraries: str, extra: str) -> None:
    """Raises RuntimeUnavailable when a library that comes with an extra is not installed."""
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            raise RuntimeUnavailable(f"{needed_by} needs '{library}': {with_extras(extra)}")


def with_library(*requirements: str) -> str:
    """Returns the command line that adds libraries which no extra brings."""
    return f"{_installer('install')} {_target()}{shlex.join(requirements)}"


def shipped(name: str) -> Path:
    """Returns a file or folder that comes with specpipe: model_repo, models, configs/….

    In a checkout it is the one at the top, where shipped/ leads.
    """
    path = _PACKAGE / "shipped" / name
    if not path.exists():
        raise RepositoryError(f"{path} is missing: install {DISTRIBUTION} again")
    return path.resolve()


def describe() -> str:
    """Returns a line on what is installed here, and where."""
    ours = _ours()
    if ours is None:
        return f"the sources in {_CHECKOUT}, not installed"
    if _is_checkout():
        return f"{DISTRIBUTION} {ours.version}, editable, in {_CHECKOUT}"
    return f"{DISTRIBUTION} {ours.version} in {_PACKAGE.parent}"


def conflicts() -> list[str]:
    """Returns, for each distribution named `specpipe` here, how to remove it.

    It has the same import folder: another project, or this one under its earlier name.
    """
    return [_conflict(other) for other in distributions(name="specpipe")]


def _conflict(other: Distribution) -> str:
    theirs, ours = (set(map(str, (d and d.files) or ())) for d in (other, _ours()))
    overlap = "has files that are" if theirs & ours else "has the import folder that is"
    return (
        f"specpipe {other.version} in {other.locate_file('')} is another project, or this one by "
        f"its earlier name, and {overlap} also {DISTRIBUTION}'s: "
        f"{_installer('uninstall')} specpipe && "
        f"{_installer('install')} --force-reinstall --no-deps {_arguments()}"
    )


def _arguments(*extras: str) -> str:
    """Returns what pip installs again to add extras: from where it was, and to where it is."""
    named = f"[{','.join(extras)}]" if extras else ""
    if _is_checkout():
        return f"-e {shlex.quote(f'{_CHECKOUT}{named}')}"
    origin = _origin(_ours())
    path = _local_path(origin)
    requirement = f"{DISTRIBUTION if path is None else path}{named}"
    if "vcs_info" in origin:
        requirement += f" @ {origin['vcs_info']['vcs']}+{origin['url']}"
    return f"{_target()}{shlex.quote(requirement)}"


def _is_checkout() -> bool:
    """Returns whether this code runs from a checkout: editable, or by PYTHONPATH."""
    return _PACKAGE.parent.name == "pipeline" and (_CHECKOUT / "pyproject.toml").is_file()


def _ours() -> Distribution | None:
    """Returns the installed distribution that the package imported here belongs to."""
    candidates = list(distributions(name=DISTRIBUTION))
    if _is_checkout():
        return next((d for d in candidates if _local_path(_origin(d)) == _CHECKOUT), None)
    imported = (d for d in candidates if Path(str(d.locate_file("specpipe"))).resolve() == _PACKAGE)
    return next(imported, None)


def _origin(ours: Distribution | None) -> dict[str, Any]:
    """Returns what direct_url.json says; nothing where the distribution came from an index."""
    text = ours and ours.read_text("direct_url.json")
    return dict(json.loads(text)) if text else {}


def _local_path(origin: dict[str, Any]) -> Path | None:
    """Returns the folder or wheel on this machine that was installed, if it is still there."""
    url = urllib.parse.urlsplit(origin.get("url", ""))
    path = Path(urllib.request.url2pathname(url.path))
    return path.resolve() if url.scheme == "file" and path.exists() else None


def _installer(command: str) -> str:
    """Returns `pip install` or its like for this Python; a bare `pip` only if it is this one's."""
    ours, python = _ours(), shlex.quote(sys.executable)
    by_uv = ours is not None and (ours.read_text("INSTALLER") or "").strip() == "uv"
    if by_uv or not any(distributions(name="pip")):
        is_active = os.environ.get("VIRTUAL_ENV") == sys.prefix
        return f"uv pip {command}{'' if is_active else f' --python {python}'}"
    on_path = shutil.which("pip")
    if on_path is not None and Path(on_path).parent == Path(sys.executable).parent:
        return f"pip {command}"
    return f"{python} -m pip {command}"


def _target() -> str:
    """Returns the option for a folder that is no part of this Python's own."""
    site_folders = (*site.getsitepackages(), site.getusersitepackages())
    if _is_checkout() or any(Path(folder).resolve() == _PACKAGE.parent for folder in site_folders):
        return ""
    return f"--target {shlex.quote(str(_PACKAGE.parent))} "
