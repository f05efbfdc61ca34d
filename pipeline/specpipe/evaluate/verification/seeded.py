"""How the target chooses a token of a seeded request, and how far another token is from that.

The draw is argmax(scores + noise), with noise that only depends on the seed and the position
(Gumbel-max coupling, `speculative/noise.py`), so a seeded output can be verified token by token.
V is the vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specpipe.evaluate.verification.scorer import ScoredText
from specpipe.speculative.noise import Floats, Purpose, gumbel
from specpipe.speculative.request import Sampling
from specpipe.speculative.warp import warp

_MAX_SHIFT = 64.0  # no rounding moves a logit that far
_NUM_BISECTIONS = 30  # after these an error is known to a part in 10^9
_NUM_RIVALS = 4  # that are tried at the edge of top-k, top-p or min-p, the nearest first. A guess.


@dataclass(frozen=True, eq=False)
class SeededChoice:
    """The largest of the warped logits [V] plus noise wins."""

    raw_logits: Floats
    text: ScoredText
    sampling: Sampling
    end_token_ids: frozenset[int] = frozenset()

    @property
    def token_id(self) -> int:
        return int(self._scores(self.raw_logits).argmax())

    @property
    def magnitude(self) -> float:
        return float(abs(self.raw_logits.max()))

    def shortfall(self, token_ids: Collection[int]) -> float:
        """Returns twice the least error in single logits under which one of the tokens is drawn.

        An error may also move a token across the edge of top-k, top-p or min-p. Without such an
        edge, this is the difference of the scores, noise included, times the temperature.
        """
        return min(self._shortfall(token_id) for token_id in token_ids)

    def _shortfall(self, token_id: int) -> float:
        if not math.isfinite(self.raw_logits[token_id]):
            return math.inf
        if not self._is_truncated:
            scores = self._scores(self.raw_logits)
            return float((scores.max() - scores[token_id]) * self.sampling.temperature)
        if self._is_drawn(token_id, 0.0):
            return 0.0
        low, high = 0.0, 2.0**-24
        while not self._is_drawn(token_id, high):
            low, high = high, 2.0 * high
            if high > _MAX_SHIFT:
                return math.inf
        for _ in range(_NUM_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._is_drawn(token_id, middle) else (middle, high)
        return 2.0 * high

    @property
    def _is_truncated(self) -> bool:
        sampling = self.sampling
        return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0

    def _is_drawn(self, token_id: int, error: float) -> bool:
        """Returns whether an error of that size in each logit can make the token the one drawn.

        Tried are the two that favour it: all others smaller; and those below and above some rival
        shifted so that it falls to the edge.
        """
        if error == 0.0:
            return self.token_id == token_id
        favoured = self.raw_logits - error
        favoured[token_id] += 2.0 * error
        if int(self._scores(favoured).argmax()) == token_id:
            return True
        for rival in self._rivals(token_id):
            logits = self.raw_logits + np.where(
                self.raw_logits > self.raw_logits[rival], error, -error
            )
            logits[token_id] = self.raw_logits[token_id] + error
            if int(self._scores(logits).argmax()) == token_id:
                return True
        return False

    def _rivals(self, token_id: int) -> list[int]:
        """Returns the tokens that are drawn before this one, but for their exclusion; the least
        likely, which are next to the edge, come first.
        """
        scores = self._scores(self.raw_logits)
        untruncated = self.raw_logits / self.sampling.temperature + self._noise
        better = np.flatnonzero((scores > untruncated[token_id]) & np.isfinite(scores))
        return [int(i) for i in better[np.argsort(self.raw_logits[better])][:_NUM_RIVALS]]

    def _scores(self, logits: Floats) -> Floats:
        scores: Floats = self._noise + warp(
            logits,
            self.sampling,
            prompt=self.text.prompt,
            output=self.text.output,
            end_token_ids=self.end_token_ids,
        )
        return scores

    @cached_property
    def _noise(self) -> Floats:
        position = len(self.text.prompt) + len(self.text.output)
        return gumbel(self.sampling.seed, position, Purpose.TOKEN, self.raw_logits.size)
