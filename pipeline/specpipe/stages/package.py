"""Packages two engines and the target's tokenizer into a Triton repository."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from specpipe.checkpoint_file import is_there
from specpipe.errors import RepositoryError
from specpipe.pairing import PairContract
from specpipe.runtimes.base import PairOptions
from specpipe.stages.base import StageInputs
from specpipe.tokenizer_files import TOKENIZER_FILES

_A_MODEL = "speculative/1/model.py"


@dataclass(frozen=True)
class Package:
    """Writes the repository that Triton serves, and lints it.

    contract   the result of the check stage: which ids no tokenizer entry uses
    tokenizer  the target's checkpoint, whose tokenizer files are copied
    options    how the pair serves; `unused_token_ids` are the contract's
    """

    contract: Path
    draft_engine: Path
    target_engine: Path
    tokenizer: Path
    runtime: str
    options: PairOptions

    name = "package"

    def inputs(self) -> StageInputs:
        settings = dataclasses.asdict(self.options)
        del settings["unused_token_ids"]
        tokenizer_files = (self.tokenizer / name for name in TOKENIZER_FILES)
        return StageInputs(
            files=(
                self.contract,
                self.draft_engine,
                self.target_engine,
                *(path for path in tokenizer_files if is_there(path)),
                models_folder(),
            ),
            settings={"runtime": self.runtime, **settings},
            libraries=("tritonclient",),
        )

    def run(self, out: Path) -> None:
        # Deciding whether to package must not take the time that importing gRPC does.
        from specpipe.triton import lint, repository

        contract = PairContract.from_json(self.contract.read_text(encoding="utf-8"))
        options = dataclasses.replace(self.options, unused_token_ids=contract.unused_token_ids)
        repository.write(
            out,
            models=models_folder(),
            draft_engine=self.draft_engine,
            target_engine=self.target_engine,
            tokenizer=self.tokenizer,
            pair=repository.PairFile(self.runtime, options),
        )
        lint.check(out)


def models_folder() -> Path:
    """Returns the folder of hand-written Triton models: the checkout's, else the installed one."""
    checkout = Path(__file__).parents[3] / "model_repo"
    if (checkout / _A_MODEL).is_file():
        return checkout
    # Where pip puts a distribution's data files differs by system; its record tells.
    for file in importlib.metadata.files("specpipe") or ():
        if file.as_posix().endswith(f"model_repo/{_A_MODEL}"):
            return Path(str(file.locate())).resolve().parents[2]
    raise RepositoryError("the Triton models of specpipe are missing: install specpipe again")
