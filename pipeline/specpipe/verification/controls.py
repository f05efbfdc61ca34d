"""Pairs for verification: the artifact's own with K as asked, and two that show what it rests on.

A target that drafts for itself accepts everything, so its output must be its own and its acceptance
nearly 1; a draft that is always wrong makes every step take its draft tokens back. A fault that an
ordinary draft seldom meets shows in one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specpipe.runtimes.base import Pair, PairOptions, load_runtime
from specpipe.text import Tokenizer
from specpipe.triton.layout import SPECULATIVE, VERSION, link_folder
from specpipe.triton.repository import PairFile, read_pair

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Engines:
    """What a pair in this process is made of."""

    runtime: str
    draft: Path
    target: Path
    options: PairOptions
    tokenizer: Tokenizer

    @classmethod
    def of(cls, repository: Path) -> Engines:
        """Those of a built repository, with K as asked instead of the adaptive one."""
        folder = repository / SPECULATIVE / VERSION
        pair = read_pair(repository)
        return cls(
            runtime=pair.runtime,
            draft=folder / "draft",
            target=folder / "target",
            options=as_asked(pair.options),
            tokenizer=Tokenizer.load(folder / "tokenizer"),
        )

    def load(self) -> Pair:
        """The pair itself."""
        return load_runtime(self.runtime).load_pair(
            self.draft, self.target, self.options, self.tokenizer.detokenizer
        )

    def load_own_draft(self) -> Pair:
        """The target as its own draft."""
        return dataclasses.replace(self, draft=self.target).load()

    def load_wrong_draft(self) -> Pair:
        """The target with a draft that proposes what the target finds least likely.

        For runtime torch, whose engines can be had one by one.
        """
        from specpipe.runtimes.engine_pair import EnginePair
        from specpipe.runtimes.torch.engine import TorchEngine
        from specpipe.runtimes.torch.sampling import TorchSampler

        class LeastLikely(TorchEngine):
            def forward(
                self, batch: Sequence[tuple[int, Sequence[int]]], num_logits: Sequence[int]
            ) -> Tensor:
                return -super().forward(batch, num_logits)

        draft, target = LeastLikely.load(self.target), TorchEngine.load(self.target)
        sampler = TorchSampler(target.vocab_size, self.options.unused_token_ids)
        return EnginePair(draft, target, sampler, self.options, self.tokenizer.detokenizer)


def as_asked(options: PairOptions) -> PairOptions:
    """Returns the options under which K is what a request asks for, whatever pays."""
    return dataclasses.replace(options, adaptive=False, schedule=())


def write_fixed_repository(repository: Path, out: Path) -> Path:
    """Makes a repository like this one whose K is as asked; large files are linked."""
    link_folder(repository, out)
    pair = read_pair(repository)
    fixed = PairFile(pair.runtime, as_asked(pair.options))
    path = out / SPECULATIVE / VERSION / "pair.json"
    path.unlink()  # a link: what it leads to is the artifact's own
    path.write_text(fixed.to_json(), encoding="utf-8")
    return out
