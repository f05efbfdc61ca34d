"""What the host hands to the device without waiting for what that does before."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(numbers: Tensor, device: torch.device) -> Tensor:
    """Returns numbers that a GPU copies when it comes to it; their memory is kept until then."""
    return numbers.pin_memory() if device.type == "cuda" else numbers
