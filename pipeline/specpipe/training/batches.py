"""Which texts each step of a training reads: a pure function of the seed and of its number.

So a training that goes on after a kill reads what the unbroken one does, and several processes
take turns without talking. B texts of a batch, T tokens of the longest of them, k ids listed for a
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from specpipe.errors import ConfigError, show
from specpipe.training.texts import Text

_MOST_BATCHES = 2_000_000  # which are laid out before the first step: days of training
_POOL = 64  # batches whose texts are sorted by length together: enough for little padding


@dataclass(frozen=True)
class Batch:
    """Texts side by side, filled up to the right; on the CPU, where their rows are laid out.

    number      of the batch in the training; what is drawn for it is drawn by that
    token_ids   [B, T]
    answers     [B]: where the answer of each begins
    starts      [B]: the first row of each that is scored: the one before its answer, or the first
    ends        [B]: the first row that is not; the last token of a text is no row
    listed_ids  [B, T, k], with log_probs likewise, at the row before each token; ids below 0 fill
                up; None without
    """

    number: int
    token_ids: Tensor
    answers: Tensor
    starts: Tensor
    ends: Tensor
    listed_ids: Tensor | None = None
    log_probs: Tensor | None = None


def make_batch(
    texts: Sequence[Text],
    number: int,
    *,
    padding: int,
    on_prompts: bool = False,
    with_log_probs: bool = False,
) -> Batch:
    """Returns texts as one batch; what fills up is an id that the draft has."""
    longest = max(len(text.token_ids) for text in texts)
    token_ids = torch.full((len(texts), longest), padding)
    for row, text in enumerate(texts):
        token_ids[row, : len(text.token_ids)] = torch.from_numpy(text.token_ids)
    listed: dict[str, Any] = _listed(texts, longest) if with_log_probs else {}
    answers = torch.tensor([text.num_prompt_tokens for text in texts])
    return Batch(
        number,
        token_ids,
        answers,
        starts=torch.zeros_like(answers) if on_prompts else answers - 1,
        ends=torch.tensor([len(text.token_ids) - 1 for text in texts]),
        **listed,
    )


def _listed(texts: Sequence[Text], longest: int) -> dict[str, Tensor]:
    listings = [text.listed for text in texts]
    most = max(one.token_ids.shape[1] for one in listings if one is not None)
    ids = torch.full((len(texts), longest, most), -1)
    log_probs = torch.zeros(len(texts), longest, most)
    for row, (text, one) in enumerate(zip(texts, listings, strict=True)):
        assert one is not None, "a text without log-probabilities was let through"
        place = text.num_prompt_tokens - 1
        num_rows, count = one.token_ids.shape
        ids[row, place : place + num_rows, :count] = torch.from_numpy(one.token_ids)
        log_probs[row, place : place + num_rows, :count] = torch.from_numpy(one.log_probs)
    return {"listed_ids": ids, "log_probs": log_probs}


class Batches(Dataset[Batch]):
    """All batches of a training, in their order; each text once an epoch."""

    def __init__(
        self,
        texts: Sequence[Text],
        *,
        num_steps: int | None,
        num_epochs: float,
        per_step: int,
        batch_tokens: int,
        seed: int,
        **options: Any,
    ) -> None:
        """Lays out `num_steps` steps, or `num_epochs` epochs, of `per_step` batches each.

        batch_tokens  of a batch at most, with what fills it up; a text that is longer is one alone
        options       for `make_batch`
        """
        self._texts, self._per_step, self._options = texts, per_step, options
        self._batches: list[list[int]] = []
        epoch = 0
        while True:
            of_epoch = list(_epoch(texts, batch_tokens, seed, epoch))
            epoch += 1
            if num_steps is None:
                num_steps = max(int(num_epochs * len(of_epoch) / per_step), 1)
                if len(of_epoch) * num_epochs < per_step:
                    raise ConfigError(
                        f"the answers fill {len(of_epoch)} batches of {batch_tokens} tokens, and a "
                        f"step takes {per_step}: lower --batch-tokens or --accumulate, or collect "
                        "more"
                    )
            if num_steps * per_step > _MOST_BATCHES:
                raise ConfigError(
                    f"{show(num_steps)} steps of {show(per_step)} batches are more than "
                    f"{_MOST_BATCHES:,} batches: lower --steps, --epochs or --accumulate"
                )
            self._batches += of_epoch
            if len(self._batches) >= num_steps * per_step:
                del self._batches[num_steps * per_step :]
                break
        self.num_steps = num_steps

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Batch:
        texts = [self._texts[index] for index in self._batches[number]]
        return make_batch(texts, number, **self._options)

    def weight(self, number: int) -> float:
        """Returns what a batch's mean loss counts by, so that each row of a step counts alike."""
        first = number - number % self._per_step
        counts = [self._num_rows(other) for other in range(first, first + self._per_step)]
        return counts[number - first] * self._per_step / sum(counts)

    def _num_rows(self, number: int) -> int:
        texts = (self._texts[index] for index in self._batches[number])
        on_prompts = self._options.get("on_prompts", False)
        return sum(len(t.token_ids) - (1 if on_prompts else t.num_prompt_tokens) for t in texts)


def by_length(texts: Sequence[Text], batch_tokens: int) -> Iterator[list[int]]:
    """Yields the numbers of texts in batches of alike lengths, the short ones first."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].token_ids))
    yield from _packed(texts, order, batch_tokens)


def _epoch(texts: Sequence[Text], batch_tokens: int, seed: int, epoch: int) -> Iterator[list[int]]:
    generator = np.random.default_rng((seed, epoch))
    order = generator.permutation(len(texts)).tolist()
    mean = sum(len(text.token_ids) for text in texts) / len(texts)
    size = max(int(_POOL * batch_tokens / mean), 1)
    batches = []
    for start in range(0, len(order), size):
        pool = sorted(order[start : start + size], key=lambda index: len(texts[index].token_ids))
        batches += list(_packed(texts, pool, batch_tokens))
    for index in generator.permutation(len(batches)):
        yield batches[index]


def _packed(texts: Sequence[Text], order: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yields numbers of texts, given by rising length, in batches that hold `batch_tokens`."""
    batch: list[int] = []
    for index in order:
        if batch and len(texts[index].token_ids) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
