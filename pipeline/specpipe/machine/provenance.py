"""Where an artifact comes from: versions, machine, GPU and command line, for its manifest."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from specpipe.machine.gpus import gpus_here
from specpipe.version import __version__


def versions(libraries: Sequence[str] = ()) -> dict[str, str]:
    """Returns the version of specpipe and of each distribution; one not installed says so."""
    return {"specpipe": __version__, **library_versions(libraries)}


def library_versions(libraries: Sequence[str]) -> dict[str, str]:
    """Returns the version of each distribution; one not installed says so."""
    found = {}
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
    """Returns name, compute capability and driver of every GPU here, by the names of nvidia-smi."""
    return [
        {
            "name": gpu.name,
            "compute_cap": gpu.compute_capability,
            "driver_version": gpu.driver,
        }
        for gpu in gpus_here()
    ]
