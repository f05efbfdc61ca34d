"""The first stage: the pair contract, before anything costly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specpipe.build.pairing import check_pair
from specpipe.checkpoints.files import is_there
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.machine.artifacts import CONTRACT_NAME
from specpipe.stage import StageInputs
from specpipe.text.files import TOKENIZER_FILES


@dataclass(frozen=True)
class Check:
    """Writes pair.json, the contract of a draft and a target checkpoint folder."""

    draft: Path
    target: Path
    limits: FileLimits = FILE_LIMITS

    @property
    def name(self) -> str:
        return "check"

    def inputs(self) -> StageInputs:
        """Returns the small files that are there; a file that appears later is a change, too."""
        files = tuple(
            path
            for folder in (self.draft, self.target)
            for name in TOKENIZER_FILES
            if is_there(path := folder / name)
        )
        return StageInputs(files=files, settings={}, libraries=("tokenizers",))

    def run(self, out: Path) -> None:
        contract = check_pair(self.draft, self.target, self.limits)
        (out / CONTRACT_NAME).write_text(contract.to_json(), encoding="utf-8")
