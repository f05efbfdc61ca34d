"""What one response of the ensemble says, whatever it came by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from specpipe.errors import CutStream, ServerError, show, to_sentence
from specpipe.speculative.request import FinishReason, Statistics
from specpipe.triton import serving


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A response: a whole answer, or one chunk of a streamed one; the last has the statistics."""

    text: str
    finish_reason: FinishReason | None = None
    statistics: Statistics | None = None
    log_probs: tuple[float, ...] = ()


_COMPLETIONS = TypeAdapter(Completion)


def completion_of(values: Mapping[str, Any], server: str, model: str) -> Completion:
    """Returns what a response says; raises ServerError for what is none of the ensemble."""
    try:
        return _COMPLETIONS.validate_python(
            {
                "text": values.get("text_output", ""),
                "finish_reason": values.get("finish_reason"),
                "statistics": serving.parse_statistics(values),
                "log_probs": _floats(values.get("output_log_probs", ())),
            }
        )
    except (KeyError, OverflowError, TypeError, ValueError) as exc:
        raise ServerError(
            f"{server}: {model} sent what is no answer of the ensemble: {show(dict(values))}"
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


def _floats(value: Any) -> tuple[float, ...]:
    return tuple(float(number) for number in np.reshape(value, -1))
