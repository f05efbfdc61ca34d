"""The values of weights, as raw elements: rounded to a dtype, and refused where no model has them.

NaN and infinity are refused, and what becomes infinite in the dtype that it is rounded to. Every
refusal names the tensor, the place in it and the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from specpipe.checkpoints.checkpoint import RawArray
from specpipe.errors import CheckpointError

GREATEST = {"F32": 3.4028235e38, "BF16": 3.3895314e38, "F16": 65504.0, "F8_E4M3": 448.0}
"""The greatest number of each dtype."""

_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "fp8"}

_FIRST_NOT_FINITE = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00, "F8_E4M3": 0x7F}
"""The bits of infinity, above which are those of NaN; e4m3 has one NaN and no infinity."""

Name = Callable[[tuple[int, ...]], str]
"""Writes where an element is that a block has at this index."""


def in_tensor(where: str, first_row: int = 0) -> Name:
    """Names elements of a block of rows as those of the tensor that it was read from."""

    def name(index: tuple[int, ...]) -> str:
        place = [first_row + index[0], *index[1:]] if index else []
        return f"{where}{place}" if place else where

    return name


def check_finite(block: RawArray, dtype: str, name: Name) -> None:
    """Refuses NaN and infinity, which no integer is; reads the block twice and copies nothing."""
    index = _first_not_finite(block, dtype)
    if index is not None:
        value = float(to_float32(block[index].reshape(1), dtype)[0])
        raise CheckpointError(
            f"{name(index)} is {value:g}, which no weight can be: the checkpoint is damaged; "
            "download it again, or use another one"
        )


def rounded(block: RawArray, dtype: str, to_dtype: str, name: Name, *, cure: str) -> RawArray:
    """Returns a block in another dtype, rounded to nearest, ties to even, as transformers does.

    cure  what to do about a number that this one cannot hold
    """
    check_finite(block, dtype, name)
    if dtype == to_dtype:
        return block
    values = to_float32(block, dtype)
    converted = from_float32(values, to_dtype)
    index = _first_not_finite(converted, to_dtype)
    if index is not None:
        raise CheckpointError(
            f"{name(index)} is {float(values[index]):.8g}, but {_DTYPE_NAMES[to_dtype]} holds "
            f"{GREATEST[to_dtype]:.8g} at most; {cure}"
        )
    return converted


def to_float32(elements: RawArray, dtype: str) -> npt.NDArray[np.float32]:
    """Returns the numbers of raw elements; of e4m3 what is not finite is NaN, all else is 0."""
    if dtype == "F32":
        return elements.view(np.float32)
    if dtype == "F16":
        return elements.view(np.float16).astype(np.float32)
    if dtype == "F8_E4M3":
        return np.where(elements & 0x7F == 0x7F, np.float32("nan"), np.float32(0))
    return (elements.astype(np.uint32) << 16).view(np.float32)


def from_float32(values: npt.NDArray[np.float32], dtype: str) -> RawArray:
    """Rounds finite numbers; what is beyond the dtype becomes infinite."""
    if dtype == "F32":
        return values.view(np.uint32)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    # Adding just under half of the last place kept carries upwards only where it should.
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def _first_not_finite(block: RawArray, dtype: str) -> tuple[int, ...] | None:
    """Returns where the first element is that is NaN or infinite.

    Of bits with the sign first, the greatest as signed integer is the greatest positive number and
    the greatest as unsigned one the farthest negative.
    """
    bits = _FIRST_NOT_FINITE.get(dtype)
    if bits is None or not block.size:
        return None
    sign = 1 << 8 * block.itemsize - 1
    signed: npt.NDArray[Any] = block.view(block.dtype.str.replace("u", "i"))
    if signed.max() < bits and block.max() < sign | bits:
        return None
    index = np.argwhere((block & np.asarray(sign - 1, block.dtype)) >= bits)[0]
    return tuple(index.tolist())
