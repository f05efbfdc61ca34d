"""JSON from a client in an input of strings, checked before it is parsed."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import numpy as np

from specpipe.config.limits import ServedLimits
from specpipe.errors import RequestError, show

_MAX_DIGITS = 300  # below float's 1.8e308; Python itself reads 4300 (sys.int_info)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(name: str, data: bytes, limits: ServedLimits, *, expected: str) -> Any:
    """Returns the value of an input; `data` is UTF-8 of a bounded size.

    Raises RequestError with the input's name, and what was `expected` where it is no JSON, for what
    is too deep, too much, or no JSON by RFC 8259 that means one thing: NaN, a number without end, a
    key twice, half a surrogate pair.
    """
    _check_structure(name, data, limits)
    reader = _Reader(name)
    try:
        parsed = json.loads(
            data.decode(),
            object_pairs_hook=reader.read_object,
            parse_constant=reader.refuse_constant,
            parse_float=reader.read_float,
            parse_int=reader.read_int,
        )
    except ValueError as exc:
        raise RequestError(f"{name} is not JSON ({exc}): expected {expected}") from exc
    if _SURROGATE.search(data):
        _check_surrogates(name, parsed)
    return parsed


def _check_structure(name: str, data: bytes, limits: ServedLimits) -> None:
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
            f"{name} is nested {depth} deep; it may be {limits.max_json_depth} "
            "(serving.limits.max_json_depth)"
        )
    num_values = int(opens.sum() + (codes == ord(",")).sum())
    if num_values > limits.max_json_values:
        raise RequestError(
            f"{name} has {num_values} values; it may have {limits.max_json_values} "
            "(serving.limits.max_json_values)"
        )


class _Reader:
    """What the parser calls for a value that means one thing in JSON alone."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise RequestError(f"{self._name} has the key '{show(key)}' twice in one object")
            values[key] = value
        return values

    def refuse_constant(self, constant: str) -> NoReturn:
        raise RequestError(f"{self._name} has {constant}, which JSON does not have")

    def read_float(self, text: str) -> float:
        value = float(text)
        if math.isinf(value):
            raise RequestError(f"{self._name} has the number {show(text)}, which is too large")
        return value

    def read_int(self, text: str) -> int:
        if len(text) > _MAX_DIGITS:
            raise RequestError(
                f"{self._name} has a number of {len(text)} digits; it may have {_MAX_DIGITS}"
            )
        return int(text)


def _check_surrogates(name: str, parsed: Any) -> None:
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        half = show(exc.object[exc.start])
        raise RequestError(f"{name} has half a surrogate pair, {half}: send UTF-8") from exc
