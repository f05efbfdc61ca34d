"""An engine whose logits come from a rule over the whole sequence, so that every cache mistake
shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from specpipe.checkpoints.parallel_draft import ParallelDraft
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


class TablePages:
    """Pages by number, which a sequence needs for each position that it has or is to have.

    spare  positions that rounds write beyond the end of a sequence
    """

    def __init__(self, engine: TableEngine, *, num_pages: int, page: int, spare: int) -> None:
        self.engine, self.page, self.spare = engine, page, spare
        self.capacity_tokens = num_pages * page
        self.num_users = [0] * num_pages
        self.free_pages = list(range(num_pages))
        self.of: dict[int, list[int]] = {}
        self.keys: dict[int, list[tuple[int | str, ...]]] = {}  # of the prompts of sequences
        self.cached: dict[tuple[int | str, ...], int] = {}  # the page of each key, oldest first
        self.most_held = 0

    @property
    def num_held_tokens(self) -> int:
        return self.page * sum(num > 0 for num in self.num_users)

    @property
    def num_cached_tokens(self) -> int:
        return self.page * sum(not self.num_users[page] for page in self.cached.values())

    def has(self, num_tokens: int, *, but: int = 0) -> bool:
        num_more = -(-num_tokens // self.page) * self.page - but
        return num_more <= self.capacity_tokens - self.num_held_tokens

    def room(self, sequence: int) -> int:
        return self.page * len(self.of[sequence])

    def grow(self, sequence: int, num_tokens: int) -> bool:
        pages = self.of.setdefault(sequence, [])
        num_tokens = min(num_tokens, self.engine.max_seq_len + self.spare)
        if not self.has(num_tokens, but=self.room(sequence)):
            return False
        while self.room(sequence) < num_tokens:
            if not self.free_pages:
                key = next(k for k, page in self.cached.items() if not self.num_users[page])
                self.free_pages.append(self.cached.pop(key))
            pages.append(self.free_pages.pop())
            self.num_users[pages[-1]] += 1
        self.most_held = max(self.most_held, self.num_held_tokens)
        return True

    def reuse(self, sequence: int, token_ids: Sequence[int], salt: str = "") -> int:
        assert not self.engine.sequences[sequence]
        ends = range(self.page, len(token_ids), self.page)
        self.keys[sequence] = [(salt, *token_ids[:end]) for end in ends]
        num_tokens = 0
        for place, key in enumerate(self.keys[sequence]):
            if (page := self.cached.pop(key, None)) is None:
                break
            self.cached[key] = page  # the last to go
            self.num_users[page] += 1
            self._leave(self.of[sequence][place : place + 1])
            self.of[sequence][place : place + 1] = [page]
            num_tokens += self.page
        self.engine.sequences[sequence] += token_ids[:num_tokens]
        return num_tokens

    def note(self, sequence: int) -> None:
        """Lets others find the pages that a prompt has filled."""
        length = len(self.engine.sequences[sequence])
        assert length <= self.room(sequence), "there is no room for it"
        for place, key in enumerate(self.keys.get(sequence, ())):
            if length >= self.page * (place + 1):
                self.cached.setdefault(key, self.of[sequence][place])

    def free(self, sequence: int) -> None:
        self.keys.pop(sequence, None)
        self._leave(self.of.pop(sequence))

    def _leave(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.num_users[page] -= 1
            if not self.num_users[page] and page not in self.cached.values():
                self.free_pages.append(page)


class TableEngine:
    """Keeps the tokens of each sequence and scores them with a model of
    `tests/speculative/table.py`.
    """

    def __init__(
        self,
        model: HasLogits,
        *,
        max_seq_len: int = 500,
        max_batch_size: int = 4,
        num_pages: int = 0,
        page: int = 8,
        spare: int = 0,
    ) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_seq_len, self.max_batch_size = max_seq_len, max_batch_size
        self.max_logits, self.max_logits_of_sequence = 64, 64
        self.paged: TablePages | None = None
        if num_pages:
            self.paged = TablePages(self, num_pages=num_pages, page=page, spare=spare)
        self.pages: Pages | None = self.paged
        self.sequences: dict[int, list[int]] = {}
        self.forwards: list[list[int]] = []
        """The number of tokens of each sequence, forward by forward."""
        self._next_id = 0

    def can_admit(self, max_tokens: int) -> bool:
        if len(self.sequences) >= self.max_batch_size or max_tokens > self.max_seq_len:
            return False
        return self.paged is None or self.paged.has(max_tokens + self.paged.spare)

    def allocate(self, *, prompt_length: int, max_tokens: int) -> int:
        assert self.can_admit(max_tokens)
        self._next_id += 1
        self.sequences[self._next_id] = []
        if self.paged is not None:
            assert self.paged.grow(self._next_id, max_tokens + self.paged.spare)
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
            if self.paged is not None:
                self.paged.note(sequence)
            if count:
                rows.append(self.model.logits(self.sequences[sequence], count))
        return torch.from_numpy(np.concatenate(rows)).float()

    def skip(self, sequence: int, num_tokens: int) -> None:
        self.sequences[sequence] += [0] * num_tokens

    def truncate(self, sequence: int, length: int) -> None:
        del self.sequences[sequence][length:]

    def free(self, sequence: int) -> None:
        del self.sequences[sequence]
        if self.paged is not None:
            self.paged.free(sequence)


def make_pair(
    target: HasLogits,
    draft: HasLogits,
    *,
    costs: CostTable | None = None,
    clock: object = None,
    guides: Guides | None = None,
    draft_max_seq_len: int = 500,
    num_pages: int = 0,
    draft_pages: int = 0,
    page: int = 8,
    mask_token_id: int | None = None,
    **options: object,
) -> EnginePair:
    settings: dict[str, object] = {
        "max_batch_size": 4,
        "max_seq_len": 500,
        "max_num_tokens": 16,
        "adaptive": costs is not None,
        "parallel": None if mask_token_id is None else ParallelDraft(mask_token_id),
        **options,
    }
    max_batch_size = max(int(str(settings["max_batch_size"])), 4)
    sizes = {"max_batch_size": max_batch_size, "page": page}
    engines = (
        TableEngine(draft, max_seq_len=draft_max_seq_len, num_pages=draft_pages, **sizes),
        TableEngine(target, num_pages=num_pages, **sizes),
    )
    pair_options = PairOptions(**settings)  # type: ignore[arg-type]
    return EnginePair(
        *engines,
        TorchSampler.of(*engines, pair_options),
        pair_options,
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
