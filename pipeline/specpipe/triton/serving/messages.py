"""The input `messages`: JSON from a client, checked before it is parsed."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import numpy as np

from specpipe.config.limits import ServedLimits
from specpipe.errors import RequestError, show
from specpipe.text.chat_messages import check_messages

_EXPECTED = 'expected a JSON array such as [{"role": "user", "content": "Hello"}]'
_MAX_DIGITS = 300  # below float's 1.8e308; Python itself reads 4300 (sys.int_info)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_messages(data: bytes, limits: ServedLimits) -> list[dict[str, Any]]:
    """Returns the messages as templates take them; `data` is UTF-8 of a bounded size.

    Raises RequestError for what is too deep, too much, or no JSON by RFC 8259 that means one thing:
    NaN, a number without end, a key twice, half a surrogate pair.
    """
    _check_structure(data, limits)
    try:
        parsed = json.loads(
            data.decode(),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except ValueError as exc:
        raise RequestError(f"messages is not JSON ({exc}): {_EXPECTED}") from exc
    if isinstance(parsed, list) and len(parsed) > limits.max_messages:
        raise RequestError(
            f"messages has {len(parsed)} messages; it may have {limits.max_messages} "
            "(serving.limits.max_messages)"
        )
    if _SURROGATE.search(data):
        _check_surrogates(parsed)
    return check_messages(parsed)


def _check_structure(data: bytes, limits: ServedLimits) -> None:
    """Counts brackets and commas outside strings: Python's parser calls itself for each bracket."""
    without_escapes = data.replace(rb"\\", b"").replace(rb"\"", b"")
    codes = np.frombuffer(without_escapes, np.uint8)
    # Whether a quote is open is all that is asked of the sum, so that it may overflow.
    codes = codes[np.cumsum(codes == ord('"'), dtype=np.uint8) % 2 == 0]
    opens = (codes == ord("[")) | (codes == ord("{"))
    closes = (codes == ord("]")) | (codes == ord("}"))
    steps = opens.astype(np.int8) - closes.astype(np.int8)
    depth = int(np.cumsum(steps, dtype=np.int32).max(initial=0))
    if depth > limits.max_json_depth:
        raise RequestError(
            f"messages is nested {depth} deep; it may be {limits.max_json_depth} "
            "(serving.limits.max_json_depth)"
        )
    num_values = int(opens.sum() + (codes == ord(",")).sum())
    if num_values > limits.max_json_values:
        raise RequestError(
            f"messages has {num_values} values; it may have {limits.max_json_values} "
            "(serving.limits.max_json_values)"
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise RequestError(f"messages has the key '{show(key)}' twice in one object")
        values[key] = value
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"messages has {name}, which JSON does not have")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise RequestError(f"messages has the number {show(text)}, which is too large")
    return value


def _int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise RequestError(
            f"messages has a number of {len(text)} digits; it may have {_MAX_DIGITS}"
        )
    return int(text)


def _check_surrogates(parsed: Any) -> None:
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        half = show(exc.object[exc.start])
        raise RequestError(f"messages has half a surrogate pair, {half}: send UTF-8") from exc
