"""What evaluations leave with the artifact: JSON files that say where each number comes from."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from specpipe.checkpoints.files import quoted
from specpipe.errors import RepositoryError
from specpipe.evaluate.prompts import PromptSet
from specpipe.machine import provenance
from specpipe.machine.own_json import read_object, reason
from specpipe.machine.whole_file import written_whole

FORMAT = 1
"""The version of the format of all results; a file that is read must have it."""


def header(
    kind: str,
    *,
    pair: str,
    settings: Mapping[str, Any],
    prompts: PromptSet | None = None,
    libraries: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns what every result begins with; `pair` names what was measured.

    `libraries` are the distributions whose versions matter for it.
    """
    head: dict[str, Any] = {
        "format": FORMAT,
        "kind": kind,
        "pair": pair,
        "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **provenance.versions(libraries)},
        "machine": machine(),
        "settings": dict(settings),
    }
    if prompts is not None:
        head["prompts"] = {
            "source": prompts.source,
            "digest": prompts.digest,
            "count": len(prompts.prompts),
        }
    return head


def machine() -> dict[str, Any]:
    """Returns the processor, the cores that this process may use, and the GPUs."""
    return {
        "cpu": cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "gpus": provenance.gpus(),
    }


def cpu_name() -> str:
    """Returns the processor's name where Linux reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_result(path: Path, data: Mapping[str, Any]) -> None:
    """Writes a result as a whole: whoever reads finds the old one or the new one.

    NaN and infinities are no JSON and refused: a number that is not known is None.
    """
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with written_whole(path) as staged:
        staged.write_text(text, encoding="utf-8")


def read_result(path: Path, kind: str) -> dict[str, Any]:
    """Returns a result; raises RepositoryError when it is missing, damaged or of another kind."""
    try:
        data = read_object(path)
    except FileNotFoundError:
        raise RepositoryError(f"{path} does not exist: run `specpipe {kind}` first") from None
    except (OSError, ValueError) as exc:
        raise RepositoryError(
            f"{path} cannot be read ({reason(exc)}): remove it and run `specpipe {kind}` again"
        ) from exc
    identity = (data.get("kind"), data.get("format"))
    if identity != (kind, FORMAT):
        raise RepositoryError(
            f"{path} is of kind {quoted(identity[0])} and format {quoted(identity[1])}, expected "
            f"{kind!r} and {FORMAT}: run `specpipe {kind}` again"
        )
    return data
