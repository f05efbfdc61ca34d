"""What a response of the ensemble says, whatever brought it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from specpipe.errors import CutStream, ServerError, show, to_sentence
from specpipe.speculative.request import FinishReason, Statistics, TopLogProbs
from specpipe.triton import serving


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A response: a whole answer, or one chunk of a streamed one; the last has the statistics.

    What a request did not ask for is empty.
    """

    text: str
    finish_reason: FinishReason | None = None
    statistics: Statistics | None = None
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """One a token."""
    top_log_probs: tuple[TopLogProbs, ...] = ()
    """One a token: the likeliest ones with their log-probabilities, likeliest first."""
    prompt_log_probs: tuple[float, ...] = ()
    """In the first chunk: of each token of the prompt but the first."""
    prompt_top_log_probs: tuple[TopLogProbs, ...] = ()


_COMPLETIONS = TypeAdapter(Completion)

_OF_PLAIN_CHUNK = frozenset(("text_output", "batch_index", "sequence_index"))


def read_completion(values: Mapping[str, Any], server: str) -> Completion:
    """Turns the outputs of one response, flat or in their shapes, into a Completion.

    Raises ServerError, which names the `server`, for what is no answer of the ensemble.
    """
    text = values.get("text_output")
    if isinstance(text, str) and values.keys() <= _OF_PLAIN_CHUNK:
        return Completion(text=text)  # as nearly all are; the rest takes 50 µs
    try:
        log_probs = _listed(values, "output_log_probs")
        prompt_log_probs = _listed(values, "prompt_log_probs")
        return _COMPLETIONS.validate_python(
            {
                "text": values.get("text_output", ""),
                "finish_reason": values.get("finish_reason"),
                "statistics": serving.parse_statistics(values),
                "token_ids": _listed(values, "output_ids"),
                "log_probs": log_probs,
                "top_log_probs": _rows(values, "output", len(log_probs)),
                "prompt_log_probs": prompt_log_probs,
                "prompt_top_log_probs": _rows(values, "prompt", len(prompt_log_probs)),
            }
        )
    except (ArithmeticError, KeyError, TypeError, ValueError) as exc:
        raise ServerError(
            f"{server} sent what is no answer of the ensemble: {show(dict(values))}"
        ) from exc


def check_reason(values: Mapping[str, Any], num_received: int, server: str, model: str) -> None:
    """Raises for a response that ends the answer otherwise than it should."""
    reason = values.get("finish_reason")
    if reason == "error":
        raise ServerError(f"the request failed: {to_sentence(str(values.get('error')))}")
    if reason == "cancelled":
        raise CutStream.after(num_received, server, "the server cancelled the request")
    if reason not in (None, "stop", "length"):
        raise ServerError(
            f"{server}: {model} ended with finish_reason '{show(reason)}', which "
            "this version of specpipe does not know"
        )


def _rows(values: Mapping[str, Any], of: str, num_rows: int) -> list[list[tuple[Any, Any]]]:
    """Returns the likeliest tokens of each position; protocols flatten the two tensors."""
    ids = _listed(values, f"{of}_top_log_prob_ids")
    if not ids:
        return []
    pairs = list(zip(ids, _listed(values, f"{of}_top_log_probs"), strict=True))
    width, rest = divmod(len(pairs), num_rows)
    if rest:
        raise ValueError(f"{len(pairs)} likeliest tokens of {num_rows}")
    return [pairs[start : start + width] for start in range(0, len(pairs), width)]


def _listed(values: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Returns the elements of an output; Triton writes one of a single element as that element."""
    value = values.get(name, ())
    if isinstance(value, (list, tuple)) and not any(isinstance(v, list) for v in value[:1]):
        return value
    elements: list[Any] = np.reshape(value, -1).tolist()
    return elements
