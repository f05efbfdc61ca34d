"""What quantization costs a model, and a pair, on texts that were held out.

A model's two forms read the same texts, one after the other: what the plain one says is kept in a
file, so that only one of them is in memory. Draft and target run as they are served, greedily and
with a fixed number of draft tokens. The same engines and texts give the same numbers.

V vocabulary, N positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from specpipe.build.quality.report import Divergence
from specpipe.checkpoints.parallel_draft import ParallelDraft
from specpipe.errors import EngineBuildError
from specpipe.progress import count, counted
from specpipe.quantization.texts import TokenIds
from specpipe.runtimes.pair.engine import Engine
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.torch_sampler import TorchSampler
from specpipe.speculative.metrics import AcceptanceCounts
from specpipe.speculative.request import Request

MAX_BATCH_SIZE, MAX_NUM_TOKENS = 8, 256
"""Prompts that run at once, and tokens of one forward: bound the memory of logits. A guess."""

MAX_OUTPUT_TOKENS = 32
"""Tokens that follow a prompt while acceptance is measured: before small models repeat themselves,
which any draft can follow."""

_MAX_PROMPT_TOKENS = 128  # of a text, so that no long one takes most of the time. A guess.
_FORWARD_ROWS = 128  # positions whose logits are in memory at once. A guess.
_COMPARED_ROWS = 16  # those that are in memory in float64, several times over. A guess.


class DivergenceSum:
    """Adds up what becomes a `Divergence`, in float64."""

    def __init__(self) -> None:
        self._num_positions = self._num_agreeing = 0
        self._plain_nll = self._nll = self._kl = 0.0

    def add(self, plain: Tensor, quantized: Tensor, next_token_ids: TokenIds) -> None:
        """Takes in the logits [N, V] of both forms and the tokens that came next."""
        for rows in torch.arange(len(next_token_ids)).split(_COMPARED_ROWS):
            place = slice(int(rows[0]), int(rows[-1]) + 1)
            chosen = torch.tensor(next_token_ids[place], device=quantized.device)[:, None]
            ours = plain[place].double().log_softmax(dim=-1)
            theirs = quantized[place].double().log_softmax(dim=-1)
            self._plain_nll -= float(ours.gather(-1, chosen).sum())
            self._nll -= float(theirs.gather(-1, chosen).sum())
            self._kl += float((ours.exp() * (ours - theirs)).sum())
            self._num_agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            self._num_positions += len(rows)

    def result(self) -> Divergence:
        count = self._num_positions
        return Divergence(
            num_positions=count,
            plain_perplexity=_exp(self._plain_nll / count),
            perplexity=_exp(self._nll / count),
            mean_kl=max(self._kl / count, 0.0),  # rounding alone can make it negative
            top1_agreement=self._num_agreeing / count,
        )


def _exp(mean_nll: float) -> float:
    """Returns a perplexity; beyond e^700, which float64 cannot hold, it says nothing anyway."""
    return math.exp(min(mean_nll, 700.0))


def record(engine: Engine, texts: Sequence[TokenIds], path: Path) -> None:
    """Writes the plain form's logits after every token of the texts but the last of each."""
    with path.open("wb") as file:
        for logits, _ in _scored(engine, texts, "plain"):
            file.write(logits.cpu().contiguous().numpy().data)


def compare(engine: Engine, texts: Sequence[TokenIds], path: Path) -> Divergence:
    """Returns how the quantized form differs from what `record` wrote for the same texts."""
    total = DivergenceSum()
    with path.open("rb") as file:
        for logits, next_token_ids in _scored(engine, texts, "quantized"):
            plain = np.fromfile(file, np.float32, logits.numel())
            shaped = torch.from_numpy(plain).view(logits.shape)
            total.add(shaped.to(logits.device), logits, next_token_ids)
    return total.result()


def _scored(
    engine: Engine, texts: Sequence[TokenIds], form: str
) -> Iterator[tuple[Tensor, TokenIds]]:
    """Yields logits [N, V] and the N tokens that come next, text by text."""
    for text in counted(texts, len(texts), "texts"):
        sequence = engine.allocate(prompt_length=len(text), max_tokens=len(text))
        for start in range(0, len(text) - 1, _FORWARD_ROWS):
            stop = min(start + _FORWARD_ROWS, len(text) - 1)
            logits = engine.forward([(sequence, text[start:stop])], [stop - start])
            if not logits.isfinite().all():
                raise EngineBuildError(
                    f"the {form} model's logits are NaN or infinite on the texts held out; "
                    "its weights, or the scales that it was quantized with, are no good"
                )
            yield logits, text[start + 1 : stop + 1]
        engine.free(sequence)


def cut_prompts(texts: Sequence[TokenIds]) -> list[tuple[int, ...]]:
    """Returns the first, the first two and the first three quarters of every text; 128 tokens of
    each at most."""
    prompts = (
        tuple(text[: max(quarters * len(text) // 4, 1)][-_MAX_PROMPT_TOKENS:])
        for text in texts
        for quarters in (1, 2, 3)
    )
    return list(dict.fromkeys(prompts))


@dataclass(frozen=True, kw_only=True)
class PairLimits:
    """What holds for drafting, whatever the format of draft and target."""

    num_draft_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    unused_token_ids: tuple[tuple[int, int], ...] = ()
    parallel: ParallelDraft | None = None


def measure_acceptance(
    draft: Engine, target: Engine, prompts: Sequence[tuple[int, ...]], limits: PairLimits
) -> list[AcceptanceCounts]:
    """Returns what was drafted and accepted for each prompt, continued greedily.

    As in serving, what was drafted past the end of an answer does not count.
    """
    options = PairOptions(
        num_draft_tokens=limits.num_draft_tokens,
        adaptive=False,
        max_batch_size=MAX_BATCH_SIZE,
        max_seq_len=target.max_seq_len,
        max_num_tokens=MAX_NUM_TOKENS,
        max_queue_size=len(prompts),
        request_timeout_s=math.inf,
        unused_token_ids=limits.unused_token_ids,
        parallel=limits.parallel,
    )
    sampler = TorchSampler.of(draft, target, options)
    pair = EnginePair(draft, target, sampler, options, lambda prompt, **_: _NoText())
    for number, prompt in enumerate(prompts):
        pair.submit(
            Request(
                request_id=str(number),
                prompt_token_ids=prompt,
                max_tokens=min(MAX_OUTPUT_TOKENS, target.max_seq_len - len(prompt)),
                end_token_ids=limits.end_token_ids,
            )
        )
    counts = [AcceptanceCounts() for _ in prompts]
    with count(len(prompts), "answers") as answered:
        while pair.has_work():
            for chunk in pair.step():
                if chunk.error is not None:
                    raise EngineBuildError(f"a held-out text could not be continued: {chunk.error}")
                if chunk.statistics is not None:
                    counts[int(chunk.request_id)] = AcceptanceCounts(
                        num_steps=chunk.statistics.num_steps,
                        num_draft_tokens=chunk.statistics.total_draft_tokens,
                        num_accepted_tokens=chunk.statistics.total_accepted_draft_tokens,
                    )
                    answered.advance()
    return counts


class _NoText:
    """A detokenizer for when only tokens count."""

    hidden_tokens: Mapping[int, str] = MappingProxyType({})
    prompt_text = ""

    def settle(self) -> str:
        return ""

    def append(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""
