"""Holds what specpipe knows of TensorRT-LLM against an image that has it, and says what differs.

The tables (config/tensorrt_llm_versions.py, build_flags.py, contract.py, model_yaml.py) were read
from sources whose release is not always certain. In NVIDIA's image the originals lie beside them:
the help of `trtllm-build`, the templates and scripts under /app, the backend's library, the Python
package. Only what serves there is compared: an image without `trtllm-build` has backend `pytorch`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specpipe.config.tensorrt_llm_versions import DEFAULT_VERSION, RELEASES, Release
from specpipe.errors import ConfigError, RuntimeUnavailable
from specpipe.machine.provenance import library_versions
from specpipe.runtimes.engine_fit import installed
from specpipe.runtimes.tensorrt_llm.differences import Difference, TableComparison, refused
from specpipe.runtimes.tensorrt_llm.engines import doctor as engines
from specpipe.runtimes.tensorrt_llm.engines import toolbox
from specpipe.runtimes.tensorrt_llm.engines.toolbox import BUILDER
from specpipe.runtimes.tensorrt_llm.llmapi import doctor as llmapi

BACKEND_DIR = Path("/opt/tritonserver/backends/tensorrtllm")

LAUNCH_SCRIPT = "scripts/launch_triton_server.py"

Packaged = Callable[[Sequence[str]], Mapping[str, Any]]
"""What packaging would write of some pair under these overrides of its YAML; raises ConfigError."""


def machine_facts() -> dict[str, str]:
    """Returns what this machine has of TensorRT-LLM and of what builds and starts its engines."""
    programs = {name: shutil.which(name) or "not on PATH" for name in (BUILDER, "mpirun")}
    return {**library_versions(("tensorrt_llm",)), **programs, "docker": _docker()}


def _docker() -> str:
    docker = shutil.which("docker")
    if docker is None:
        return "not on PATH"
    version = toolbox.docker_version(docker)
    return (
        f"{docker}, but its daemon does not answer" if version is None else f"{version} ({docker})"
    )


def compare_image(app_dir: Path, packaged: Packaged) -> tuple[str, tuple[TableComparison, ...]]:
    """Compares everything with the installed release, or the default one where none is.

    Returns the version that was compared with. Raises RuntimeUnavailable where there is nothing to
    compare with.
    """
    version = installed("tensorrt_llm")
    if version is None and not app_dir.is_dir():
        raise RuntimeUnavailable(
            f"TensorRT-LLM is not installed here, and there is no {app_dir}: run this inside "
            f"NVIDIA's image, {RELEASES[DEFAULT_VERSION].image}"
        )
    known = version or DEFAULT_VERSION
    template = app_dir / engines.TEMPLATE  # TensorRT-LLM's own image has /app, too, without it
    has_engines = toolbox.is_native() or BACKEND_DIR.is_dir() or template.is_file()
    backends = ("tensorrt", "pytorch") if has_engines else ("pytorch",)
    compared: list[tuple[str, str, Callable[[], Iterable[Difference]]]] = [
        (
            "versions",
            f"installed packages, for {' and '.join(f'backend {name}' for name in backends)}",
            lambda: _versions(version, backends, packaged),
        )
    ]
    if has_engines:
        compared += _compared_engines(app_dir, known)
    compared.append(
        (
            "LLM API",
            "the installed package",
            lambda: llmapi.llm_api_differences(_llm_arguments(version, packaged)),
        )
    )
    return known, tuple(
        TableComparison(subject, examined, tuple(_caught(differences)))
        for subject, examined, differences in compared
    )


def _compared_engines(
    app_dir: Path, version: str
) -> list[tuple[str, str, Callable[[], Iterable[Difference]]]]:
    template, script = app_dir / engines.TEMPLATE, app_dir / LAUNCH_SCRIPT
    return [
        ("flags", f"{BUILDER} --help", lambda: engines.flag_differences(_help(), version)),
        (
            "template of an engine's model",
            str(template),
            lambda: engines.template_differences(_read(template), version),
        ),
        (
            "launch script",
            str(script),
            lambda: engines.script_differences(_read(script), engines.LAUNCH_WORDS),
        ),
        ("backend", str(BACKEND_DIR), lambda: engines.backend_differences(BACKEND_DIR)),
    ]


class _Unreadable(Exception):
    """An original that is not there, or is something else; the sentence says why."""


def _caught(differences: Callable[[], Iterable[Difference]]) -> Iterator[Difference]:
    try:
        yield from differences()
    except _Unreadable as exc:
        yield refused(f"{exc}: take NVIDIA's Triton image, or backend pytorch")


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


def _overrides(version: str, backend: str) -> list[str]:
    return [
        "engine.runtime=tensorrt_llm",
        f"engine.tensorrt_llm.version={version}",
        f"engine.tensorrt_llm.backend={backend}",
        "engine.tensorrt_llm.kv_cache_free_gpu_mem_fraction=0.5",
    ]


def _llm_arguments(version: str | None, packaged: Packaged) -> Mapping[str, Any]:
    """Returns what `model.yaml` says for a release, or the default one where it is not known."""
    try:
        settings = packaged(_overrides(version or DEFAULT_VERSION, "pytorch"))
    except ConfigError:
        settings = packaged(_overrides(DEFAULT_VERSION, "pytorch"))
    arguments: Mapping[str, Any] = settings["llm"]
    return arguments


def _versions(
    version: str | None, backends: Sequence[str], packaged: Packaged
) -> Iterator[Difference]:
    if version is None:
        yield refused(
            "TensorRT-LLM is not installed here; all is compared with the tables of "
            f"{DEFAULT_VERSION}: serve in {RELEASES[DEFAULT_VERSION].image}"
        )
        return
    for backend in backends:
        try:
            packaged(_overrides(version, backend))
        except ConfigError as exc:
            yield refused(f"TensorRT-LLM {version} is not known for backend {backend}: {exc}")
    yield from _numpy_differences()
    if version in RELEASES and "tensorrt" in backends:
        yield from _library_differences(RELEASES[version])


def _library_differences(release: Release) -> Iterator[Difference]:
    found = {
        "TensorRT": (installed("tensorrt"), release.tensorrt),
        "CUDA": (os.environ.get("CUDA_VERSION"), release.cuda),
    }
    for name, (here, expected) in found.items():
        if here != expected:
            yield Difference(
                f"{name} is {here or 'unknown'}, the table has {expected}: engines run only where "
                "they were built, so build them here"
            )


def _numpy_differences() -> Iterator[Difference]:
    """What pip says of the NumPy that TensorRT-LLM asks for; Triton's models share it."""
    checked = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=300
    )
    for line in checked.stdout.splitlines():
        distribution, _, rest = line.partition(" ")
        if distribution.lower().replace("_", "-") == "tensorrt-llm" and "numpy" in rest:
            yield refused(f"{line.rstrip('.')}: install the NumPy that it asks for")
