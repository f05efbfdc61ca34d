"""Any OpenAI-compatible server (vLLM, SGLang, trtllm-serve, …), streamed as server-sent events.

Text and token ids go to `/v1/completions`, messages to `/v1/chat/completions`. Beyond OpenAI's own
parameters a question may need those of vLLM's and SGLang's: `top_k`, `min_p`, `repetition_penalty`,
`min_tokens`, `ignore_eos`; a server that lacks one refuses it. Token ids are what vLLM and our
gateway send for `return_token_ids`, vLLM's with the one that ended the answer; log-probabilities
come under them with `return_tokens_as_token_ids` (docs.vllm.ai, OpenAI-Compatible Server, "Extra
parameters").
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from specpipe.errors import CutStream, RequestError, ServerError, show, to_sentence
from specpipe.evaluate.endpoints.base import Piece, Question, Usage, given_settings
from specpipe.machine.event_stream import parse_data, read_events
from specpipe.machine.web import asked, receive
from specpipe.speculative.request import FinishReason, TopLogProbs

SCHEMES = ("openai+http", "openai+https")

_USAGE_AT_END = {"include_usage": True}
_USAGE_ALWAYS = {"include_usage": True, "continuous_usage_stats": True}
"""vLLM and SGLang then count the tokens of each chunk; others may refuse the key."""

_WITH_IDS: Mapping[str, Any] = {
    "return_token_ids": True,
    "top_k": -1,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Whose ids are kept is drawn as it says, too: what a request leaves out, vLLM and SGLang take from
the checkpoint's generation_config.json."""

_BY_ID = "token_id:"
"""What the name of a token begins with, with `return_tokens_as_token_ids`."""

_FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    # These end a text as a stop does.
    "tool_calls": "stop",
    "function_call": "stop",
    "content_filter": "stop",
}
"""OpenAI's; a server that could not finish says otherwise (vLLM: abort, error)."""

_MAX_ERROR_BYTES = 1 << 16  # of a refusal that are read: a server may send without end


class OpenAI:
    """One model of one server; `url` is `openai+http://host:port`, with a path if not `/v1`."""

    def __init__(
        self, url: str, *, model: str, api_key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise ServerError(f"{url!r} is not openai+http://HOST:PORT or openai+https://HOST")
        self.name = url
        self._model, self._timeout_s = model, timeout_s
        scheme = parts.scheme.removeprefix("openai+")
        self._origin = f"{scheme}://{parts.netloc.rpartition('@')[2]}"
        self._path = parts.path.rstrip("/") or "/v1"
        self._headers = {"Accept": "text/event-stream"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._stream_options: tuple[Mapping[str, bool], ...] = (_USAGE_ALWAYS, _USAGE_AT_END)
        self._id_options: tuple[Mapping[str, Any], ...] = (_WITH_IDS, {})

    def stream(self, question: Question) -> Iterator[Piece]:
        """Yields one piece for each event with a choice or with usage."""
        path, body = self._request(question)
        with closing(self._events(path, body, with_ids=question.returns_ids)) as events:
            yield from _pieces(events, self.name)

    def close(self) -> None:
        """Nothing to do: each question has a connection of its own, so that it can be cut."""

    def _request(self, question: Question) -> tuple[str, dict[str, Any]]:
        settings = given_settings(question)
        if settings.pop("num_draft_tokens", None) is not None:
            raise RequestError(
                f"{self.name}: an OpenAI-compatible server takes no num_draft_tokens: its draft "
                "length is its own"
            )
        body = {
            "model": self._model,
            "max_tokens": question.max_tokens,
            "stream": True,
            "temperature": 0.0,  # which is not OpenAI's default
            **settings,
        }
        if question.stop_strings:
            body["stop"] = list(question.stop_strings)
        if question.ignores_end:
            body["ignore_eos"] = True
        if question.num_top_log_probs:
            if question.messages is not None:
                raise RequestError(f"{self.name}: log-probabilities of a chat are not by token id")
            body["logprobs"] = question.num_top_log_probs
            body["return_tokens_as_token_ids"] = True
        if question.messages is not None:
            body["messages"] = [dict(message) for message in question.messages]
            return f"{self._path}/chat/completions", body
        body["prompt"] = list(question.token_ids or ()) if question.text is None else question.text
        return f"{self._path}/completions", body

    def _events(
        self, path: str, body: Mapping[str, Any], *, with_ids: bool
    ) -> Generator[str, None, None]:
        """Asks; once more, and from then on, without the counts, or the ids, that it refuses."""
        url = f"{self._origin}{path}"
        id_options = self._id_options if with_ids else ({},)
        for ids, options in itertools.product(id_options, self._stream_options):
            whole = {**ids, **body, "stream_options": options}
            with asked(
                url, whole, self._headers, server=self.name, timeout_s=self._timeout_s
            ) as response:
                if response.status == 200:
                    self._stream_options = (options,)
                    if with_ids:
                        self._id_options = (ids,)
                    yield from read_events(response, self.name)
                    return
                error = _error_text(response.read(_MAX_ERROR_BYTES))
                refusal = f"{self.name} answers {response.status}: {error}"
            if response.status not in (400, 422):
                break
        raise (RequestError if response.status < 500 else ServerError)(refusal)


def _pieces(events: Iterator[str], name: str) -> Iterator[Piece]:
    """Yields the pieces of a completion; raises ServerError for an error, CutStream for no end."""
    num_received = num_counted = 0
    is_counted = True  # each chunk so far told how many tokens there were
    finish_reason: FinishReason | None = None
    while True:
        is_whole = finish_reason is not None
        data = receive(events, num_received, name, is_whole=is_whole)
        if data is None and not is_whole:
            raise CutStream.after(num_received, name, "no finish_reason and no [DONE]")
        if data is None or data == "[DONE]":
            break
        chunk = _Chunk.parse(data, name)
        if chunk.error is not None:
            raise ServerError(f"{name}: the request failed: {chunk.error}")
        if is_whole and chunk.text:
            raise ServerError(f"{name} went on after its finish_reason")
        num_received += chunk.has_choice
        num_so_far = chunk.num_tokens_so_far
        is_counted = is_counted and (num_so_far is not None or not chunk.text)
        num_tokens = None
        if is_counted and num_so_far is not None:
            num_tokens, num_counted = num_so_far - num_counted, num_so_far
        finish_reason = chunk.finish_reason or finish_reason
        yield Piece(
            text=chunk.text,
            token_ids=chunk.token_ids,
            top_log_probs=chunk.top_log_probs,
            prompt_token_ids=chunk.prompt_token_ids,
            num_tokens=num_tokens,
            finish_reason=chunk.finish_reason,
            usage=chunk.usage,
        )
    if num_received == 0:
        raise ServerError(f"{name} ended without an answer")


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    top_log_probs: tuple[TopLogProbs, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: str | None = None
    has_choice: bool = False

    @property
    def num_tokens_so_far(self) -> int | None:
        """What a chunk of the output counts; the chunk without a choice sums up at the end."""
        return self.usage.num_output_tokens if self.has_choice and self.usage else None

    @classmethod
    def parse(cls, text: str, name: str) -> _Chunk:
        """Reads the data of an event; raises ServerError for what is no chunk."""
        try:
            return _CHUNKS.validate_python(_fields(parse_data(text)))
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
            raise ServerError(f"{name} sent what is no chunk: '{show(text)}'") from exc


_CHUNKS = TypeAdapter(_Chunk)


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    if data.get("error") is not None:
        return {"error": _error_text(json.dumps(data).encode())}
    usage = _usage(data)
    if not data.get("choices"):
        return {"usage": usage}
    choice = data["choices"][0]
    reason = choice.get("finish_reason")
    if reason is not None and reason not in _FINISH_REASONS:
        return {"error": f"finish_reason {show(reason)}"}
    top_log_probs = _top_log_probs(choice)
    if top_log_probs is None:
        return {"error": "its log-probabilities name tokens by their text, and not by their ids"}
    return {
        "text": _text(choice),
        "token_ids": choice.get("token_ids"),
        "top_log_probs": top_log_probs,
        "prompt_token_ids": choice.get("prompt_token_ids") or data.get("prompt_token_ids"),
        "finish_reason": None if reason is None else _FINISH_REASONS[reason],
        "usage": usage,
        "has_choice": True,
    }


def _text(choice: Mapping[str, Any]) -> str:
    """Returns a chunk's text, thinking before the answer included: that is output, too."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    parts = (delta.get(key) for key in ("reasoning_content", "reasoning", "content"))
    return "".join(part for part in parts if part)


def _top_log_probs(choice: Mapping[str, Any]) -> list[list[tuple[int, float]]] | None:
    """Returns the likeliest tokens of a completion's chunk, likeliest first; None: not by id."""
    found = []
    for row in (choice.get("logprobs") or {}).get("top_logprobs") or ():
        if not all(name.startswith(_BY_ID) for name in row):
            return None
        by_id = [(int(name.removeprefix(_BY_ID)), value) for name, value in row.items()]
        found.append(sorted(by_id, key=lambda one: -one[1]))
    return found


def _usage(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a chunk's counts; vLLM adds acceptance with --per-request-spec-decode-metrics."""
    counts = data.get("usage") or {}
    drafting = (data.get("metrics") or {}).get("speculative_decoding") or {}
    if not counts and not drafting:
        return None
    return {
        "num_input_tokens": counts.get("prompt_tokens"),
        "num_output_tokens": counts.get("completion_tokens"),
        "num_steps": drafting.get("num_spec_steps"),
        "total_draft_tokens": drafting.get("num_draft_tokens"),
        "total_accepted_draft_tokens": drafting.get("num_accepted_draft_tokens"),
        "acceptance_histogram": drafting.get("acceptance_histogram"),
    }


def _error_text(body: bytes) -> str:
    """Returns the message of an error as OpenAI writes it, else the beginning of what came."""
    try:
        error = parse_data(body)["error"]
        return to_sentence(str(error["message"] if isinstance(error, dict) else error))
    except (KeyError, RecursionError, TypeError, ValueError):
        return show(body.decode(errors="replace"))
