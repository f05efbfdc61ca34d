"""A draft's loss and its gradient, however its rows are parted and its ids lie."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from specpipe.training import models
from specpipe.training.batches import Batch
from specpipe.training.losses import forward_kl, total_variation
from specpipe.training.measure import scored_rows
from specpipe.training.models import (
    Head,
    ListedScores,
    Scores,
    SharedIds,
    Student,
    Target,
    draft_inputs,
    hidden_states,
    load_model,
    round_weights,
    save_draft,
)
from specpipe.training.parallel import RowInputs, ordinary_inputs, parallel_inputs
from specpipe.training.trainer import chances
from tests.toy import write_toy_checkpoint

CPU = torch.device("cpu")
SHARED = SharedIds(tuple(range(200)))
BATCH = Batch(
    0,
    torch.tensor([[3, 7, 11, 5, 9, 4], [8, 6, 2, 9, 0, 0]]),
    answers=torch.tensor([2, 1]),
    starts=torch.tensor([1, 0]),
    ends=torch.tensor([5, 3]),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("pair")
    return tuple(
        AutoModelForCausalLM.from_pretrained(
            write_toy_checkpoint(folder / role, family, seed=seed, dtype="float32")
        )
        for role, family, seed in (("draft", "llama", 1), ("target", "gemma2", 2))
    )  # type: ignore[return-value]


def loss_and_gradient(pair: tuple[Any, Any], shared: SharedIds = SHARED) -> tuple[Tensor, Tensor]:
    draft, target = pair
    rows = ordinary_inputs(BATCH.token_ids, lengths=BATCH.ends + 1)
    selected, at_target = scored_rows(rows, BATCH)
    scores = Target(target, shared).read(BATCH.token_ids, at_target)
    draft.zero_grad()
    losses, _ = Student(draft, shared, forward_kl)(
        draft_inputs(rows, CPU, is_parallel=False), selected, scores, with_overlap=False
    )
    losses.mean().backward()
    return losses.detach(), draft.lm_head.weight.grad.clone()


def test_the_loss_is_that_of_whole_models_on_the_ids_of_both(pair: tuple[Any, Any]) -> None:
    draft, target = pair
    losses, gradient = loss_and_gradient(pair)
    places = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2)]
    expected = []
    for text, row in places:
        ids = BATCH.token_ids[text : text + 1, : row + 1]  # what the model may have read there
        q, p = (m(ids).logits[0, -1, :200].double().softmax(-1) for m in (draft, target))
        expected.append((p * (p / q).log()).sum().item())
    assert losses.tolist() == pytest.approx(expected, rel=1e-4)
    assert not gradient[200:].any()
    assert gradient[:200].any(-1).all()


def test_parted_rows_have_the_same_gradient(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, gradient = loss_and_gradient(pair)
    monkeypatch.setattr(models, "_ROWS_AT_A_TIME", 2 * 200)
    parted_losses, parted_gradient = loss_and_gradient(pair)
    assert torch.allclose(losses, parted_losses, atol=1e-6)
    assert torch.allclose(gradient, parted_gradient, atol=1e-7)


def test_an_id_that_is_not_used_between_others_is_in_no_softmax(pair: tuple[Any, Any]) -> None:
    shared = SharedIds((*range(100), *range(101, 200)))
    _, gradient = loss_and_gradient(pair, shared)
    assert not gradient[100].any()
    assert gradient[99].any()
    assert shared.places(torch.tensor([99, 100, 101, 199])).tolist() == [99, -1, 100, 198]


def test_all_ids_listed_are_the_whole_distribution(pair: tuple[Any, Any]) -> None:
    draft, target = pair
    rows = ordinary_inputs(BATCH.token_ids)
    selected, at_target = scored_rows(rows, BATCH)
    live = Target(target, SHARED).read(BATCH.token_ids, at_target)
    everything = slice(0, len(selected))
    log_probs = live.log_probs(everything)
    order = log_probs.argsort(-1, descending=True)
    listed = ListedScores(SHARED, order, log_probs.gather(-1, order))
    student = Student(draft, SHARED, forward_kl)
    results = [
        student(draft_inputs(rows, CPU, is_parallel=False), selected, scores, with_overlap=True)
        for scores in (live, listed)
    ]
    for whole, bucketed in zip(*results, strict=True):
        assert torch.allclose(whole, bucketed, atol=1e-4)
    best = [s.most_likely(s.log_probs(everything), everything).tolist() for s in (live, listed)]
    assert best[0] == best[1]


def test_a_mask_sees_its_own_prefix_alone_where_scores_are_added(pair: tuple[Any, Any]) -> None:
    gemma = pair[1]
    assert gemma.config._attn_implementation == "eager"
    rows = parallel_inputs(
        BATCH.token_ids[:1],
        mask_id=255,
        num_draft_tokens=2,
        keep=1.0,
        generator=torch.Generator().manual_seed(0),
    )
    found = hidden_states(gemma, **draft_inputs(rows, CPU, is_parallel=True))[0]
    for row in range(6, rows.depths.shape[1]):
        prefix = BATCH.token_ids[:1, : int(rows.teacher_rows[0, row])]
        alone = hidden_states(gemma, input_ids=functional.pad(prefix, (0, 1), value=255))[0, -1]
        torch.testing.assert_close(found[row], alone, rtol=1e-4, atol=1e-4)


def parallel_rows(*, keep: float) -> RowInputs:
    """Those of the answers, of a draft that proposes three tokens in one pass."""
    return parallel_inputs(
        BATCH.token_ids,
        mask_id=255,
        num_draft_tokens=3,
        keep=keep,
        generator=torch.Generator().manual_seed(0),
        lengths=BATCH.ends + 1,
        starts=BATCH.starts,
    )


def test_a_proposal_counts_where_all_before_it_stand() -> None:
    rows = parallel_rows(keep=1.0)
    selected, at_target = scored_rows(rows, BATCH)
    # Rows that are to match one row of the target stand side by side, for its head is dear.
    assert at_target.tolist() == sorted(at_target.tolist())
    overlaps = torch.rand(len(selected), generator=torch.Generator().manual_seed(1))
    found = chances(rows, selected, overlaps)
    share = {}
    num_rows = rows.depths.shape[1]
    for row, value in zip(selected.tolist(), overlaps.tolist(), strict=True):
        text = row // num_rows
        depth = int(rows.depths.flatten()[row])
        share[text, int(rows.teacher_rows.flatten()[row]) - depth, depth] = value
    # Text 0 has the anchors 1 to 4, text 1 has 0 to 2; what would lie beyond the end is no row.
    assert len(share) == (3 + 3 + 2 + 1) + (3 + 2 + 1)
    for row, chance in zip(selected.tolist(), found.tolist(), strict=True):
        depth = int(rows.depths.flatten()[row])
        anchor = int(rows.teacher_rows.flatten()[row]) - depth
        expected = 1.0
        for before in range(depth):
            expected *= share[row // num_rows, anchor, before]
        assert chance == pytest.approx(expected)


def test_a_step_needs_no_value_that_a_gpu_would_have_to_be_waited_for(
    pair: tuple[Any, Any],
) -> None:
    shared = SharedIds((*range(100), *range(101, 200)))
    draft, target = (deepcopy(model).to("meta") for model in pair)  # which has no values
    rows = parallel_rows(keep=0.7)
    selected, at_target = scored_rows(rows, BATCH)
    hidden = torch.empty(BATCH.token_ids.numel(), target.config.hidden_size, device="meta")
    listed = torch.empty(len(selected), 4, device="meta")
    for scores in (
        Scores(Head(target, shared), hidden, at_target),
        ListedScores(shared, listed.long(), listed),
    ):
        inputs = draft_inputs(rows, draft.device, is_parallel=True)
        student = Student(draft, shared, total_variation)
        losses, overlaps = student(inputs, selected, scores, with_overlap=True)
        (chances(rows, selected, overlaps) * losses).sum().backward()
        assert losses.device.type == "meta"


def test_a_draft_of_rounded_weights_is_the_one_that_is_written(
    tmp_path: Path, pair: tuple[Any, Any]
) -> None:
    draft = deepcopy(pair[0])
    round_weights(draft, torch.bfloat16)
    save_draft(deepcopy(draft), tmp_path, torch.bfloat16)
    token_ids = torch.arange(3, 51)[None]
    written = load_model(tmp_path, torch.float32, role="draft")
    assert torch.equal(draft(token_ids).logits, written(token_ids).logits)
