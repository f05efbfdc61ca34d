"""Raw elements as torch's tensors, and back: the same bits, in the dtype that the file names."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specpipe.checkpoints.checkpoint import RawArray, TensorInfo, read_blocks

TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
}
"""By safetensors' names."""

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def as_tensor(block: RawArray, dtype: str) -> Tensor:
    """Returns raw elements as a tensor of their dtype; it shares their memory."""
    signed = np.ascontiguousarray(block).view(block.dtype.str.replace("u", "i"))
    return torch.from_numpy(signed).view(TORCH_DTYPES[dtype])


def as_raw(tensor: Tensor) -> RawArray:
    """Returns a tensor's elements as unsigned integers of their width."""
    itemsize = tensor.dtype.itemsize
    signed = tensor.contiguous().view(_SIGNED[itemsize]).numpy()
    array: RawArray = signed.view(f"<u{itemsize}")
    return array


def read_small(info: TensorInfo) -> Tensor:
    """Reads a small tensor whole; a scalar as [1]."""
    if not info.shape:
        info = TensorInfo(info.dtype, (1,), info.file, info.offset)
    return torch.cat([as_tensor(block, info.dtype).clone() for block in read_blocks(info)])
