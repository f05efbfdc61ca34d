"""How the models that answer each request once do it: a fault of one request is its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specpipe.errors import FAULT, SpecpipeError, to_sentence

_LOGGER = logging.getLogger(__name__)


def answer_each(
    pb_utils: Any,
    requests: Sequence[Any],
    respond: Callable[[Any], Mapping[str, np.ndarray[Any, Any]]],
) -> list[Any]:
    """Returns a response for each request; pb_utils is the module `triton_python_backend_utils`."""
    return [_answer(pb_utils, request, respond) for request in requests]


def _answer(
    pb_utils: Any, request: Any, respond: Callable[[Any], Mapping[str, np.ndarray[Any, Any]]]
) -> Any:
    try:
        tensors = [pb_utils.Tensor(name, array) for name, array in respond(request).items()]
        return pb_utils.InferenceResponse(tensors)
    except SpecpipeError as exc:
        error = pb_utils.TritonError(to_sentence(exc), pb_utils.TritonError.INVALID_ARG)
    except Exception:
        # Not to the client: a traceback shows paths of this machine.
        _LOGGER.exception("a request failed")
        error = pb_utils.TritonError(FAULT, pb_utils.TritonError.INTERNAL)
    return pb_utils.InferenceResponse(error=error)
