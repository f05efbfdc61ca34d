"""The values of tensors, as NumPy arrays that Triton takes and gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specpipe.errors import RequestError, is_utf8, show
from specpipe.triton.serving.tensors import SIGNATURE, TensorSpec

LONGEST_ID = 64  # characters of a stream id, and of a signature

Tensors = Mapping[str, "np.ndarray[Any, Any]"]


def as_array(tensor: TensorSpec, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Returns the values in the tensor's dtype and shape, the batch dimension of 1 included."""
    shape = (1,) * len(tensor.dims) + (len(values),)
    return np.array(values, dtype=tensor.numpy_dtype).reshape(shape)


def as_rows(tensor: TensorSpec, rows: Sequence[Sequence[Any]]) -> np.ndarray[Any, Any]:
    """Returns rows of equal length in the tensor's dtype, the batch dimension of 1 included."""
    shape = (1, len(rows), len(rows[0]) if rows else 0)
    return np.array(rows, dtype=tensor.numpy_dtype).reshape(shape)


_EXPECTED = {
    "STRING": "a text in UTF-8",
    "BOOL": "true or false",
    "INT32": "a whole number from -2147483648 to 2147483647",
    "UINT64": "a whole number from 0 to 18446744073709551615",
    "FP16": "a number of at most 65504",
    "FP32": "a number of at most 3.4e38",
}


def check_values(tensor: TensorSpec, value: Any) -> None:
    """Raises RequestError for a Python value, or a list of them, that is not of a tensor's type.

    NumPy and Triton would convert some, wrap others round, and refuse the rest without a name.
    """
    listed = value if isinstance(value, (list, tuple)) else [value]
    if tensor.dims == (1,) and len(listed) != 1:
        raise RequestError(f"{tensor.name} has {len(listed)} values: it takes one")
    for element in listed:
        if not _is_of_type(element, tensor):
            shown = f"'{show(element)}'" if isinstance(element, str) else show(element)
            raise RequestError(f"{tensor.name} is {shown}; it must be {_EXPECTED[tensor.dtype]}")


def _is_of_type(element: Any, tensor: TensorSpec) -> bool:
    if tensor.dtype == "STRING":
        return isinstance(element, str) and is_utf8(element)
    dtype, is_truth = tensor.numpy_dtype, isinstance(element, bool)
    if is_truth or tensor.dtype == "BOOL":
        return is_truth and tensor.dtype == "BOOL"
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        return isinstance(element, int) and limits.min <= element <= limits.max
    if isinstance(element, float) and not math.isfinite(element):
        return True  # refused where the value is read, with what it means there
    return isinstance(element, (int, float)) and abs(element) <= float(np.finfo(dtype).max)


def values_of(tensor: TensorSpec, tensors: Tensors) -> list[Any]:
    """Returns a tensor's elements as Python values."""
    array = array_of(tensor, tensors)
    if tensor.dtype == "STRING":
        return [decode_utf8(tensor, value) for value in array.reshape(-1)]
    if array.dtype == np.float32:
        # The shortest decimal that means this float32: a temperature of 0.7 is 0.7 again, so that a
        # request draws the same tokens through Triton as in process.
        return [float(str(value)) for value in array.reshape(-1)]
    values: list[Any] = array.reshape(-1).tolist()
    return values


def array_of(tensor: TensorSpec, tensors: Tensors) -> np.ndarray[Any, Any]:
    """Returns a tensor that must be there, in its dtype."""
    array = tensors.get(tensor.name)
    if array is None:
        raise RequestError(f"{tensor.name} is missing")
    if array.dtype != tensor.numpy_dtype:
        raise RequestError(f"{tensor.name} is {array.dtype}; it must be {tensor.dtype}")
    return array


def single_of(tensor: TensorSpec, tensors: Tensors) -> bytes:
    """Returns the only element of a tensor of strings."""
    array = array_of(tensor, tensors)
    if array.size != 1:
        raise RequestError(f"{tensor.name} has {array.size} values: it takes one")
    value = array.reshape(-1)[0]
    return value if isinstance(value, bytes) else str(value).encode()


def signature_of(tensors: Tensors) -> bytes:
    """Returns the signature of a request; b"" where there is none, or none that could be one."""
    signature = single_of(SIGNATURE, tensors) if SIGNATURE.name in tensors else b""
    return signature if len(signature) <= LONGEST_ID else b""


def decode_utf8(tensor: TensorSpec, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise RequestError(f"{tensor.name} is not UTF-8: {exc}") from exc
