"""The likeliest token, or several, of many rows, as `speculative/log_probs.py` has them of one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from specpipe.speculative.request import TopLogProbs

_BLOCK = 64
"""Tokens of which the likeliest is found first, where the likeliest of all are looked for: a guess.
"""


def greatest(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """Returns the greatest number of each row [R, V], float32 or float64, and its id.

    Of equal ones that is the first, as in NumPy. A NaN counts as the greatest.
    """
    if logits.device.type == "cpu":  # NumPy finds it in a tenth of torch's time
        scores = logits.numpy()
        ids = scores.argmax(axis=-1)
        return scores[np.arange(len(ids)), ids].tolist(), ids.tolist()
    best, token_ids = logits.max(dim=-1)
    return best.tolist(), token_ids.tolist()


def likeliest(log_probs: torch.Tensor, count: int) -> list[TopLogProbs]:
    """Returns so many of the highest of each row [R, V], as `speculative/log_probs.py` does.

    What cannot be emitted is -inf; a row with a NaN has none.
    """
    num_rows, vocab_size = log_probs.shape
    num_blocks = vocab_size // _BLOCK
    floor = torch.full((num_rows, 1), torch.finfo(log_probs.dtype).min, device=log_probs.device)
    if num_blocks >= count:
        # So many blocks have a token that is as likely as that: no other need be sorted.
        blocks = log_probs[:, : num_blocks * _BLOCK].unflatten(-1, (num_blocks, _BLOCK))
        floor = floor.maximum(blocks.amax(dim=-1).topk(count, dim=-1).values[:, -1:])
    found = (log_probs >= floor).nonzero(as_tuple=True)
    values = log_probs[found].cpu().numpy()
    rows, token_ids = (index.cpu().numpy() for index in found)
    order = np.lexsort((token_ids, -values, rows))
    starts = np.searchsorted(rows, np.arange(num_rows + 1))
    best = (order[a : min(a + count, b)] for a, b in pairwise(starts))
    return [tuple(zip(token_ids[i].tolist(), values[i].tolist(), strict=True)) for i in best]
