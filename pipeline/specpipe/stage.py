"""What a stage is: named inputs, and work that writes into one folder.

A stage is a frozen dataclass whose fields are its inputs. It knows neither the cache nor the path
of its artifact, and prints nothing; `cache.build` decides whether it runs and where `out` is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specpipe.errors import SpecpipeError


@dataclass(frozen=True)
class StageInputs:
    """Everything that decides what a stage makes: equal inputs, equal artifact.

    files      files, or folders: every regular file below one counts, except hidden ones and
               what lies in `__pycache__`
    settings   JSON-able values by name; the stale reasons compare them one by one and print them
    libraries  distributions whose version decides what is made; specpipe itself always counts
    varies     which files come out in other bytes each time all the same, and why; empty: none
    """

    files: tuple[Path, ...]
    settings: Mapping[str, Any]
    libraries: tuple[str, ...] = ()
    varies: str = ""


class Stage(Protocol):
    """One step of the road from two checkpoints to a Triton repository."""

    @property
    def name(self) -> str:
        """Names the stage in messages: `check`, `draft/convert`, `target/build_engine`."""

    def inputs(self) -> StageInputs:
        """Returns what the artifact depends on; reads no file contents."""

    def run(self, out: Path) -> None:
        """Makes the artifact in `out`, an empty folder, and writes nowhere else."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage and the folder that it makes.

    `fetch` brings what it reads, just before it runs; `require` raises where a library that it
    needs is missing, before any stage runs; `commands` returns the command lines that it will run,
    given the folder that it will write into; `shows` names a text in the artifact for people;
    `tool_facts` asks what the tool is that it calls, "unknown" for what is not told.
    """

    stage: Stage
    artifact: Path
    fetch: Callable[[], None] | None = None
    require: Callable[[], None] | None = None
    commands: Callable[[Path], Sequence[Sequence[str]]] | None = None
    shows: str | None = None
    tool_facts: Callable[[], Mapping[str, str]] | None = None

    @property
    def name(self) -> str:
        return self.stage.name

    def reads(self, other: PlannedStage) -> bool:
        """Returns whether the other's artifact, or a file in it, is an input of this stage."""
        files = self.stage.inputs().files
        return any(other.artifact in (path, *path.parents) for path in files)


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Puts a place, such as a role, before the message of what fails in a `with` block."""
    try:
        yield
    except SpecpipeError as exc:
        raise type(exc)(f"{place}: {exc}") from exc
