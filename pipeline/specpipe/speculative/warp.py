"""From raw logits to the scores that a token is drawn from: penalties, biases, bans, temperature,
truncation.

The same function acts on draft rows and on target rows, so that the accept test compares like with
like. V is the vocabulary size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from specpipe.speculative.noise import Floats
from specpipe.speculative.request import Sampling


def warp(
    logits: npt.ArrayLike,
    sampling: Sampling,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    end_token_ids: Collection[int] = (),
) -> Floats:
    """Returns scores [V] of the token after prompt + output; sampling draws from their softmax.

    logits [V] are the raw logits of that position; output holds the emitted tokens and, in row i of
    a verification, the i draft tokens before it. An excluded token scores -inf. In order:
    repetition penalty (over prompt and output, Keskar et al. 2019, arXiv:1909.05858), presence and
    frequency penalties (over output, as OpenAI defines them), logit_bias (added, as OpenAI defines
    it), bad words and min_tokens, then, unless greedy, temperature, top-k, top-p, min-p, each on
    what the one before left. Equal scores at a cut: the lower ids stay.
    """
    scores = np.array(logits, dtype=np.float64)
    _penalize(scores, sampling, prompt, output)
    if sampling.biases:
        scores[list(sampling.biases)] += list(sampling.biases.values())
    _ban(scores, sampling, prompt, output, end_token_ids)
    if sampling.is_greedy:
        return scores
    scores /= sampling.temperature
    _truncate(scores, sampling)
    return scores


def softmax(scores: Floats) -> Floats:
    """Returns probabilities [..., V] of scores [..., V]; a score of -inf has probability 0."""
    exp = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs: Floats = exp / exp.sum(axis=-1, keepdims=True)
    return probs


def _penalize(
    scores: Floats, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> None:
    if sampling.repetition_penalty != 1.0:
        used_ids = np.unique(np.array([*prompt, *output], dtype=np.int64))
        s = scores[used_ids]
        scores[used_ids] = np.where(
            s > 0, s / sampling.repetition_penalty, s * sampling.repetition_penalty
        )
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
        scores[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _ban(
    scores: Floats,
    sampling: Sampling,
    prompt: Sequence[int],
    output: Sequence[int],
    end_token_ids: Collection[int],
) -> None:
    if len(output) < sampling.min_tokens:
        scores[[i for i in end_token_ids if i < scores.size]] = -np.inf
    banned = banned_token_ids(sampling.bad_words, prompt, output)
    scores[[i for i in banned if i < scores.size]] = -np.inf


def banned_token_ids(
    bad_words: Sequence[tuple[int, ...]], prompt: Sequence[int], output: Sequence[int]
) -> list[int]:
    """Returns the ids that would complete a bad word after prompt + output."""
    longest = max(map(len, bad_words), default=1) - 1
    tail = tuple(output[-longest:]) if longest else ()
    if len(tail) < longest:
        tail = (*prompt[len(prompt) - (longest - len(tail)) :], *tail)
    return [
        w[-1]
        for w in bad_words
        if len(w) - 1 <= len(tail) and tail[len(tail) - len(w) + 1 :] == w[:-1]
    ]


def _truncate(scores: Floats, sampling: Sampling) -> None:
    """Sets what top-k, top-p and min-p exclude to -inf."""
    order = np.argsort(-scores, kind="stable")
    if 0 < sampling.top_k < scores.size:
        scores[order[sampling.top_k :]] = -np.inf
    if sampling.top_p < 1.0:
        probs = softmax(scores)[order]
        before = np.cumsum(probs) - probs
        scores[order[before >= sampling.top_p]] = -np.inf
    if sampling.min_p > 0.0:
        scores[scores < scores.max() + np.log(sampling.min_p)] = -np.inf
