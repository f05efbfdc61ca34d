"""Log-probabilities of raw logits: what a model finds likely, before anything is done about it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specpipe.speculative.noise import Floats
from specpipe.speculative.request import TopLogProbs


def log_softmax(logits: npt.ArrayLike) -> Floats:
    """Returns log-probabilities [V] of raw logits [V]."""
    shifted = np.array(logits, dtype=np.float64)
    shifted -= shifted.max()
    log_probs: Floats = shifted - np.log(np.exp(shifted).sum())
    return log_probs


def likeliest(log_probs: Floats, count: int) -> TopLogProbs:
    """Returns so many tokens with the highest log-probabilities [V]; of equal ones the lower ids
    are first.
    """
    order = np.argsort(-log_probs, kind="stable")[:count]
    return tuple((int(i), float(log_probs[i])) for i in order)
