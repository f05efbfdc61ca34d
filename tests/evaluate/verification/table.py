"""Table models as what a verification looks at: a scorer, and pairs behind an endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from specpipe.evaluate.endpoints.in_process import InProcess
from specpipe.evaluate.verification.scorer import ScoredText
from specpipe.speculative.noise import Floats
from tests.runtimes.table_engine import HasLogits, make_pair
from tests.speculative.table import NoisyModel

END_ID = 0


class NoTokenizer:
    """Questions come as token ids; this only knows the end id."""

    end_token_ids = frozenset({END_ID})

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        raise NotImplementedError

    def encode_fragment(self, text: str) -> list[int]:
        raise NotImplementedError

    def is_used(self, token_id: int) -> bool:
        raise NotImplementedError


class RememberingModel(NoisyModel):
    """Computes each row once: sampling tests see the same few contexts thousands of times."""

    def __init__(self, seed: int, *, blend: float = 0.0) -> None:
        super().__init__(seed, blend=blend)
        self._rows: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray:
        rows = []
        for end in range(len(token_ids) - num_rows + 1, len(token_ids) + 1):
            context = tuple(token_ids[:end])
            if context not in self._rows:
                self._rows[context] = super().logits(context, 1)[0]
            rows.append(self._rows[context])
        return np.stack(rows)


class TableScorer:
    """The logits of a table model; those in blocks are another model's, if there is one."""

    dtype = "float32"
    rounding: str | None = None
    max_batch_size = 8

    def __init__(self, model: HasLogits, *, in_blocks: HasLogits | None = None) -> None:
        self.model, self.in_blocks = model, in_blocks or model

    def read(self, texts: Sequence[ScoredText], block_size: int = 1) -> list[Floats]:
        model = self.model if block_size == 1 else self.in_blocks
        return [
            np.asarray(model.logits([*text.prompt, *text.output], len(text.output) + 1), np.float64)
            for text in texts
        ]


class RowScorer(TableScorer):
    """One row of logits wherever it is asked; ids that are not given have -5."""

    def __init__(self, logits: Mapping[int, float]) -> None:
        self.row = np.full(100, -5.0)
        self.row[list(logits)] = list(logits.values())

    def read(self, texts: Sequence[ScoredText], block_size: int = 1) -> list[Floats]:
        return [np.tile(self.row, (len(text.output) + 1, 1)) for text in texts]


@contextmanager
def endpoint(target: HasLogits, draft: HasLogits, **options: Any) -> Iterator[InProcess]:
    """A pair of two table models, up to 8 draft tokens."""
    pair = make_pair(target, draft, num_draft_tokens=8, max_num_tokens=64, **options)
    with closing(InProcess(pair, NoTokenizer())) as made:
        yield made
