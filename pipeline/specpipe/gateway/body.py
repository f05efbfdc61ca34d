"""The body of a request: read up to a limit, parsed as strict JSON, held against its model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from specpipe.config.limits import ServedLimits
from specpipe.errors import RequestError, show, to_sentence
from specpipe.gateway.errors import ApiError, too_large
from specpipe.triton.serving import strict_json

_LOGGER = logging.getLogger(__name__)

_EXPECTED = "a JSON object"
_FRAME_DEPTH = 8
"""How much deeper a body may be than each of its fields, which the ensemble checks by itself."""

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Returns the body; raises ApiError where it is packed, or, with both numbers, as soon as it is
    too much.
    """
    encoding = request.headers.get("content-encoding", "")
    if encoding.lower() not in ("", "identity"):
        raise ApiError(
            f"content-encoding is {show(encoding)}, which is not unpacked here: send the body as "
            "it is",
            status=415,
            code="unsupported_encoding",
        )
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told[:20]) > max_bytes:
        raise too_large(max_bytes)
    body = bytearray()
    async for block in request.stream():
        body += block
        if len(body) > max_bytes:
            raise too_large(max_bytes)
    return bytes(body)


def parse_body(data: bytes, limits: ServedLimits) -> dict[str, Any]:
    """Returns the object that a body is; raises ApiError for what is none, or too deep.

    How many values it may have follows from its bytes alone: prompts are lists of token ids.
    """
    relaxed = {
        "max_json_depth": limits.max_json_depth + _FRAME_DEPTH,
        "max_json_values": max(limits.max_json_values, len(data)),
    }
    try:
        data.decode()
        body = strict_json.parse(
            "the body", data, limits.model_copy(update=relaxed), expected=_EXPECTED
        )
    except (RequestError, UnicodeDecodeError) as exc:
        message = str(exc) if isinstance(exc, RequestError) else f"the body is not UTF-8: {exc}"
        raise ApiError(message, code="invalid_json") from exc
    if not isinstance(body, dict):
        raise ApiError(f"the body must be {_EXPECTED}", code="invalid_json")
    return body


def validate(model: type[Model], body: dict[str, Any], *, is_lenient: bool) -> Model:
    """Returns the body as its model; raises ApiError that names the field at fault.

    is_lenient  fields that nobody knows are logged and left out, at any depth
    """
    try:
        return model.model_validate(body)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False)
        unknown = [error for error in errors if error["type"] == "extra_forbidden"]
        if not is_lenient or not unknown:
            raise _refusal(errors, body) from exc
    for error in unknown:
        _LOGGER.warning("a field that nobody knows is left out: %s", show(field_of(error, body)))
        _remove(error, body)
    return validate(model, body, is_lenient=True)


def field_of(error: Any, body: Any) -> str:
    """Returns where in the body pydantic found a fault, as `messages[0].content`."""
    path = ""
    for key in _path(error, body):
        path += f"[{key}]" if isinstance(key, int) else f".{key}" if path else key
    return path


def _path(error: Any, body: Any) -> list[str | int]:
    """Returns the keys of a fault; pydantic puts among them which member of a union it tried."""
    path: list[str | int] = []
    value = body
    for key in error["loc"]:
        is_key = isinstance(value, dict) and key in value
        is_index = isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value)
        if is_key or is_index:
            path.append(key)
            value = value[key]
    return [*path, error["loc"][-1]] if error["type"] == "missing" else path


def _remove(error: Any, body: Any) -> None:
    *path, last = _path(error, body)
    for key in path:
        body = body[key]
    body.pop(last, None)


def _refusal(errors: Sequence[Any], body: dict[str, Any]) -> ApiError:
    error = errors[0]
    field = show(field_of(error, body))
    if error["type"] == "extra_forbidden":
        message = f"unknown field '{field}': leave it out"
        return ApiError(message, param=field, code="unknown_parameter")
    if error["type"] == "missing":
        return ApiError(f"{field} is missing", param=field, code="missing_required_parameter")
    # Of a value that may be of several types each one says why it is none of them.
    reasons = [_reason(other) for other in errors if show(field_of(other, body)) == field]
    reason = to_sentence(" or: ".join(dict.fromkeys(reasons)))
    if field:
        return ApiError(f"{field}: {reason}", param=field)
    first = reason.split(" ", 1)[0]  # a rule across fields begins with the one at fault
    return ApiError(reason, param=first if first in body else None)


def _reason(error: Any) -> str:
    if error["type"] == "model_type":
        return "it should be an object"
    return str(error["msg"]).removeprefix("Value error, ")
