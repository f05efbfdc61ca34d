"""Packages two engines and the target's tokenizer into a Triton repository."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from specpipe.build.pairing import PairContract
from specpipe.checkpoints.files import is_there
from specpipe.config.limits import Limits
from specpipe.machine.libraries import shipped
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.stage import StageInputs
from specpipe.text.files import TOKENIZER_FILES


@dataclass(frozen=True)
class Package:
    """Writes the repository that Triton serves, and lints it.

    contract   the result of the check stage: which ids no tokenizer entry uses
    tokenizer  the target's checkpoint, whose tokenizer files are copied
    options    how the pair serves; `unused_token_ids` and `parallel` are the contract's
    limits     what of a request is refused for its size
    num_preprocessing  processes that tokenize
    """

    contract: Path
    draft_engine: Path
    target_engine: Path
    tokenizer: Path
    runtime: str
    options: PairOptions
    limits: Limits = Limits()
    num_preprocessing: int = 1

    name = "package"

    def inputs(self) -> StageInputs:
        settings = dataclasses.asdict(self.options)
        del settings["unused_token_ids"], settings["parallel"]
        tokenizer_files = (self.tokenizer / name for name in TOKENIZER_FILES)
        return StageInputs(
            files=(
                self.contract,
                self.draft_engine,
                self.target_engine,
                *(path for path in tokenizer_files if is_there(path)),
                models_folder(),
            ),
            settings={
                "runtime": self.runtime,
                **settings,
                "limits": self.limits.model_dump(),
                "preprocessing_instances": self.num_preprocessing,
            },
            libraries=("tritonclient",),
        )

    def run(self, out: Path) -> None:
        # Deciding whether to package must not take the time that importing gRPC does.
        from specpipe.runtimes.pair_file import PairFile
        from specpipe.triton import repository
        from specpipe.triton.repository import lint

        contract = PairContract.from_json(self.contract.read_text(encoding="utf-8"))
        options = dataclasses.replace(
            self.options,
            unused_token_ids=contract.unused_token_ids,
            parallel=contract.parallel,
        )
        repository.write(
            out,
            models=models_folder(),
            draft_engine=self.draft_engine,
            target_engine=self.target_engine,
            tokenizer=self.tokenizer,
            pair=PairFile(self.runtime, options),
            limits=self.limits,
            num_preprocessing=self.num_preprocessing,
        )
        lint.check(out)


def models_folder() -> Path:
    """Returns the folder of hand-written Triton models."""
    return shipped("model_repo")
