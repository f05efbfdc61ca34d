"""How the tokens of an answer are chosen, and which of them end it, by the inputs of a request."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Iterator, Sequence

from specpipe.errors import RequestError
from specpipe.speculative.request import Sampling
from specpipe.triton.serving.inputs import Inputs
from specpipe.triton.serving.request_tokenizer import RequestTokenizer, check_used

_LOGGER = logging.getLogger(__name__)


def read_sampling(inputs: Inputs, tokenizer: RequestTokenizer) -> Sampling:
    """Returns the settings of sampling; RequestError names the input at fault.

    Greedy unless temperature > 0, top_k > 1, 0 < top_p < 1 or min_p > 0 is given; temperature is
    then 1 unless given. A top_k or top_p of 0 is unset, as NVIDIA's clients send it.
    """
    top_k, top_p, min_p = (inputs.one(name, 0) for name in ("top_k", "top_p", "min_p"))
    is_restricted = top_k > 1 or 0 < top_p < 1 or min_p > 0
    seed = inputs.one("seed")
    bad_words = words_of("bad_words", inputs)
    return Sampling(
        temperature=inputs.one("temperature", 1.0 if is_restricted else 0.0),
        top_k=top_k,
        top_p=top_p or 1.0,
        min_p=float(min_p),
        repetition_penalty=inputs.one("repetition_penalty", 1.0),
        presence_penalty=inputs.one("presence_penalty", 0.0),
        frequency_penalty=inputs.one("frequency_penalty", 0.0),
        min_tokens=inputs.one("min_tokens", 0),
        bad_words=tuple(ids for word in bad_words for ids in _banned(word, tokenizer)),
        logit_bias=_logit_bias(inputs, tokenizer),
        seed=secrets.randbits(64) if seed is None else seed,
        is_seeded=seed is not None,
    )


def read_end_token_ids(inputs: Inputs, tokenizer: RequestTokenizer) -> frozenset[int]:
    """Returns the end id that was given (-1 is none), else the checkpoint's, and those besides."""
    end_id = inputs.one("end_id")
    ignores_end = inputs.one("ignore_eos", False)
    if end_id is not None and end_id < -1:
        raise RequestError(f"end_id is {end_id}; it must be a token id, or -1 for none")
    if ignores_end and end_id not in (None, -1):
        raise RequestError(f"ignore_eos is true, and end_id is {end_id}: leave one out")
    if end_id not in (None, -1) and not tokenizer.is_used(end_id):
        raise RequestError(f"end_id is {end_id}, which is no token of this model")
    stop_token_ids = inputs.many("stop_token_ids")
    check_used("stop_token_ids", stop_token_ids, tokenizer)
    if end_id is None:
        ends = frozenset() if ignores_end else tokenizer.end_token_ids
    else:
        ends = frozenset(() if end_id == -1 else (end_id,))
    return ends.union(stop_token_ids)


def words_of(name: str, inputs: Inputs) -> list[str]:
    """Returns the words of an input; an empty one is ignored, and the log says so."""
    words = inputs.many(name)
    if not all(words):
        _LOGGER.warning("%s: an empty word is ignored", name)
    return [word for word in words if word]


def _banned(word: str, tokenizer: RequestTokenizer) -> Iterator[tuple[int, ...]]:
    """Yields the tokens of a bad word, and those that it has after a space, where these differ.

    vLLM bans both, too: most words of a text are spelled by tokens that begin with the space.
    """
    plain = tuple(tokenizer.encode_fragment(word))
    yield plain
    spaced = tuple(tokenizer.encode_fragment(f" {word}"))
    if spaced[-len(plain) :] != plain:
        yield spaced


def _logit_bias(inputs: Inputs, tokenizer: RequestTokenizer) -> tuple[tuple[int, float], ...]:
    """Returns what is added to the logits of tokens, one after the other."""
    ids, values = inputs.many("logit_bias_ids"), inputs.many("logit_bias_values")
    _check_pairs("logit_bias_ids", ids, "logit_bias_values", values)
    check_used("logit_bias_ids", ids, tokenizer)
    words, weights = inputs.many("embedding_bias_words"), inputs.many("embedding_bias_weights")
    if any(words) or any(weights):  # NVIDIA's clients send what asks for nothing
        _check_pairs("embedding_bias_words", words, "embedding_bias_weights", weights)
    words_bias = (
        (token_id, weight)
        for word, weight in zip(words, weights, strict=False)
        for token_id in tokenizer.encode_fragment(word)
    )
    return (*zip(ids, values, strict=True), *words_bias)


def _check_pairs(
    name: str, entries: Sequence[object], of_values: str, values: Sequence[float]
) -> None:
    if len(entries) != len(values):
        raise RequestError(
            f"{name} has {len(entries)} entries, {of_values} {len(values)}: each takes one of the "
            "other"
        )
    for value in values:
        if not math.isfinite(value):
            raise RequestError(f"{of_values} has {value}; it must be a number")
