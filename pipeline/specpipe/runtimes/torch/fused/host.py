"""What the host hands to the device without waiting for what that does before."""

from __future__ import annotations

import torch
from torch import Tensor

_UNDER_WAY = 8
"""Pieces of one size that a GPU may not have copied yet: a guess."""


def pinned(numbers: Tensor, device: torch.device) -> Tensor:
    """Returns numbers that a GPU copies when it comes to it; their memory is kept until then."""
    return numbers.pin_memory() if device.type == "cuda" else numbers


def reserve_pinned(most_bytes: int, device: torch.device) -> None:
    """Has torch take memory for what is handed over later, in pieces of up to so many bytes.

    To take it makes a GPU wait (CUDA C++ Programming Guide, "Implicit Synchronization"). torch
    keeps what it has taken, by powers of two.
    """
    for power in range(most_bytes.bit_length() + 1):
        size = 1 << power
        taken = [pinned(torch.empty(size, dtype=torch.uint8), device) for _ in range(_UNDER_WAY)]
        del taken  # all at once, or it would be one that is taken again and again
