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

_ORIGINAL = "original_max_position_embeddings"

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rotary:
    """What a unified config says about rope.

    head_size  D: the channels of a head
    size       how many of them are turned, the first ones
    scaling    `rotary_scaling`, or None for plain rope; computed as transformers 5 does in
               modeling_rope_utils.py
    """

    head_size: int
    size: int
    base: float
    scaling: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_TYPES:
            raise CheckpointError(
                f"rope type '{self.kind}' is not supported; supported: {', '.join(ROPE_TYPES)}"
            )

    @property
    def kind(self) -> str:
        return "default" if self.scaling is None else str(self.scaling["rope_type"])

    def text_length(self, *, prompt_length: int, max_tokens: int) -> int:
        """Returns the `text_length` of `table` for a sequence; 0 for every short one.

        max_tokens  what the sequence may grow to, prompt included

        transformers looks at how long the text is in each forward, so that the same token turns
        otherwise in another chunk. Here a sequence is judged once, when it begins:

        dynamic   by its prompt; later positions by their own. That is what transformers does
                  when it generates with its cache.
        longrope  by `max_tokens`, since keys turned by the short factors and queries turned by the
                  long ones do not fit together: transformers throws its cache away where a text
                  outgrows the original length, and begins again with the long factors. A sequence
                  that stays within that length, or has a longer prompt, is as in transformers; one
                  that may grow beyond it has the long factors from the start.
        """
        if self.kind not in ("dynamic", "longrope"):
            return 0
        original = int(self._number(_ORIGINAL))
        if self.kind == "dynamic":
            return prompt_length if prompt_length > original else 0
        return original + 1 if max_tokens > original else 0  # beyond it all lengths are alike

    def table(self, num_positions: int, *, text_length: int = 0) -> Tensor:
        """Returns the rotations of the first positions, [num_positions, 1, D / 2] complex64.

        They turn as in a text of `text_length` tokens; with dynamic scaling a position p beyond it
        as in one of p + 1. So the result does not depend on how the tokens are divided into
        forwards. Channels that are not turned are multiplied by 1, the others by
        `attention_factor` too, where the scaling has one.
        """
        positions = torch.arange(num_positions)
        lengths = torch.full_like(positions, text_length)
        if self.kind == "dynamic":
            lengths = torch.maximum(lengths, positions + 1)
        angles = positions.float().unsqueeze(-1) * self.inverse_frequencies(lengths)
        rotations = torch.complex(angles.cos(), angles.sin())
        rotations = rotations * (self.scaling or {}).get("attention_factor", 1.0)
        num_kept = (self.head_size - self.size) // 2
        unturned = rotations.new_ones(num_positions, num_kept)
        return torch.cat([rotations, unturned], dim=1).unsqueeze(1)

    def inverse_frequencies(self, lengths: Tensor) -> Tensor:
        """Returns the radians per position, float32, for texts of these lengths.

        [len(lengths), size / 2] with dynamic and longrope scaling, else [1, size / 2]: the lengths
        do not matter.
        """
        exponents = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        base: float | Tensor = self.base
        if self.kind == "dynamic":
            base = self._dynamic_bases(lengths)
        periods = (base**exponents).reshape(-1, self.size // 2)
        if self.kind == "linear":
            return 1.0 / periods / self._number("factor")
        if self.kind == "llama3":
            return self._llama3(1.0 / periods)
        if self.kind == "yarn":
            return self._yarn(periods)
        if self.kind == "longrope":
            return 1.0 / (self._longrope_factors(lengths) * periods)
        return 1.0 / periods

    def _dynamic_bases(self, lengths: Tensor) -> Tensor:
        factor, original = self._number("factor"), self._number(_ORIGINAL)
        stretch = factor * lengths.clamp(min=original) / original - (factor - 1)
        bases = self.base * stretch ** (self.size / (self.size - 2))
        return bases.unsqueeze(-1)

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Returns Llama 3.1's frequencies: long waves stretched, short kept, others blended."""
        factor, original = self._number("factor"), self._number(_ORIGINAL)
        low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
        wavelengths = 2 * math.pi / frequencies
        blend = (original / wavelengths - low) / (high - low)
        blended = (1 - blend) * frequencies / factor + blend * frequencies
        scaled = torch.where(wavelengths > original / low, frequencies / factor, blended)
        return torch.where(wavelengths < original / high, frequencies, scaled)

    def _yarn(self, periods: Tensor) -> Tensor:
        """Returns frequencies: short waves kept, long ones stretched, those between blended.

        Peng et al. 2023, arXiv:2309.00071, equations 17 to 23.
        """
        low, high = (
            self.size
            * math.log(self._number(_ORIGINAL) / (2 * math.pi * self._number(beta)))
            / (2 * math.log(self.base))
            for beta in ("beta_fast", "beta_slow")
        )
        assert self.scaling is not None
        if self.scaling["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.size - 1)
        if low == high:
            high += 0.001
        ramp = (torch.arange(self.size // 2, dtype=torch.float32) - low) / (high - low)
        weight = 1 - ramp.clamp(0, 1)
        return 1.0 / (self._number("factor") * periods) * (1 - weight) + 1.0 / periods * weight

    def _longrope_factors(self, lengths: Tensor) -> Tensor:
        """Returns one factor per frequency, as Ding et al. 2024 (arXiv:2402.13753) search them."""
        assert self.scaling is not None
        short, long = (torch.tensor(self.scaling[f"{name}_factor"]) for name in ("short", "long"))
        is_long = (lengths > self._number(_ORIGINAL)).unsqueeze(-1)
        return torch.where(is_long, long, short)

    def _number(self, key: str) -> float:
        assert self.scaling is not None
        return float(self.scaling[key])
