"""How two sides that were measured in turns stand to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Ratio:
    """A geometric mean, and its 95 % interval (Student's t of the logarithms)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        """Of two rounds at least."""
        logs = np.log(ratios)
        half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
        return cls(
            *(float(x) for x in np.exp([logs.mean(), logs.mean() - half, logs.mean() + half]))
        )

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"
