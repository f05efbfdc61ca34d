"""The accept test: which draft tokens stand, and the token of the target that follows them.

K draft tokens, V vocabulary. Both rules return between 1 and K + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specpipe.speculative.noise import Floats


@dataclass(frozen=True)
class Verified:
    """What a verification lets out: accepted draft tokens, then the recovered or bonus token."""

    token_ids: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        return len(self.token_ids) - 1


def verify_by_matching(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> Verified:
    """Accepts draft tokens while they equal the target's own choice.

    draft_token_ids [K]; target_token_ids [K + 1] is what the target alone would choose in each row:
    its argmax, or, with a seed, argmax(scores + gumbel) under the noise of that position. Draft and
    target then see one noise vector, so they agree far more often than independent draws would, and
    the output is that of the target alone for every K (Gumbel-max coupling: Maddison et al. 2014,
    arXiv:1411.0030).
    """
    num_accepted = 0
    while (
        num_accepted < len(draft_token_ids)
        and draft_token_ids[num_accepted] == target_token_ids[num_accepted]
    ):
        num_accepted += 1
    return Verified(tuple(target_token_ids[: num_accepted + 1]))


def verify_by_rejection(
    draft_token_ids: Sequence[int],
    draft_probs: Floats,
    target_probs: Floats,
    *,
    accept_uniform: Floats,
    recovered_gumbel: Floats,
) -> Verified:
    """Accepts each draft token with probability min(1, target / draft), else samples what is left.

    draft_probs [K, V] and target_probs [K + 1, V] are after warping; the last target row scores the
    position after the last draft token. accept_uniform [K] and recovered_gumbel [K + 1, V] are the
    noise of each position. What comes back is distributed as the target alone would sample:
    Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
    """
    accepted: list[int] = []
    for row, token_id in enumerate(draft_token_ids):
        draft_prob = draft_probs[row, token_id]
        if accept_uniform[row] * draft_prob < target_probs[row, token_id]:
            accepted.append(token_id)
            continue
        residual = np.maximum(target_probs[row] - draft_probs[row], 0.0)
        # Equal rows, up to rounding, leave nothing: then the target's own row is the right one.
        weights = residual if residual.sum() > 0.0 else target_probs[row]
        return Verified((*accepted, sample(weights, recovered_gumbel[row])))
    bonus = sample(target_probs[len(accepted)], recovered_gumbel[len(accepted)])
    return Verified((*accepted, bonus))


def sample(weights: Floats, gumbel: Floats) -> int:
    """Draws an id with probability proportional to weights [V], by the Gumbel-max trick."""
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(weights) + gumbel))
