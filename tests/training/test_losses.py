"""Losses against formulas written out in NumPy, their limits, and what they pull a draft to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from specpipe.training.losses import (
    LOSSES,
    NO_CHANCE,
    RowLoss,
    bucketed,
    forward_kl,
    mixed_kl,
    overlap,
    reverse_kl,
    total_variation,
    with_rest,
)

Q = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.25, 0.5, 0.25]])
P = np.array([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.25, 0.5, 0.25]])
FORWARD = (P * np.log(P / Q)).sum(-1)
REVERSE = (Q * np.log(Q / P)).sum(-1)


def log(probs: object) -> Tensor:
    return torch.tensor(np.log(np.asarray(probs)))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (forward_kl, FORWARD),
        (reverse_kl, REVERSE),
        (mixed_kl, [FORWARD[0], REVERSE[1], 0.0]),  # the second row's most likely ids differ
        (total_variation, [0.1, 0.7, 0.0]),
    ],
)
def test_losses_are_their_formulas(loss: RowLoss, expected: list[float]) -> None:
    assert loss(log(Q), log(P)).numpy() == pytest.approx(np.array(expected), abs=1e-12)


def test_what_total_variation_leaves_is_the_overlap() -> None:
    assert (1 - total_variation(log(Q), log(P))).numpy() == pytest.approx(
        overlap(log(Q), log(P)).numpy()
    )


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_step_down_brings_the_draft_nearer(loss: RowLoss) -> None:
    logits = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    target = log([[0.7, 0.2, 0.1]])
    before = overlap(logits.log_softmax(-1), target)
    loss(logits.log_softmax(-1), target).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert overlap((logits - 0.3 * logits.grad).log_softmax(-1), target) > before


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_draft_that_is_the_target_has_nothing_to_learn(loss: RowLoss) -> None:
    logits = torch.tensor(np.log(P), requires_grad=True)
    row_losses = loss(logits.log_softmax(-1), log(P))
    row_losses.sum().backward()
    assert row_losses.detach().numpy() == pytest.approx(np.zeros(3), abs=1e-12)
    assert logits.grad is not None
    if loss is not total_variation:  # which has a corner there
        assert logits.grad.numpy() == pytest.approx(np.zeros((3, 3)), abs=1e-12)


def test_ids_that_are_not_listed_are_one_bucket() -> None:
    ids = torch.tensor([[0, 2], [1, -1]])  # -1 fills up
    listed = log(P[:2]).gather(1, ids.clamp_min(0)).masked_fill(ids < 0, NO_CHANCE)
    q = bucketed(log(Q[:2]), ids)
    p = with_rest(listed)
    assert q.exp().numpy() == pytest.approx(np.array([[0.5, 0.2, 0.3], [0.1, 0.0, 0.9]]))
    assert p.exp().numpy() == pytest.approx(np.array([[0.6, 0.1, 0.3], [0.2, 0.0, 0.8]]))
    merged = 0.2 * np.log(0.2 / 0.1) + 0.8 * np.log(0.8 / 0.9)
    assert forward_kl(q, p)[1].item() == pytest.approx(merged)
    assert merged < FORWARD[1]  # as merging never raises a divergence


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_autocast_rounds_no_loss(loss: RowLoss) -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(4, 512, generator=generator).log_softmax(-1)
    draft = (target + 0.05 * torch.randn(4, 512, generator=generator)).log_softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(draft, target)
    assert torch.equal(found, loss(draft, target))
