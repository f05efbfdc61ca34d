"""An engine of the torch runtime as the model of a stand-in, with reuse of cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specpipe.runtimes.torch.engine import TorchEngine


class TorchScorer:
    """A `Scorer`; each slot of the engine remembers the tokens that it has cached."""

    def __init__(self, folder: Path) -> None:
        self._engine = TorchEngine.load(folder, num_threads=1)
        self.vocab_size = self._engine.vocab_size
        self._cached: dict[int, list[int]] = {}
        for _ in range(self._engine.max_batch_size):
            made = self._engine.allocate(prompt_length=1, max_tokens=self._engine.max_seq_len)
            self._cached[made] = []

    def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray[Any, Any]:
        wanted = list(token_ids)
        lengths = {made: _num_common(cached, wanted) for made, cached in self._cached.items()}
        # A slot that would lose most of what it has belongs to another text: rather the oldest.
        gains = {n: lengths[n] if 2 * lengths[n] >= len(self._cached[n]) else 0 for n in lengths}
        sequence = max(gains, key=gains.__getitem__)
        kept = min(lengths[sequence], len(wanted) - num_rows)
        self._engine.truncate(sequence, kept)
        # Forgotten and remembered anew: the slot that was used longest ago is the first to go.
        del self._cached[sequence]
        self._cached[sequence] = wanted
        rows = self._engine.forward([(sequence, wanted[kept:])], [num_rows])
        logits: np.ndarray[Any, Any] = rows.float().numpy()
        return logits


def _num_common(cached: Sequence[int], wanted: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(cached, wanted, strict=False)):
        if a != b:
            return index
    return min(len(cached), len(wanted))
