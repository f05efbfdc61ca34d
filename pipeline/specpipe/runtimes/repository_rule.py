"""What a rule of the lint is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from specpipe.runtimes.pair.pair import PairOptions


@dataclass(frozen=True)
class Repository:
    """A folder of models, their configs parsed."""

    folder: Path
    models: dict[str, pb.ModelConfig]

    def version_folder(self, model: str) -> Path:
        """Returns the folder of the only version."""
        return self.folder / model / "1"

    def ensembles(self) -> Iterator[pb.ModelConfig]:
        return (config for config in self.models.values() if config.platform == "ensemble")


LintRule = Callable[[Repository], Iterator[str]]


@dataclass(frozen=True, kw_only=True)
class ServedPair:
    """A model of a repository that runs a pair.

    version        its version folder
    draft, target  the folders that `Runtime.load_pair` gets
    options        what `pair.json` says
    """

    model: str
    version: Path
    draft: Path
    target: Path
    options: PairOptions
