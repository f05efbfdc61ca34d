"""Rotary position embeddings: the frequencies of each scaling, and the table that a forward reads.

An engine holds the two channels that one rotation mixes next to each other (layout.py), so a
rotation is a complex number of length 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specpipe.errors import CheckpointError


@dataclass(frozen=True)
class Rotary:
    """What a unified config says about rope: base, head size and scaling.

    scaling  `rotary_scaling`, or None for plain rope; the kinds are default, linear, dynamic and
             llama3, computed as transformers 5 does in modeling_rope_utils.py
    """

    head_size: int
    base: float
    scaling: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("default", "linear", "dynamic", "llama3"):
            raise CheckpointError(
                f"rope type '{self.kind}' is not supported; supported: default, linear, dynamic, "
                "llama3"
            )

    @property
    def kind(self) -> str:
        return "default" if self.scaling is None else str(self.scaling["rope_type"])

    def depends_on(self, prompt_length: int) -> bool:
        """True where a prompt of this length turns otherwise than a short one."""
        return self.kind == "dynamic" and prompt_length > self._number(
            "original_max_position_embeddings"
        )

    def table(self, num_positions: int, *, prompt_length: int = 0) -> Tensor:
        """Returns the rotations of the first positions, [num_positions, 1, D / 2] complex64.

        With dynamic scaling the prompt's positions turn as in a text of `prompt_length` tokens, a
        later position p as in one of p + 1. So the result does not depend on how the tokens are
        divided into forwards, and is transformers' own when it generates with its cache.
        """
        positions = torch.arange(num_positions)
        frequencies = self.inverse_frequencies(torch.clamp(positions + 1, min=prompt_length))
        angles = positions.float().unsqueeze(-1) * frequencies
        return torch.complex(angles.cos(), angles.sin()).unsqueeze(1)

    def inverse_frequencies(self, lengths: Tensor) -> Tensor:
        """Returns the radians per position, float32, for texts of these lengths.

        [len(lengths), D / 2] with dynamic scaling, else [1, D / 2]: the lengths do not matter.
        """
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size
        base: float | Tensor = self.base
        if self.kind == "dynamic":
            base = self._dynamic_bases(lengths)
        frequencies = (1.0 / base**exponents).reshape(-1, self.head_size // 2)
        if self.kind == "linear":
            return frequencies / self._number("factor")
        if self.kind == "llama3":
            return self._llama3(frequencies)
        return frequencies

    def _dynamic_bases(self, lengths: Tensor) -> Tensor:
        factor, original = self._number("factor"), self._number("original_max_position_embeddings")
        stretch = factor * lengths.clamp(min=original) / original - (factor - 1)
        bases = self.base * stretch ** (self.head_size / (self.head_size - 2))
        return bases.unsqueeze(-1)

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
        factor, original = self._number("factor"), self._number("original_max_position_embeddings")
        low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
        wavelengths = 2 * math.pi / frequencies
        blend = (original / wavelengths - low) / (high - low)
        blended = (1 - blend) * frequencies / factor + blend * frequencies
        scaled = torch.where(wavelengths > original / low, frequencies / factor, blended)
        return torch.where(wavelengths < original / high, frequencies, scaled)

    def _number(self, key: str) -> float:
        assert self.scaling is not None
        return float(self.scaling[key])
