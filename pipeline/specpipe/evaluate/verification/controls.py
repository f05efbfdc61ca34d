"""Pairs in this process: the artifact's own with K as asked, and two that show what it rests on.

A target that drafts for itself accepts everything, so its output must be its own and its acceptance
nearly 1; a draft that is always wrong makes every step take its draft tokens back. A fault that an
ordinary draft seldom meets shows in one of them. A target knows no masks: where the draft proposes
several tokens in one pass, it drafts for itself one by one, and the draft itself is the wrong one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specpipe.evaluate.verification.repositories import as_asked
from specpipe.runtimes.pair.pair import Pair, PairOptions
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION
from specpipe.runtimes.runtime import load_runtime
from specpipe.text.tokenizer import Tokenizer
from specpipe.triton.repository.contents import load_tokenizer

if TYPE_CHECKING:
    from specpipe.runtimes.pair.engine import Engine, Logits


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
        """Returns the engines of a built repository, with K as asked instead of adaptive."""
        folder = repository / SPECULATIVE / VERSION
        pair = read_pair(repository)
        return cls(
            runtime=pair.runtime,
            draft=folder / "draft",
            target=folder / "target",
            options=as_asked(pair.options),
            tokenizer=load_tokenizer(repository),
        )

    def load(self) -> Pair:
        """Returns the pair itself."""
        return load_runtime(self.runtime).load_pair(
            self.draft, self.target, self.options, self.tokenizer.detokenizer
        )

    def load_own_draft(self) -> Pair:
        """Returns the target as its own draft."""
        options = dataclasses.replace(self.options, parallel=None)
        return dataclasses.replace(self, draft=self.target, options=options).load()

    def load_wrong_draft(self) -> Pair:
        """Returns the target with a draft that proposes what one of both finds least likely."""
        from specpipe.runtimes.pair.engine_pair import EnginePair
        from specpipe.runtimes.torch.pair import pair_of

        pair = self.load_own_draft() if self.options.parallel is None else self.load()
        assert isinstance(pair, EnginePair)  # what runs in this process is driven by our loop
        draft, target = pair.engines["draft"], pair.engines["target"]
        detokenizer = self.tokenizer.detokenizer
        return pair_of(
            cast("Engine", _LeastLikely(draft)),
            target,
            self.options,
            detokenizer,
            on_close=pair.close,
        )


class _LeastLikely:
    """An engine with its logits turned round."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(
        self, batch: Sequence[tuple[int, Sequence[int]]], num_logits: Sequence[int]
    ) -> Logits:
        return -self._engine.forward(batch, num_logits)
