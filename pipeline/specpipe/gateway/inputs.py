"""What a body asks for, as inputs of the ensemble."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specpipe.gateway.guide_inputs import guide_inputs
from specpipe.gateway.parameters import Parameters

_LEAST_TOP_P = 1e-6
"""Below it the likeliest token is all that is left; the ensemble takes 0 as `off`."""

_SEEDS = 2**64


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One answer of those that a request asks for.

    prompt_token_ids  where the gateway knows them; the others, only the server does
    """

    inputs: Mapping[str, Any]
    prompt_token_ids: tuple[int, ...] | None = None

    def seeded(self, index: int) -> Ask:
        """Returns the same for the answer of that number: each has a seed of its own."""
        seed = self.inputs.get("seed")
        if seed is None or index == 0:
            return self
        inputs = {**self.inputs, "seed": (seed + index) % _SEEDS}
        return Ask(inputs=inputs, prompt_token_ids=self.prompt_token_ids)


def common_inputs(body: Parameters, *, max_tokens: int) -> dict[str, Any]:
    """Returns the inputs that both kinds of completion have.

    max_tokens  of a request that names none
    """
    # Sampling is OpenAI's unless the request says otherwise: the ensemble's own default is greedy.
    inputs: dict[str, Any] = {
        "stream": bool(body.stream),
        "max_tokens": max_tokens if body.max_tokens is None else body.max_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
    }
    given: dict[str, Any] = {
        "top_k": max(body.top_k, 0) if body.top_k is not None else None,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "seed": None if body.seed is None else body.seed % _SEEDS,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "min_tokens": body.min_tokens,
        "bad_words": body.bad_words or None,
        "stop_words": body.stops or None,
        "stop_token_ids": body.stop_token_ids or None,
        "ignore_eos": body.ignore_eos or None,
        "skip_special_tokens": body.skip_special_tokens,
        "priority": body.priority,
        "num_draft_tokens": body.num_draft_tokens,
        "timeout_s": body.timeout_s,
        "cache_salt": body.cache_salt or None,
        "return_token_ids": needs_token_ids(body) or None,
    }
    inputs |= {name: value for name, value in given.items() if value is not None}
    if body.top_p is not None and body.top_p < _LEAST_TOP_P:
        inputs |= {"top_k": 1, "top_p": 1.0}
    if body.logit_bias:
        inputs["logit_bias_ids"] = [int(token_id) for token_id in body.logit_bias]
        inputs["logit_bias_values"] = list(body.logit_bias.values())
    return inputs | guide_inputs(body)


def needs_token_ids(body: Parameters) -> bool:
    """Returns whether the ids of an answer's tokens are part of it, or are counted on the way."""
    options = body.stream_options
    return bool(body.return_token_ids or (options and options.continuous_usage_stats))
