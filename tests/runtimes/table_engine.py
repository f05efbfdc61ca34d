"""An engine whose logits come from a rule over the whole sequence, so that every cache mistake
shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from specpipe.runtimes.pair.costs import CostTable
from specpipe.runtimes.pair.engine import Pages
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import Pair, PairOptions
from specpipe.runtimes.pair.torch_sampler import TorchSampler
from specpipe.speculative.guide import Guides
from specpipe.speculative.request import Chunk, Request
from tests.speculative.table import WordDetokenizer


class HasLogits(Protocol):
    vocab_size: int

    def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray: ...


class TableEngine:
    """Keeps the tokens of each sequence and scores them with a model of
    `tests/speculative/table.py`.
    """

    def __init__(
        self, model: HasLogits, *, max_seq_len: int = 500, max_batch_size: int = 4
    ) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_seq_len, self.max_batch_size = max_seq_len, max_batch_size
        self.max_logits, self.max_logits_of_sequence = 64, 64
        self.pages: Pages | None = None
        self.sequences: dict[int, list[int]] = {}
        self.forwards: list[list[int]] = []
        """The number of tokens of each sequence, forward by forward."""
        self._next_id = 0

    def can_admit(self, max_tokens: int) -> bool:
        return len(self.sequences) < self.max_batch_size and max_tokens <= self.max_seq_len

    def allocate(self, *, prompt_length: int, max_tokens: int) -> int:
        assert self.can_admit(max_tokens)
        self._next_id += 1
        self.sequences[self._next_id] = []
        return self._next_id

    def length(self, sequence: int) -> int:
        return len(self.sequences[sequence])

    def forward(
        self, batch: Sequence[tuple[int, Sequence[int]]], num_logits: Sequence[int]
    ) -> torch.Tensor:
        self.forwards.append([len(token_ids) for _, token_ids in batch])
        rows = [np.empty((0, self.vocab_size))]
        for (sequence, token_ids), count in zip(batch, num_logits, strict=True):
            assert token_ids
            self.sequences[sequence] += token_ids
            assert len(self.sequences[sequence]) <= self.max_seq_len
            if count:
                rows.append(self.model.logits(self.sequences[sequence], count))
        return torch.from_numpy(np.concatenate(rows)).float()

    def skip(self, sequence: int, num_tokens: int) -> None:
        self.sequences[sequence] += [0] * num_tokens

    def truncate(self, sequence: int, length: int) -> None:
        del self.sequences[sequence][length:]

    def free(self, sequence: int) -> None:
        del self.sequences[sequence]


def make_pair(
    target: HasLogits,
    draft: HasLogits,
    *,
    costs: CostTable | None = None,
    clock: object = None,
    guides: Guides | None = None,
    draft_max_seq_len: int = 500,
    unused_token_ids: tuple[tuple[int, int], ...] = (),
    **options: object,
) -> EnginePair:
    settings: dict[str, object] = {
        "max_batch_size": 4,
        "max_seq_len": 500,
        "max_num_tokens": 16,
        "adaptive": costs is not None,
        **options,
    }
    return EnginePair(
        TableEngine(draft, max_seq_len=draft_max_seq_len),
        TableEngine(target),
        TorchSampler(min(draft.vocab_size, target.vocab_size), unused_token_ids),
        PairOptions(**settings),  # type: ignore[arg-type]
        lambda prompt, **_: WordDetokenizer(),
        costs=costs,
        guides=guides,
        **({"clock": clock} if clock else {}),  # type: ignore[arg-type]
    )


def run(pair: Pair, requests: Sequence[Request]) -> dict[str, list[Chunk]]:
    """Runs requests to their ends; the chunks of each by its id."""
    chunks: dict[str, list[Chunk]] = {r.request_id: [] for r in requests}
    for request in requests:
        pair.submit(request)
    while pair.has_work():
        for chunk in pair.step():
            chunks[chunk.request_id].append(chunk)
    return chunks


def ids(chunks: Sequence[Chunk]) -> list[int]:
    return [i for c in chunks for i in c.token_ids]
