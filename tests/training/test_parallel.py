from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specpipe.training.models import draft_inputs
from specpipe.training.parallel import RowInputs, ordinary_inputs, parallel_inputs

MASK = 31


@pytest.fixture(scope="module")
def draft() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def logits(draft: LlamaForCausalLM, inputs: RowInputs) -> torch.Tensor:
    with torch.no_grad():
        return draft(**draft_inputs(inputs, draft.device, is_parallel=True)).logits


def last_row(draft: LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return draft(input_ids=torch.tensor([token_ids])).logits[0, -1]


@pytest.mark.parametrize("keep", [1.0, 0.6])
def test_each_row_is_that_of_a_forward_of_its_prefix_and_masks(
    draft: LlamaForCausalLM, keep: float
) -> None:
    texts = [[4, 9, 2, 7, 7, 1, 12], [5, 3, 8, 30, 6]]
    token_ids = torch.tensor([texts[0], [*texts[1], 0, 0]])
    inputs = parallel_inputs(
        token_ids,
        mask_id=MASK,
        num_draft_tokens=4,
        keep=keep,
        generator=generator(),
        lengths=torch.tensor([7, 5]),
    )
    rows = logits(draft, inputs)
    seen = set()
    for text, row in inputs.is_real.nonzero().tolist():
        depth, matched = int(inputs.depths[text, row]), int(inputs.teacher_rows[text, row])
        anchor = matched - depth
        alone = last_row(draft, texts[text][: anchor + 1] + [MASK] * depth)
        torch.testing.assert_close(rows[text, row], alone, rtol=1e-4, atol=1e-4)
        seen.add((text, anchor, depth))
        if depth:
            before = int(inputs.previous_rows[text, row])
            assert inputs.depths[text, before] == depth - 1
            assert inputs.teacher_rows[text, before] == matched - 1
            assert (text, anchor, depth - 1) in seen
    assert len(seen) == int(inputs.is_real.sum())
    if keep == 1:
        lengths = (7, 5)
        assert seen == {
            (text, anchor, depth)
            for text, length in enumerate(lengths)
            for anchor in range(length)
            for depth in range(4)
            if anchor + depth < length
        }


def test_an_ordinary_draft_reads_the_text_alone(draft: LlamaForCausalLM) -> None:
    token_ids = torch.tensor([[4, 9, 2, 7], [5, 3, 0, 0]])
    inputs = ordinary_inputs(token_ids, lengths=torch.tensor([4, 2]))
    assert inputs.input_ids.tolist() == token_ids.tolist()
    assert inputs.teacher_rows.tolist() == [[0, 1, 2, 3]] * 2
    assert inputs.is_real.tolist() == [[True] * 4, [True, True, False, False]]
    rows = logits(draft, inputs)
    torch.testing.assert_close(rows[0, 3], last_row(draft, [4, 9, 2, 7]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows[1, 1], last_row(draft, [5, 3]), rtol=1e-4, atol=1e-4)
    assert not rows.isnan().any()


def test_the_share_kept_falls_by_keep_a_depth() -> None:
    token_ids = torch.zeros(3, 64, dtype=torch.long)
    inputs = parallel_inputs(
        token_ids, mask_id=MASK, num_draft_tokens=4, keep=0.5, generator=generator()
    )
    for depths in inputs.depths:
        counts = torch.bincount(depths, minlength=4).tolist()
        # 32, 16 and 8 of 64 anchors; of the last d none has a d-th mask.
        assert counts[0] >= 64
        assert all(count - depth <= counts[depth] <= count for depth, count in ((1, 32), (2, 16)))
        assert 5 <= counts[3] <= 8
    anchors = inputs.position_ids - inputs.depths
    drawn = [set(anchors[text, inputs.depths[text] == 1].tolist()) for text in range(3)]
    assert drawn[0] != drawn[1]


def test_masks_begin_at_the_first_anchor() -> None:
    inputs = parallel_inputs(
        torch.zeros(2, 6, dtype=torch.long),
        mask_id=MASK,
        num_draft_tokens=2,
        keep=1.0,
        generator=generator(),
        lengths=torch.tensor([6, 4]),
        starts=torch.tensor([3, 0]),
    )
    masks = inputs.is_real & (inputs.depths == 1)
    assert [inputs.teacher_rows[text, masks[text]].tolist() for text in range(2)] == [
        [4, 5],
        [1, 2, 3],
    ]


def test_a_generator_in_the_same_state_keeps_the_same_anchors() -> None:
    token_ids = torch.zeros(2, 20, dtype=torch.long)

    def depths() -> list[list[int]]:
        return parallel_inputs(
            token_ids, mask_id=MASK, num_draft_tokens=8, keep=0.7, generator=generator()
        ).depths.tolist()

    assert depths() == depths()


def test_one_draft_token_needs_no_mask() -> None:
    token_ids = torch.tensor([[4, 9, 2]])
    inputs = parallel_inputs(
        token_ids, mask_id=MASK, num_draft_tokens=1, keep=1.0, generator=generator()
    )
    assert inputs.input_ids.tolist() == [[4, 9, 2]]


@pytest.mark.parametrize(("num_draft_tokens", "keep"), [(0, 0.5), (4, 0.0), (4, 1.5)])
def test_what_no_rows_can_be_drawn_for_is_refused(num_draft_tokens: int, keep: float) -> None:
    with pytest.raises(ValueError, match="K ="):
        parallel_inputs(
            torch.zeros(1, 4, dtype=torch.long),
            mask_id=MASK,
            num_draft_tokens=num_draft_tokens,
            keep=keep,
            generator=generator(),
        )
