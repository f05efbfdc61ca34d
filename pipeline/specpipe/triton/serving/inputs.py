"""The inputs of one request as Python values, each of a bounded size."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specpipe.config.limits import ServedLimits
from specpipe.errors import RequestError, show
from specpipe.triton.serving.request_sizes import check_bytes, check_sizes
from specpipe.triton.serving.tensor_values import Tensors, values_of
from specpipe.triton.serving.tensors import INPUTS_BY_NAME, Input

_LONGEST_NAME = max(len(name) for name in INPUTS_BY_NAME)


class Inputs:
    """What a client sent, by name; those that have no effect here are left out."""

    def __init__(self, tensors: Tensors, limits: ServedLimits) -> None:
        """Raises RequestError for what is too large, before anything is done with it."""
        self._values: dict[str, list[Any]] = {}
        for name, array in tensors.items():
            tensor = INPUTS_BY_NAME[name]
            if tensor.neutral is not None:
                _check_neutral(tensor, array, limits)
                continue
            check_sizes(tensor, array, limits)
            self._values[name] = values_of(tensor, tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def one(self, name: str, default: Any = None) -> Any:
        """Returns the value of an input that takes one."""
        return self._values[name][0] if name in self._values else default

    def json(self, name: str) -> bytes:
        """Returns the text of an input that is to be parsed, as UTF-8."""
        text: str = self._values[name][0]
        return text.encode()

    def many(self, name: str) -> Sequence[Any]:
        """Returns the values of an input that takes a list; none where it was not sent."""
        return self._values.get(name, ())


def input_tensor(name: str) -> Input:
    """Returns an input of the ensemble by name."""
    check_known((name,))
    return INPUTS_BY_NAME[name]


def check_known(names: Iterable[str]) -> None:
    """Raises RequestError for a name that is no input of the ensemble; it names the nearest one."""
    for name in names:
        if name not in INPUTS_BY_NAME:
            # Looking for one that is near takes time quadratic in the name.
            is_short = len(name) <= 2 * _LONGEST_NAME
            nearest = difflib.get_close_matches(name, INPUTS_BY_NAME, n=1) if is_short else []
            advice = f"did you mean '{nearest[0]}'?" if nearest else "leave it out"
            raise RequestError(f"unknown request parameter '{show(name)}': {advice}")


def check_parameters(text: str, limits: ServedLimits) -> None:
    """Refuses request parameters: as such Triton delivers a mistyped key of HTTP `generate`.

    It delivers `id` so, too, which is its own and changes nothing.
    """
    num_bytes = len(text.encode())
    check_bytes("the request parameters have", num_bytes, "max_parameters_bytes", limits)
    try:
        parameters = json.loads(text or "{}")
    except (ValueError, RecursionError) as exc:
        raise RequestError("the request parameters are no JSON that can be read") from exc
    names = [name for name in parameters if name != "id"]
    check_known(names)
    if names:
        raise RequestError(f"{names[0]} is an input: send it beside text_input, not as a parameter")


def _check_neutral(tensor: Input, array: np.ndarray[Any, Any], limits: ServedLimits) -> None:
    """Refuses an input without effect here, unless it asks for nothing."""
    assert tensor.neutral is not None
    # Strings as Triton delivers them, too.
    encoded = (value.encode() for value in tensor.neutral if isinstance(value, str))
    neutral = (*tensor.neutral, *encoded)
    is_small = array.size <= limits.max_words
    if not is_small or any(value not in neutral for value in array.reshape(-1).tolist()):
        allowed = " or ".join(str(value) for value in tensor.neutral if value != "")
        advice = f"send {allowed} or leave it out" if allowed else "leave it out"
        raise RequestError(f"{tensor.name} is not supported: {advice}")
