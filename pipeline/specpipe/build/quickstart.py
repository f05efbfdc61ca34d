"""The pair that comes with specpipe: its files for a folder of one's own, and what it needs."""

from __future__ import annotations

import filecmp
import importlib.util
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specpipe.build import planning
from specpipe.build.load import load_config
from specpipe.errors import ConfigError, RuntimeUnavailable, ServerError
from specpipe.machine.libraries import require_installed, shipped, with_extras
from specpipe.machine.whole_file import written_whole
from specpipe.runtimes.runtime import load_runtime
from specpipe.triton.server.installation import find_tritonserver

CONFIG = "configs/quickstart.yaml"
NAME = "python-code"  # what that calls the pair
PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
)


def settings_here(runtime: str) -> dict[str, str]:
    """Returns the settings, by dotted key, with which a runtime runs the pair on this machine.

    Raises RuntimeUnavailable where it cannot. Each runtime's artifacts have a folder of their own.
    """
    chosen = load_runtime(runtime)
    chosen.require_serving()
    chosen.require()
    require_installed("the verification", "scipy", extra="evaluate")
    settings = {f"engine.{key}": value for key, value in chosen.settings_here().items()}
    return {"name": f"{NAME}-{runtime}", "engine.runtime": runtime, **settings}


def packaged_settings(overrides: Sequence[str]) -> Mapping[str, Any]:
    """Returns what packaging would write of the pair for its runtime, without building anything.

    Raises what planning does: ConfigError for settings that specpipe does not know.
    """
    package = planning.plan(load_config(shipped(CONFIG), overrides))[-1].stage
    settings: Mapping[str, Any] = package.inputs().settings["runtime_settings"]
    return settings


def require_libraries() -> None:
    """Raises before anything is written where building or serving would miss a library."""
    has_torch = importlib.util.find_spec("torch") is not None
    try:
        find_tritonserver()
    except ServerError:
        if has_torch or sys.version_info >= (3, 13):  # there no extra brings Triton
            raise
        raise RuntimeUnavailable(
            f"the quickstart needs torch and Triton: {with_extras('torch', 'triton')}"
        ) from None
    if not has_torch:
        raise RuntimeUnavailable(f"the quickstart needs 'torch': {with_extras('torch')}")


def write_files(folder: Path) -> list[Path]:
    """Writes the pair and its YAML, laid out as in a checkout; returns the files that it left.

    A file that is there stays, also where it is not what specpipe brings: those are returned.
    """
    kept = []
    try:
        for source, name in _files():
            path = folder / name
            if not path.exists():
                with written_whole(path) as staged:
                    shutil.copyfile(source, staged)
            elif not filecmp.cmp(source, path, shallow=False):
                kept.append(path)
    except OSError as exc:
        raise ConfigError(
            f"{exc.filename or folder}: {exc.strerror}; name another folder with --output"
        ) from exc
    return kept


def _files() -> Iterator[tuple[Path, Path]]:
    """Yields the files that come with specpipe, and where each goes."""
    yield shipped(CONFIG), Path(CONFIG)
    models = shipped("models")
    for source in sorted(models.glob("python-code/*/*")):
        yield source, Path("models", source.relative_to(models))
