"""Where the numbers come from: versions, machines, times, commits."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from specpipe.evaluate.report import conditions
from specpipe.evaluate.report.artifact import Artifact, Json
from specpipe.evaluate.report.blocks import UNKNOWN, Block, Column, Paragraph, Table, number, size
from specpipe.evaluate.report.pair import checkpoint_name

_BEGINNING = 16
"""Characters of a digest that a table shows."""


def blocks(artifact: Artifact) -> Iterator[Block]:
    """Yields results, stages of the build, and the checkpoints."""
    results = (
        ("verify", artifact.verification),
        ("tune", artifact.tune),
        ("bench", artifact.bench),
    )
    yield Table(
        "Results",
        (
            Column("result", is_text=True),
            Column("made at", is_text=True),
            Column("machine", is_text=True),
            Column("versions", is_text=True),
            Column("prompts", is_text=True),
            Column("SHA-256 of the prompts", is_text=True),
        ),
        [
            [
                name,
                _time(result["made_at"]),
                _hardware(result),
                _versions(result["versions"]),
                conditions.prompts(result),
                str(result["prompts"]["digest"])[:_BEGINNING],
            ]
            for name, result in results
            if result is not None
        ],
    )
    yield Table(
        "Build",
        (
            Column("stage", is_text=True),
            Column("built at", is_text=True),
            Column("took", "s"),
            Column("size"),
            Column("versions", is_text=True),
            Column("machine", is_text=True),
            Column("command", is_text=True),
        ),
        [
            [
                built.manifest.stage,
                _time(str(built.manifest.build.get("built_at", UNKNOWN))),
                number(built.manifest.build.get("duration_s"), 1),
                size(built.size_bytes),
                _versions(
                    {**built.manifest.versions, "python": built.manifest.build.get("python", "")}
                ),
                str(built.manifest.build.get("platform", UNKNOWN)),
                _command_line(built.manifest.build.get("argv", ())),
            ]
            for built in artifact.built
        ],
        is_folded=True,
    )
    yield Table(
        "Checkpoints",
        (
            Column("model", is_text=True),
            Column("from", is_text=True),
            Column("commit", is_text=True),
            Column("size"),
        ),
        [
            [
                role,
                checkpoint_name(artifact, role),
                source.commit or UNKNOWN,
                size(source.size_bytes),
            ]
            for role, source in artifact.sources.items()
        ],
    )
    if artifact.verification is not None:
        digest = artifact.verification["repository"]["digest"]
        yield Paragraph(f"SHA-256 of the repository that was verified: {digest}")


def _hardware(result: Json) -> str:
    """Returns the machine, with the driver where it has GPUs."""
    drivers = dict.fromkeys(
        str(gpu["driver_version"]) for gpu in result["machine"]["gpus"] if "driver_version" in gpu
    )
    cpu = conditions.machine({**result, "machine": {**result["machine"], "gpus": []}})
    words = [conditions.machine(result), cpu] if result["machine"]["gpus"] else [cpu]
    return "; ".join([*words, *(f"driver {driver}" for driver in drivers)])


def _versions(versions: Json) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _time(moment: str) -> str:
    """Returns a time in ISO 8601 as people read it."""
    return moment.replace("T", " ").replace("+00:00", " UTC")


def _command_line(argv: Sequence[Any]) -> str:
    words = [str(word) for word in argv]
    if words:
        words[0] = os.path.basename(words[0])
    return shlex.join(words) or UNKNOWN
