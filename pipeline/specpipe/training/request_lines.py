"""Lines of a log of OpenAI requests as lines of a prompt file (evaluate/prompts.py).

Answers are drawn as `draft collect` is told, so how a request wanted its own drawn says nothing
here; what its prompt is made of, and what holds its answer to a form, does. The fields are those of
OpenAI's chats and completions, and vLLM's beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specpipe.errors import ConfigError
from specpipe.evaluate.prompts import Prompt, iterate_prompts

_WITHOUT_EFFECT = {
    "model", "temperature", "top_p", "top_k", "min_p", "n", "best_of", "seed", "stop",
    "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logprobs", "top_logprobs", "prediction", "stream",
    "stream_options", "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "cache_salt", "request_id", "priority",
    "return_token_ids", "skip_special_tokens", "tool_choice", "parallel_tool_calls",
    "function_call",
}  # fmt: skip
"""The last three say nothing without tools or functions."""

_DECISIVE = (
    "tools", "functions", "response_format", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "reasoning_effort", "verbosity", "modalities", "audio",
    "web_search_options", "chat_template", "chat_template_kwargs", "documents", "suffix", "echo",
    "add_generation_prompt", "continue_final_message",
)  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_NEUTRAL: Mapping[str, Any] = {
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "add_generation_prompt": True,
}


def iterate_asked(source: str, *, limit: int | None = None) -> Iterator[Prompt]:
    """Yields the prompts of a set, of which a line may be a request to an OpenAI server, too."""
    return iterate_prompts(source, limit=limit, read_fields=prompt_fields)


def prompt_fields(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns what a line says of its prompt; `where` begins the message of a ConfigError.

    The answer's length is its `max_completion_tokens`, else `max_tokens`.
    """
    kept = {key: value for key, value in fields.items() if key not in _WITHOUT_EFFECT}
    for key in _DECISIVE:
        neutral = (None, _NEUTRAL[key]) if key in _NEUTRAL else _NOTHING
        if kept.pop(key, None) not in neutral:
            raise ConfigError(
                f"{where}: {key} changes what the target reads or may say, and cannot be asked "
                f"with: leave this line out, or {key}, to ask without it"
            )
    longest = kept.pop("max_completion_tokens", None)
    return kept if longest is None else {**kept, "max_tokens": longest}
