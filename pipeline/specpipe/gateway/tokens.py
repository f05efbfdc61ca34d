"""Tokens and their log probabilities, in the forms of chats, of completions and of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from specpipe.speculative.request import TopLogProbs
from specpipe.triton.client.completion import Completion

_LEAST = -9999.0  # OpenAI's for what is very unlikely; JSON has no infinity
_CACHED_TOKENS = 65536

Entry = tuple[int, float | None, TopLogProbs]
"""A token, its log probability, and the likeliest tokens in its place."""


class TokenBytes(Protocol):
    """What spells tokens; `specpipe.text.tokenizer.Tokenizer` does."""

    def token_bytes(self, token_id: int) -> bytes: ...


class Tokens:
    """Writes tokens as text and as bytes."""

    def __init__(self, tokenizer: TokenBytes, hidden_token_ids: frozenset[int]) -> None:
        """hidden_token_ids  those that have no part in the text of an answer"""
        self._tokenizer, self._hidden = tokenizer, hidden_token_ids
        self.written = lru_cache(_CACHED_TOKENS)(self._write)

    def _write(self, token_id: int) -> tuple[str, list[int]]:
        """Returns a token as OpenAI's APIs do: as text where it is one, else by its bytes."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return text, list(data)

    def name(self, token_id: int, *, is_by_id: bool) -> str:
        """Returns the text that stands for a token, or `token_id:7`."""
        return f"token_id:{token_id}" if is_by_id else self.written(token_id)[0]

    def num_characters(self, token_id: int, *, shows_special: bool) -> int:
        """Returns how many characters of the text begin with bytes of this token."""
        if token_id in self._hidden and not shows_special:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self.written(token_id)[1])


def entries(completion: Completion, num_top: int) -> list[Entry]:
    """Returns the tokens of a chunk, each with that many of the likeliest."""
    found = completion.token_ids, completion.log_probs, completion.top_log_probs
    return _entries(*found, num_top)


def prompt_entries(
    completion: Completion, prompt_token_ids: Sequence[int], num_top: int
) -> list[Entry]:
    """Returns the tokens of a prompt; the first one is given, and has no probability."""
    found = completion.prompt_log_probs, completion.prompt_top_log_probs
    return [(prompt_token_ids[0], None, ()), *_entries(prompt_token_ids[1:], *found, num_top)]


def _entries(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    tops: Sequence[TopLogProbs],
    num_top: int,
) -> list[Entry]:
    tops = tops or ((),) * len(token_ids)
    return [
        (token_id, log_prob, top[:num_top])
        for token_id, log_prob, top in zip(token_ids, log_probs, tops, strict=True)
    ]


def chat_log_probs(
    found: Sequence[Entry], tokens: Tokens, *, is_by_id: bool
) -> list[dict[str, Any]]:
    """Returns a chat's list of tokens with their log probabilities."""

    def written(token_id: int, log_prob: float | None) -> dict[str, Any]:
        return {
            "token": tokens.name(token_id, is_by_id=is_by_id),
            "logprob": _finite(log_prob),
            "bytes": tokens.written(token_id)[1],
        }

    return [
        {**written(token_id, log_prob), "top_logprobs": [written(*one) for one in top]}
        for token_id, log_prob, top in found
    ]


class CompletionLogProbs:
    """The four lists of one answer of `/v1/completions`; offsets go on from chunk to chunk."""

    def __init__(self, tokens: Tokens, *, is_by_id: bool, shows_special: bool) -> None:
        self._tokens, self._is_by_id = tokens, is_by_id
        self._shows_special = shows_special
        self._num_characters = 0

    def write(self, found: Sequence[Entry]) -> dict[str, list[Any]]:
        """Returns the lists of the next tokens."""
        offsets = []
        for token_id, _, _ in found:
            offsets.append(self._num_characters)
            self._num_characters += self._tokens.num_characters(
                token_id, shows_special=self._shows_special
            )
        return {
            "tokens": [self._name(token_id) for token_id, _, _ in found],
            "token_logprobs": [_finite(log_prob) for _, log_prob, _ in found],
            "top_logprobs": [self._top(*entry) for entry in found],
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        return self._tokens.name(token_id, is_by_id=self._is_by_id)

    def _top(
        self, token_id: int, log_prob: float | None, top: TopLogProbs
    ) -> dict[str, float | None] | None:
        """The likeliest tokens and the chosen one, which may be none of them."""
        if log_prob is None:
            return None
        return {self._name(one): _finite(value) for one, value in (*top, (token_id, log_prob))}


def vllm_log_probs(found: Sequence[Entry], tokens: Tokens) -> list[dict[str, Any] | None]:
    """Returns the log probabilities of a prompt as vLLM writes them: by token id, with ranks."""
    written: list[dict[str, Any] | None] = []
    for token_id, log_prob, top in found:
        if log_prob is None:
            written.append(None)
            continue
        ranks = {one: rank for rank, (one, _) in enumerate(top, 1)}
        written.append(
            {
                str(one): {
                    "logprob": _finite(value),
                    "rank": ranks.get(one),
                    "decoded_token": tokens.written(one)[0],
                }
                for one, value in (*top, (token_id, log_prob))
            }
        )
    return written


def _finite(log_prob: float | None) -> float | None:
    return log_prob if log_prob is None else max(log_prob, _LEAST)
