"""The rows of a training forward in which a draft learns to propose K tokens in one pass.

A parallel draft (PARD: An et al. 2025, arXiv:2504.18583) reads the text up to an anchor n, then
K - 1 mask tokens: the row of the text's last token proposes token n + 1, and the row of the d-th
mask token n + 1 + d without having seen those between. Training reads one text with the masks of
many anchors behind it, and an attention mask keeps each anchor's own from the rest:

    row          0   1   2   3     4   5     6   7        K = 3, all anchors kept
    input        a   b   c   d     M   M     M   M   ...
    position     0   1   2   3     1   2     2   3
    anchor       0   1   2   3     0   0     1   1
    depth        0   0   0   0     1   2     1   2
    it matches   0   1   2   3     1   2     2   3        the row of the target alone

Letters: B texts, T tokens of the longest, R rows of the forward, K draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowInputs:
    """What a draft reads in one training forward, and what each of its rows is to match.

    All are [B, R]: `input_ids` and `position_ids` of the draft's forward; `teacher_rows`, the row
    of the text whose distribution by the target this row is to match; `depths`, 0 for a token of
    the text and d for the d-th mask of an anchor; `previous_rows`, the row that proposes the token
    before this row's own from the same anchor (a row of depth 0 names itself); `is_real`, False
    where a shorter text was padded. They are on the CPU: laying them out takes many steps on few
    numbers, some of which would wait for all that a GPU has yet to do.
    """

    input_ids: Tensor
    position_ids: Tensor
    teacher_rows: Tensor
    depths: Tensor
    previous_rows: Tensor
    is_real: Tensor


def ordinary_inputs(token_ids: Tensor, *, lengths: Tensor | None = None) -> RowInputs:
    """The rows of a draft that proposes one token a pass: the text, R = T.

    token_ids [B, T] are of any value behind the first `lengths` [B] tokens of each text; without
    lengths all have T tokens.
    """
    return _rows(token_ids, _lengths(token_ids, lengths), torch.zeros_like(token_ids), mask_id=0)


def parallel_inputs(
    token_ids: Tensor,
    *,
    mask_id: int,
    num_draft_tokens: int,
    keep: float,
    generator: torch.Generator,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
) -> RowInputs:
    """The text's rows, then the masks of its anchors by anchor and depth.

    token_ids and lengths are as for `ordinary_inputs`; starts [B] is the first anchor of each text,
    as its prompt's last token, or left out the first token. Of the anchors a share keep^d, drawn by
    the generator, has a d-th mask (PARD's conditional drop): an anchor kept at a depth was kept at
    all smaller ones, so that each mask has those before it to see. keep = 1 drops none. No mask
    stands behind the last token of its text, where nothing is known of the target. The generator is
    one of the CPU.
    """
    if num_draft_tokens < 1 or not 0 < keep <= 1:
        raise ValueError(f"K = {num_draft_tokens} of at least 1, keep = {keep} in (0, 1]")
    lengths = _lengths(token_ids, lengths)
    starts = torch.zeros_like(lengths) if starts is None else starts
    text = torch.arange(token_ids.shape[1])
    is_anchor = (text >= starts[:, None]) & (text < lengths[:, None])
    counts = is_anchor.sum(1)
    ranks = [torch.randperm(count, generator=generator) for count in counts.tolist()]
    shares = keep ** torch.arange(1, num_draft_tokens, dtype=torch.float64)
    # Ranks instead of independent draws: every text has the same shares, so R hardly varies.
    places = (torch.cat(ranks) + 0.5) / counts.repeat_interleave(counts)
    deepest = (places[:, None] < shares).sum(1)
    num_masks = torch.zeros_like(token_ids)
    num_masks[is_anchor] = torch.minimum(deepest, (lengths[:, None] - 1 - text)[is_anchor])
    return _rows(token_ids, lengths, num_masks, mask_id=mask_id)


def _lengths(token_ids: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return token_ids.new_full((len(token_ids),), token_ids.shape[1])
    return lengths.to(token_ids)


def _rows(token_ids: Tensor, lengths: Tensor, num_masks: Tensor, *, mask_id: int) -> RowInputs:
    """num_masks [B, T]: how many masks the anchor at each token of the text has."""
    num_texts, num_tokens = token_ids.shape
    most_masks = int(num_masks.sum(1).max())
    shape = (num_texts, num_tokens + most_masks)
    text = torch.arange(num_tokens)
    anchors = token_ids.new_zeros(shape)
    depths = token_ids.new_zeros(shape)
    is_real = torch.zeros(shape, dtype=torch.bool)
    anchors[:, :num_tokens] = text
    is_real[:, :num_tokens] = text < lengths[:, None]
    is_mask = torch.arange(most_masks) < num_masks.sum(1, keepdim=True)
    is_real[:, num_tokens:] = is_mask
    counts = num_masks.flatten()
    anchors[:, num_tokens:][is_mask] = text.repeat(num_texts).repeat_interleave(counts)
    first_of_anchor = (counts.cumsum(0) - counts).repeat_interleave(counts)
    depths[:, num_tokens:][is_mask] = torch.arange(len(first_of_anchor)) - first_of_anchor + 1
    input_ids = token_ids.new_full(shape, mask_id)
    input_ids[:, :num_tokens] = token_ids
    positions = anchors + depths
    rows = torch.arange(shape[1]).expand(shape)
    return RowInputs(
        input_ids=input_ids,
        position_ids=positions,
        teacher_rows=positions,
        depths=depths,
        previous_rows=torch.where(depths == 0, rows, torch.where(depths == 1, anchors, rows - 1)),
        is_real=is_real,
    )


def attention_mask(anchors: Tensor, depths: Tensor, is_real: Tensor) -> Tensor:
    """Returns [B, 1, R, R], True where a row sees another, as attention by `sdpa` takes it.

    A row sees the text up to its anchor, and its anchor's masks up to itself. A padded row sees
    itself, since a softmax over nothing is not a number.
    """
    to_text = (depths == 0)[:, None, :] & (anchors[:, None, :] <= anchors[:, :, None])
    of_anchor = anchors[:, None, :] == anchors[:, :, None]
    to_masks = of_anchor & (depths[:, None, :] <= depths[:, :, None])
    itself = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device)
    return (((to_text | to_masks) & is_real[:, None, :]) | itself)[:, None]
