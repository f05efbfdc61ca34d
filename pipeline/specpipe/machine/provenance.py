"""Where an artifact comes from: versions, machine, GPU and command line, for its manifest."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from specpipe.version import __version__


def versions(libraries: Sequence[str] = ()) -> dict[str, str]:
    """Returns the version of specpipe and of each distribution; one not installed says so."""
    found = {"specpipe": __version__}
    for library in libraries:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            found[library] = "not installed"
    return found


def describe_build(*, duration_s: float) -> dict[str, Any]:
    """Returns what is worth knowing about a build later, and decides nothing."""
    return {
        "built_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "duration_s": round(duration_s, 3),
        "argv": list(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpus": gpus(),
    }


def gpus() -> list[dict[str, str]]:
    """Returns name, compute capability and driver of every NVIDIA GPU, as nvidia-smi tells them."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    fields = ("name", "compute_cap", "driver_version")
    query = [command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []  # a driver that does not answer: the CPU can still build
    rows = [line.split(",") for line in printed.stdout.splitlines() if line.strip()]
    return [dict(zip(fields, map(str.strip, row), strict=True)) for row in rows]
