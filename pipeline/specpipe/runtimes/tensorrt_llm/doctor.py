"""Holds what specpipe knows of TensorRT-LLM against an image that has it, and says what differs.

The tables (config/tensorrt_llm_versions.py, build_flags.py, contract.py, model_yaml.py) were read
from sources whose release is not always certain. In NVIDIA's image the originals lie beside them:
the help of `trtllm-build`, the templates and scripts under /app, the backend's library, the Python
package.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specpipe.config.tensorrt_llm_versions import DEFAULT_VERSION, RELEASES, Release
from specpipe.errors import RuntimeUnavailable
from specpipe.runtimes.engine_fit import installed
from specpipe.runtimes.tensorrt_llm.engines import doctor as engines
from specpipe.runtimes.tensorrt_llm.engines.toolbox import BUILDER
from specpipe.runtimes.tensorrt_llm.llmapi import doctor as llmapi

BACKEND_DIR = Path("/opt/tritonserver/backends/tensorrtllm")

LAUNCH_SCRIPT = "scripts/launch_triton_server.py"


@dataclass(frozen=True)
class TableComparison:
    """One table against its original; no differences: they agree.

    subject   what was compared
    examined  where the original is
    """

    subject: str
    examined: str
    differences: tuple[str, ...]


def compare_image(app_dir: Path) -> tuple[Release, tuple[TableComparison, ...]]:
    """Compares everything with the installed release, or the default one where none is.

    Raises RuntimeUnavailable where there is nothing to compare with.
    """
    version = installed("tensorrt_llm")
    release = RELEASES.get(version or DEFAULT_VERSION, RELEASES[DEFAULT_VERSION])
    if version is None and not app_dir.is_dir():
        raise RuntimeUnavailable(
            f"TensorRT-LLM is not installed here, and there is no {app_dir}: run this inside "
            f"NVIDIA's image, {release.image}"
        )
    package = _package_dir()
    compared: tuple[tuple[str, str, Callable[[], Iterable[str]]], ...] = (
        ("versions", "installed packages", lambda: _versions(version, release)),
        ("flags", f"{BUILDER} --help", lambda: engines.flag_differences(_help(), release.version)),
        (
            "template of an engine's model",
            str(app_dir / engines.TEMPLATE),
            lambda: engines.template_differences(
                _read(app_dir / engines.TEMPLATE), release.version
            ),
        ),
        (
            "launch script",
            str(app_dir / LAUNCH_SCRIPT),
            lambda: engines.missing(_read(app_dir / LAUNCH_SCRIPT), engines.LAUNCH_WORDS),
        ),
        ("backend", str(BACKEND_DIR), lambda: engines.backend_differences(BACKEND_DIR)),
        (
            "LLM API",
            str(package / "llmapi/llm_args.py"),
            lambda: llmapi.llm_api_differences(
                _read(package / "llmapi/llm_args.py"), release.version
            ),
        ),
    )
    return release, tuple(
        TableComparison(subject, examined, tuple(_caught(differences)))
        for subject, examined, differences in compared
    )


class _Unreadable(Exception):
    """An original that is not there, or is something else; the sentence says why."""


def _caught(differences: Callable[[], Iterable[str]]) -> Iterator[str]:
    try:
        yield from differences()
    except _Unreadable as exc:
        yield str(exc)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise _Unreadable(f"it cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise _Unreadable(f"it cannot be read: {exc}") from exc


def _help() -> str:
    try:
        printed = subprocess.run(
            [BUILDER, "--help"],
            env={**os.environ, "COLUMNS": "200"},  # argparse breaks lines to this width
            capture_output=True,
            text=True,
            timeout=300,  # importing TensorRT-LLM takes a minute on a cold disk
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise _Unreadable(f"it does not run: {exc}") from exc
    return printed.stdout


def _package_dir() -> Path:
    spec = importlib.util.find_spec("tensorrt_llm")
    if spec is None or not spec.submodule_search_locations:
        return Path("tensorrt_llm")
    return Path(spec.submodule_search_locations[0])


def _versions(version: str | None, release: Release) -> Iterator[str]:
    if version is None:
        yield (
            f"TensorRT-LLM is not installed here; all is compared with the tables of "
            f"{release.version}"
        )
        return
    if version not in RELEASES:
        known = ", ".join(RELEASES)
        yield f"TensorRT-LLM {version} is not in the table, which has {known}"
    found = {
        "TensorRT": (installed("tensorrt"), release.tensorrt),
        "CUDA": (os.environ.get("CUDA_VERSION"), release.cuda),
    }
    for name, (here, expected) in found.items():
        if here != expected:
            yield f"{name} is {here or 'unknown'}, the table has {expected}"
