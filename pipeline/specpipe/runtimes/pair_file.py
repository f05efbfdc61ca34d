"""`pair.json`: which runtime serves a pair, and how."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from specpipe.checkpoints.files import quoted
from specpipe.errors import RepositoryError
from specpipe.machine.own_json import read_object, reason
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION
from specpipe.runtimes.runtime import RUNTIMES


@dataclass(frozen=True)
class PairFile:
    """`pair.json`: which runtime serves the pair, and how."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    runtime: str
    options: PairOptions

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> PairFile:
        """Reads what `to_json` wrote; raises RepositoryError with what it has come to."""
        try:
            pair = _PAIR_FILES.validate_python(read_object(path))
            if pair.runtime not in RUNTIMES:
                raise ValueError(
                    f"runtime is {quoted(pair.runtime)}, expected one of {', '.join(RUNTIMES)}"
                )
        except (OSError, ValueError) as exc:
            raise RepositoryError(f"{path} cannot be read ({reason(exc)}): build again") from exc
        return pair


_PAIR_FILES = TypeAdapter(PairFile)


def read_pair(repository: Path) -> PairFile:
    """Reads which runtime serves the pair of a repository, and how."""
    path = repository / SPECULATIVE / VERSION / "pair.json"
    return PairFile.read(path)
