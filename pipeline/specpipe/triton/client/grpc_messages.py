"""Requests and responses of Triton's gRPC protocol, to and from values by tensor name.

tritonclient's InferInput and InferResult do it through NumPy, at some 20 µs a tensor, which a door
that passes on thousands of chunks a second has no time for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from specpipe.errors import ServerError
from specpipe.triton import serving
from specpipe.triton.serving.tensors import TensorSpec

# By Triton's names of the types (its protocol, "Tensor Data Types"); contents are little-endian.
_DTYPES = {"BOOL": "?", "INT32": "<i4", "INT64": "<i8", "UINT64": "<u8", "FP32": "<f4"}


def write_request(model: str, inputs: Mapping[str, Any], *, request_id: str = "") -> Any:
    """Returns the message of a request for the ensemble, inputs by name."""
    listed: dict[TensorSpec, Sequence[Any]] = {
        serving.input_tensor(name): value if isinstance(value, (list, tuple)) else [value]
        for name, value in inputs.items()
    }
    return write_tensors(model, listed, request_id=request_id)


def write_tensors(
    model: str, tensors: Mapping[TensorSpec, Sequence[Any]], *, request_id: str = ""
) -> Any:
    """Returns the message of a request for any model; even an empty last response is sent."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for tensor, elements in tensors.items():
        is_text = tensor.dtype == "STRING"
        array = serving.as_array(tensor, elements)
        request.inputs.add(
            name=tensor.name, datatype="BYTES" if is_text else tensor.dtype, shape=array.shape
        )
        content = b"".join(map(_with_length, elements)) if is_text else array.tobytes()
        request.raw_input_contents.append(content)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def is_final(response: Any) -> bool:
    """Returns whether a response is the last of its request."""
    return bool(response.parameters["triton_final_response"].bool_param)


def read_values(response: Any) -> dict[str, Any]:
    """Returns the outputs of a response by name: a list of elements, or the only one.

    Raises ServerError for what is none of the ensemble's.
    """
    values: dict[str, Any] = {}
    try:
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
            elements: list[Any] = (
                _read_texts(content)
                if output.datatype == "BYTES"
                else np.frombuffer(content, _DTYPES[output.datatype]).tolist()
            )
            values[output.name] = elements[0] if len(elements) == 1 else elements
    except (KeyError, TypeError, ValueError) as exc:
        raise ServerError("a response has outputs that cannot be read") from exc
    return values


def _with_length(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(4, "little") + encoded


def _read_texts(content: bytes) -> list[str]:
    texts = []
    start = 0
    while start < len(content):
        end = start + 4 + int.from_bytes(content[start : start + 4], "little")
        texts.append(content[start + 4 : end].decode(errors="replace"))
        start = end
    return texts
