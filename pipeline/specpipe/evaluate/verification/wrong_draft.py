"""The Triton model `draft` of a repository whose draft is always wrong (repositories.py).

It takes the requests that TensorRT-LLM's backend would get and answers with tokens that have
nothing to do with the text, so that the target takes nearly every one of them back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from specpipe.evaluate.verification.repositories import VOCAB_SIZE

_STRIDE = 7919  # a prime: neighbours get ids that are far apart


class TritonPythonModel:
    """What Triton loads; its answers come whole, as those of the model that it stands for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._vocab_size = int(parameters[VOCAB_SIZE]["string_value"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        arrays = {} if "stop" in tensors else answer(tensors, self._vocab_size)
        return pb_utils.InferenceResponse([pb_utils.Tensor(n, a) for n, a in arrays.items()])


def answer(tensors: Mapping[str, npt.NDArray[Any]], vocab_size: int) -> dict[str, npt.NDArray[Any]]:
    """Returns as many tokens as are asked for."""
    num_tokens = int(tensors["request_output_len"].reshape(-1)[0])
    position = int(tensors["input_lengths"].reshape(-1)[0])
    token_ids = (position + np.arange(num_tokens)) * _STRIDE % vocab_size
    return {
        "output_ids": token_ids.astype(np.int32).reshape(1, 1, num_tokens),
        "sequence_length": np.array([[num_tokens]], np.int32),
    }
