"""What a draft is trained to make small, row by row.

N rows, V ids that both models may say, k of them kept of a distribution. A row is a place of a text
with the distributions of draft and target there, q and p, as natural logarithms. Either all ids are
there, or the target's k most likely ones and a bucket for the rest: `bucketed` brings the draft's
row into that form. Merging ids never raises a divergence (the data processing inequality), so what
buckets show is a lower bound.

Sources: Hinton et al. 2015, arXiv:1503.02531 (distillation, forward KL); Gu et al. 2023,
arXiv:2306.08543 (reverse KL); Zhou et al. 2023, arXiv:2310.08461, and Leviathan et al. 2023,
arXiv:2211.17192, Corollary 3.6 (1 less the total variation is the chance that a draft token
stands).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""Of log q and log p, [N, V] each, the loss of each row, [N]."""

NO_CHANCE = -100.0
"""The log-probability of what only fills up a row: finite, and nothing as a probability."""

_SMALLEST = 1e-7  # of a rest's share, so that its logarithm is finite


def forward_kl(draft: Tensor, target: Tensor) -> Tensor:
    """Returns KL(p ‖ q): the draft is to cover all that the target says."""
    return _divergence(target, draft)


def reverse_kl(draft: Tensor, target: Tensor) -> Tensor:
    """Returns KL(q ‖ p): the draft is to say nothing that the target does not."""
    return _divergence(draft, target)


def mixed_kl(draft: Tensor, target: Tensor) -> Tensor:
    """Returns KL(p ‖ q) where the most likely ids are one, so greedy decoding accepts, else
    KL(q ‖ p).

    A draft that is right is kept whole; one that is wrong has the most to gain by leaving the id
    that is rejected.
    """
    is_accepted = draft.detach().argmax(-1) == target.argmax(-1)
    return torch.where(is_accepted, forward_kl(draft, target), reverse_kl(draft, target))


def total_variation(draft: Tensor, target: Tensor) -> Tensor:
    """Returns ½ Σ |p - q|: the chance that rejection sampling rejects the draft's token."""
    return 0.5 * (draft.exp() - target.exp()).abs().sum(-1)


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    """Returns KL(first ‖ second), of which no [N, V] is held but the probabilities of the first."""
    probs = first.exp()
    # Autocast would round the products to bfloat16, whose error is larger than a small divergence.
    with torch.autocast(first.device.type, enabled=False):
        found: Tensor = torch.linalg.vecdot(probs, first) - torch.linalg.vecdot(probs, second)
    return found


LOSSES: Mapping[str, RowLoss] = {
    "forward-kl": forward_kl,
    "mixed-kl": mixed_kl,
    "total-variation": total_variation,
}
"""The losses by the names that a user gives."""


def overlap(draft: Tensor, target: Tensor) -> Tensor:
    """Returns Σ min(p, q) of each row: the chance that a token drawn from q is accepted.

    Of bucketed rows it is an upper bound.
    """
    return torch.minimum(draft, target).exp_().sum(-1)


def bucketed(draft: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the draft's log-probabilities of the ids [N, k], and last of all others, [N, k + 1].

    draft  log q of every id, [N, V]; an id below 0 only fills up its row
    """
    kept = draft.gather(-1, token_ids.clamp_min(0)).masked_fill(token_ids < 0, NO_CHANCE)
    return torch.cat([kept, _log_rest(kept)], dim=-1)


def with_rest(log_probs: Tensor) -> Tensor:
    """Adds to the target's log-probabilities [N, k] that of all other ids, [N, k + 1]."""
    return torch.cat([log_probs, _log_rest(log_probs)], dim=-1)


def _log_rest(log_probs: Tensor) -> Tensor:
    return (1 - log_probs.exp().sum(-1, keepdim=True)).clamp_min(_SMALLEST).log()
