"""Failures as OpenAI's clients read them: a status, and one object that names the field."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi.responses import JSONResponse

from specpipe.errors import FAULT, RequestError, ServerError, SpecpipeError, to_sentence
from specpipe.gateway.chat_schema import ChatRequest
from specpipe.gateway.completion_schema import CompletionRequest
from specpipe.gateway.upstream import Busy

_LOGGER = logging.getLogger(__name__)

INVALID = "invalid_request_error"
_RETRY_UNWELL_S = 5  # in which a small pair's Triton is started again: a guess
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})

INPUT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "text_input": "prompt",
        "input_ids": "prompt",
        "stop_words": "stop",
        "logit_bias_ids": "logit_bias",
        "logit_bias_values": "logit_bias",
        "num_top_log_probs": "top_logprobs",
        "return_log_probs": "logprobs",
        "return_prompt_log_probs": "prompt_logprobs",
        "exclude_input_in_output": "echo",
    }
)
"""The fields of inputs of the ensemble, where these have another name."""

_FIELDS = frozenset((*ChatRequest.model_fields, *CompletionRequest.model_fields))
_FIRST_NAME = re.compile(r"([a-z_]+)((?:\[\d+\]|\.[a-z_]+)*)")


class ApiError(SpecpipeError):
    """What a client is answered instead of what it asked for.

    param    the field of the request that is at fault
    headers  of the response
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        type: str = INVALID,
        code: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = error_body(message, type=type, param=param, code=code)

    def response(self) -> JSONResponse:
        """Returns the error as a response."""
        return JSONResponse(self.body, status_code=self.status, headers=dict(self.headers))


def error_body(
    message: str, *, type: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def api_error(error: BaseException, names: Mapping[str, str] = INPUT_NAMES) -> ApiError:
    """Returns any failure of a request as a client is told it; the log has what it is not told.

    names  of the fields by which the client has set inputs of the ensemble
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return too_many(to_sentence(error), error.retry_after_s)
    if isinstance(error, RequestError):
        message, param = _in_its_words(to_sentence(error), names)
        return ApiError(message, param=param)
    if isinstance(error, ServerError):
        _LOGGER.error("a request failed: %s", to_sentence(error))
        headers = {"Retry-After": str(_RETRY_UNWELL_S)}
        return ApiError(to_sentence(error), status=503, type="server_error", headers=headers)
    _LOGGER.error("a request failed", exc_info=error)
    return ApiError(FAULT, status=500, type="server_error")


def too_many(message: str, retry_after_s: float) -> ApiError:
    """Returns what a client is told that has to wait; `Retry-After` is in whole seconds."""
    return ApiError(
        message,
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(max(1, math.ceil(retry_after_s)))},
    )


def too_large(max_bytes: int, headers: Mapping[str, str] = _NO_HEADERS) -> ApiError:
    """Returns what a client is told whose body has more bytes than that."""
    return ApiError(
        f"the body is too large; it may have {max_bytes} bytes",
        status=413,
        code="body_too_large",
        headers=headers,
    )


def not_found(message: str, *, code: str | None = None, param: str | None = None) -> ApiError:
    """Returns what a client is told of something that is not here."""
    return ApiError(message, status=404, code=code, param=param)


def _in_its_words(message: str, names: Mapping[str, str]) -> tuple[str, str | None]:
    """Returns a refusal and the field that it begins with, as those of the ensemble do."""
    match = _FIRST_NAME.match(message)
    if match is None:
        return message, None
    name, path = match.groups()
    field = names.get(name, name if name in _FIELDS else "")
    return (field or name) + message.removeprefix(name), field + path if field else None
