"""Where the artifacts of a pair lie, and what is left beside them.

engines/NAME/
  check/pair.json   the contract of draft and target
  draft/, target/   what is made of each checkpoint
  quality/          what quantization costs; quality_limits/ says that it is not too much
  model_repo/       the Triton repository
  results/          what bench, tune, nightly and others measured
  collection/       what the target answered, to train a draft on (training/collection.py)
  verification.json what was verified
  report/           a page on all of it
  versions/N/       version N as it was published or fetched
  promoted.json     which of them is served here (stores/promoted.py)

A manifest stands beside each folder that a stage makes (manifest.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specpipe.roles import Role

CONTRACT_NAME = "pair.json"

ResultName = Literal[
    "bench", "nightly", "nightly-bench", "tune", "tune.unfinished", "verify-float32"
]


class _Below:
    """A path below the folder of the object that it is asked of."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, owner: Artifacts | SideArtifacts, kind: type) -> Path:
        return owner.folder / self._path


@dataclass(frozen=True)
class SideArtifacts:
    """What is made of one checkpoint, a folder for each stage.

    checkpoint   the unified checkpoint, plain or quantized
    huggingface  quantized weights in Hugging Face's layout
    plan         an engine without its weights
    """

    folder: Path

    scales = _Below("scales")
    checkpoint = _Below("checkpoint")
    huggingface = _Below("huggingface")
    plan = _Below("plan")
    engine = _Below("engine")


@dataclass(frozen=True)
class Artifacts:
    """The folder of a pair; nothing here asks whether a path is there."""

    folder: Path

    check = _Below("check")
    contract = _Below(f"check/{CONTRACT_NAME}")
    quality = _Below("quality")
    quality_limits = _Below("quality_limits")
    repository = _Below("model_repo")
    collection = _Below("collection")
    verification = _Below("verification.json")
    report = _Below("report")
    versions = _Below("versions")
    promoted = _Below("promoted.json")

    def side(self, role: Role) -> SideArtifacts:
        """Returns where the artifacts of one side lie."""
        return SideArtifacts(self.folder / role)

    def result(self, name: ResultName) -> Path:
        """Returns the file of what was measured last."""
        return self.folder / "results" / f"{name}.json"
