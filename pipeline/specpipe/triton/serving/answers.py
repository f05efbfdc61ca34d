"""Chunks turned into responses, and cancellations on their way back."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specpipe.errors import RequestError, ServerError, to_sentence
from specpipe.machine.callables import Clock
from specpipe.speculative.request import Chunk, Statistics, TopLogProbs, join_chunks
from specpipe.triton.secret import Signer
from specpipe.triton.serving.requests import Generation
from specpipe.triton.serving.tensor_values import (
    LONGEST_ID,
    Tensors,
    array_of,
    as_array,
    as_rows,
    decode_utf8,
    signature_of,
    single_of,
)
from specpipe.triton.serving.tensors import CANCEL, SIGNATURE, STREAM_ID, TENSORS_BY_NAME, TEXT

_POLL_INTERVAL_S = 0.5
"""Between looks whether a client is gone: each is a round trip of a model's process to Triton's,
and takes as much as a fifth of a response.
"""

_INDICES = {
    name: as_array(TENSORS_BY_NAME[name], [0]) for name in ("batch_index", "sequence_index")
}


@dataclass
class Answer:
    """Turns the chunks of one request into responses: one a chunk, or a single one.

    A response with the stream's id asks postprocessing to look whether the client is gone: the
    first has it, and one now and then.
    """

    generation: Generation
    stream_id: str
    clock: Clock = time.monotonic
    num_responses: int = 0  # after the first one a failure can no longer be a Triton error
    _held: list[Chunk] = field(default_factory=list)
    _sum_log_probs: float = 0.0
    _polled_s: float = -math.inf

    def add(self, chunk: Chunk) -> dict[str, np.ndarray[Any, Any]] | None:
        """Returns the next response's tensors, None when this chunk is kept for a later one.

        The response of a chunk with a finish_reason is the last. Raises ServerError when the
        request failed before its first response, which is the moment for a Triton error.
        """
        if chunk.finish_reason == "error" and not self.num_responses:
            raise ServerError(chunk.error or "the request failed")
        self._held.append(chunk)
        is_last = chunk.finish_reason is not None
        if not is_last and not (self.generation.stream and any(c.text for c in self._held)):
            return None
        joined, self._held = join_chunks(self._held), []
        values: dict[str, Sequence[Any]] = {"text": [joined.text]}
        if self.generation.return_token_ids:
            values["output_ids"] = joined.token_ids
        rows = self._log_probs(joined, values)
        if is_last:
            values |= _last_values(joined)
        elif self.clock() - self._polled_s >= _POLL_INTERVAL_S:
            self._polled_s = self.clock()
            values["stream_id"] = [self.stream_id]
        self.num_responses += 1
        return {
            **_INDICES,
            **{name: as_array(TENSORS_BY_NAME[name], listed) for name, listed in values.items()},
            **{name: as_rows(TENSORS_BY_NAME[name], listed) for name, listed in rows.items()},
        }

    def _log_probs(
        self, joined: Chunk, values: dict[str, Sequence[Any]]
    ) -> dict[str, list[list[Any]]]:
        """Adds the log-probabilities that the request asks for, and returns those in rows."""
        request = self.generation.request
        if request.return_log_probs:
            values["output_log_probs"] = joined.log_probs
            for log_prob in joined.log_probs:  # one by one: sums of parts would round otherwise
                self._sum_log_probs += log_prob
            if joined.finish_reason is not None:
                values["cum_log_probs"] = [self._sum_log_probs]
        is_first = not self.num_responses
        if request.return_prompt_log_probs and is_first:
            values["prompt_log_probs"] = joined.prompt_log_probs
        if not request.num_top_log_probs:
            return {}
        rows = _rows("output", joined.top_log_probs)
        if request.return_prompt_log_probs and is_first:
            rows |= _rows("prompt", joined.prompt_top_log_probs)
        return rows


def _rows(of: str, likeliest: Sequence[TopLogProbs]) -> dict[str, list[list[Any]]]:
    return {
        f"{of}_top_log_prob_ids": [[token_id for token_id, _ in row] for row in likeliest],
        f"{of}_top_log_probs": [[log_prob for _, log_prob in row] for row in likeliest],
    }


def _last_values(chunk: Chunk) -> dict[str, Sequence[Any]]:
    values: dict[str, Sequence[Any]] = {"finish_reason": [chunk.finish_reason]}
    if chunk.error is not None:
        values["error"] = [to_sentence(chunk.error)]
    if chunk.statistics is not None:
        values |= {
            name: value if isinstance(value, tuple) else [value]
            for name, value in chunk.statistics.to_json().items()
            if name in TENSORS_BY_NAME and value is not None
        }
    return values


def parse_statistics(values: Mapping[str, Any]) -> Statistics | None:
    """Returns what a last response reports, None when it reports nothing (a failed request)."""
    if "num_output_tokens" not in values:
        return None
    counts = {
        name: int(values[name])
        for name in (
            "num_input_tokens",
            "num_output_tokens",
            "num_steps",
            "total_draft_tokens",
            "total_accepted_draft_tokens",
            "seed_used",
        )
    }
    # Servers before these were always sent leave them out.
    counts |= {
        name: int(values.get(name, 0))
        for name in (
            "accepted_prediction_tokens",
            "rejected_prediction_tokens",
            "num_cached_input_tokens",
            "num_preemptions",
        )
    }
    return Statistics(
        **counts,
        acceptance_rate=float(values.get("acceptance_rate", 0.0)),
        draft_status=values.get("draft_status"),
        acceptance_histogram=_histogram(values.get("acceptance_histogram")),
        is_lossless=bool(values.get("is_lossless", True)),
    )


def _histogram(value: Any) -> tuple[int, ...] | None:
    """Returns an output that Triton writes as one number where it has but one."""
    return None if value is None else tuple(int(count) for count in np.reshape(value, -1))


def read_chunk(tensors: Tensors) -> tuple[np.ndarray[Any, Any], bytes]:
    """Returns the text of a chunk as it came, and its stream id; b"" where it has none."""
    text = array_of(TEXT, tensors)
    if STREAM_ID.name not in tensors:
        return text, b""
    stream_id = single_of(STREAM_ID, tensors)
    if len(stream_id) > LONGEST_ID:
        raise RequestError(f"stream_id has {len(stream_id)} bytes; it may have {LONGEST_ID}")
    return text, stream_id


def write_cancel(stream_id: bytes, signer: Signer) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the tensors that cancel a request."""
    return {
        CANCEL.name: as_array(CANCEL, [stream_id]),
        SIGNATURE.name: as_array(SIGNATURE, [signer.sign(CANCEL.name, stream_id)]),
    }


def read_cancel(tensors: Tensors, signer: Signer) -> str:
    """Returns the stream id of a request to cancel one."""
    stream_id = single_of(CANCEL, tensors)
    signer.check(signature_of(tensors), CANCEL.name, stream_id)
    return decode_utf8(CANCEL, stream_id)
