"""OpenAI's protocol in front of the ensemble, as an ASGI application."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from specpipe.errors import show
from specpipe.gateway.chat_schema import ChatRequest
from specpipe.gateway.completion_schema import CompletionRequest
from specpipe.gateway.endpoints import Endpoints
from specpipe.gateway.errors import ApiError, api_error, not_found
from specpipe.gateway.models import ServedModel
from specpipe.gateway.openapi import describe, request_body
from specpipe.gateway.tokenization import DetokenizeRequest, TokenizeRequest
from specpipe.gateway.upstream import Upstream
from specpipe.version import __version__

_ABSENT = {
    "/v1/responses": "ask /v1/chat/completions",
    "/v1/embeddings": "this model generates text alone",
}


def make_app(
    upstream: Upstream,
    served: ServedModel,
    *,
    is_lenient: bool = False,
    max_body_bytes: int | None = None,
    keep_alive_s: float = 10.0,
) -> FastAPI:
    """Returns the application.

    is_lenient      unknown fields are logged instead of refused
    max_body_bytes  of a request; None: four times what `messages` alone may have
    keep_alive_s    after which a stream that waits for its first chunk begins, and says so again
    """
    app = FastAPI(title="specpipe", version=__version__, docs_url=None, redoc_url=None)
    endpoints = Endpoints(
        upstream,
        served,
        is_lenient=is_lenient,
        max_body_bytes=max_body_bytes or 4 * served.limits.max_messages_bytes,
        keep_alive_s=keep_alive_s,
    )
    for path, endpoint, model in (
        ("/v1/completions", endpoints.completions, CompletionRequest),
        ("/v1/chat/completions", endpoints.chat_completions, ChatRequest),
        ("/tokenize", endpoints.tokenize, TokenizeRequest),
        ("/detokenize", endpoints.detokenize, DetokenizeRequest),
    ):
        app.add_api_route(
            path, endpoint, methods=["POST"], response_model=None, openapi_extra=request_body(model)
        )
    for path, answer in (
        ("/v1/models", endpoints.models),
        ("/v1/models/{name:path}", endpoints.model),
        ("/version", endpoints.version),
        ("/health", endpoints.health),
    ):
        app.add_api_route(path, answer, response_model=None)
        app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)
    app.add_exception_handler(ApiError, _failure)
    app.add_exception_handler(HTTPException, _http_failure)
    describe(app, (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest))
    return app


async def _failure(_: Request, error: Exception) -> Response:
    return api_error(error).response()


async def _http_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    absent = next((name for name in _ABSENT if path.startswith(name)), None)
    if absent is not None:
        return not_found(f"there is no {absent} here: {_ABSENT[absent]}").response()
    if error.status_code == 404:
        return not_found(f"there is no {show(path)} here").response()
    return ApiError(
        f"{show(path)} does not take {show(request.method)}",
        status=error.status_code,
        headers=error.headers or {},
    ).response()
