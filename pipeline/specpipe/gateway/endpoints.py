"""What each path does with a request."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from specpipe.gateway.answers import ClientGone, answers, collected, unless_gone
from specpipe.gateway.body import parse_body, read_body, validate
from specpipe.gateway.chat import ChatWriter
from specpipe.gateway.chat_inputs import chat_asks, template_kwargs
from specpipe.gateway.chat_schema import ChatRequest
from specpipe.gateway.completion_schema import CompletionRequest
from specpipe.gateway.completions import CompletionWriter, completion_asks
from specpipe.gateway.errors import INPUT_NAMES, ApiError, api_error
from specpipe.gateway.guide_inputs import guide_field
from specpipe.gateway.inputs import Ask
from specpipe.gateway.message_parsers import MessageParsers
from specpipe.gateway.models import ServedModel
from specpipe.gateway.parameters import Named, Parameters
from specpipe.gateway.response import Head
from specpipe.gateway.streaming import EventStream, Writer
from specpipe.gateway.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
)
from specpipe.gateway.upstream import Upstream
from specpipe.gateway.usage import Usage
from specpipe.triton.client.completion import Completion
from specpipe.version import __version__

_GONE = 499  # nginx's status; nobody reads it

Body = TypeVar("Body", bound=Named)
Endpoint = Callable[[Any, Request], Coroutine[Any, Any, Response]]


class _AnswerWriter(Writer, Protocol):
    usage: Usage

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]: ...


def _failures_told(endpoint: Endpoint) -> Endpoint:
    """Turns every failure into a response, so that the traceback of a bug is logged once."""

    @wraps(endpoint)
    async def told(self: Any, request: Request) -> Response:
        try:
            return await endpoint(self, request)
        except ClientGone:
            return Response(status_code=_GONE)
        except Exception as exc:
            return api_error(exc).response()

    return told


class Endpoints:
    """The paths of one model behind one door."""

    def __init__(
        self,
        upstream: Upstream,
        served: ServedModel,
        *,
        is_lenient: bool,
        max_body_bytes: int,
        keep_alive_s: float,
    ) -> None:
        self._upstream, self._served, self._is_lenient = upstream, served, is_lenient
        self._parsers = MessageParsers(served)
        self._max_body_bytes, self._keep_alive_s = max_body_bytes, keep_alive_s

    @_failures_told
    async def completions(self, request: Request) -> Response:
        """Goes on from a prompt."""
        body = await self._body(request, CompletionRequest)
        asks = await completion_asks(body, self._served)
        head = self._head(request, body, "text_completion", "cmpl")
        return await self._respond(
            request, body, asks, CompletionWriter(body, asks, self._served, head)
        )

    @_failures_told
    async def chat_completions(self, request: Request) -> Response:
        """Answers the last message of a conversation."""
        body = await self._body(request, ChatRequest)
        is_parsed = self._parsers.is_needed(body)
        shows_special = is_parsed and self._served.format.needs_special_tokens
        asks = chat_asks(body, self._served, shows_special=shows_special)
        head = self._head(request, body, "chat.completion", "chatcmpl")
        parsers = await self._parsers.parsers(body, template_kwargs(body))
        return await self._respond(
            request, body, asks, ChatWriter(body, self._served, head, parsers)
        )

    @_failures_told
    async def tokenize(self, request: Request) -> Response:
        """Returns the token ids of a text or a conversation."""
        body = await self._body(request, TokenizeRequest)
        return JSONResponse(await tokenize(body, self._served))

    @_failures_told
    async def detokenize(self, request: Request) -> Response:
        """Returns the text of token ids."""
        body = await self._body(request, DetokenizeRequest)
        return JSONResponse(await detokenize(body, self._served))

    async def models(self) -> Response:
        """Lists the model, by each of its names."""
        data = [self._served.to_json(name) for name in self._served.names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, name: str) -> Response:
        """Describes the model of that name."""
        self._served.check_name(name)
        return JSONResponse(self._served.to_json(name))

    async def version(self) -> Response:
        """Returns the version of specpipe."""
        return JSONResponse({"version": __version__})

    async def health(self) -> Response:
        """Returns 200 where a request would be answered now."""
        if not await self._upstream.is_ready():
            raise ApiError("no server answers", status=503, type="server_error")
        return JSONResponse({})

    async def _body(self, request: Request, model: type[Body]) -> Body:
        data = await read_body(request, self._max_body_bytes)
        body = validate(model, parse_body(data, self._served.limits), is_lenient=self._is_lenient)
        self._served.check_name(body.model)
        return body

    def _head(self, request: Request, body: Parameters, kind: str, prefix: str) -> Head:
        model = body.model or self._served.name
        return Head(request, body, kind=kind, prefix=prefix, model=model)

    async def _respond(
        self, request: Request, body: Parameters, asks: Sequence[Ask], writer: _AnswerWriter
    ) -> Response:
        sticky_key = body.prompt_cache_key or request.headers.get("x-session-id") or body.user or ""
        arriving = answers(self._upstream, asks, sticky_key=sticky_key)
        told = partial(api_error, names=_names(body))

        def count_tokens() -> None:
            if (count := request.scope.get("state", {}).get("count_tokens")) is not None:
                count(*writer.usage.counts)

        if body.stream:
            return EventStream(
                arriving,
                writer,
                keep_alive_s=self._keep_alive_s,
                told=told,
                when_over=count_tokens,
            )
        try:
            completions = await unless_gone(request.receive, collected(arriving, len(asks)))
        except ClientGone:
            raise
        except Exception as exc:
            raise told(exc) from exc
        response = JSONResponse(writer.whole(completions))
        count_tokens()
        return response


def _names(body: Parameters) -> dict[str, str]:
    """Returns the fields that inputs of the ensemble come from, where their names differ."""
    names = {**INPUT_NAMES, "guided_decoding_guide": guide_field(body) or "tools"}
    if isinstance(body, CompletionRequest):
        names["num_top_log_probs"] = "logprobs"
    elif body.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    return names
