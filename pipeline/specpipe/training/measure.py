"""Held-out acceptance of a draft, computed by transformers (acceptance.py says what is counted)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specpipe.training.acceptance import Counts, Measured, autoregressive, count_text
from specpipe.training.batches import Batch, by_length, make_batch
from specpipe.training.losses import overlap
from specpipe.training.models import (
    Head,
    ListedScores,
    Scores,
    SharedIds,
    draft_inputs,
    hidden_states,
    moved,
    row_parts,
)
from specpipe.training.parallel import RowInputs, ordinary_inputs, parallel_inputs
from specpipe.training.texts import Text

ReadTarget = Callable[[Batch, Tensor], Scores | ListedScores]
"""Returns the target's scores at rows [N] of a batch, of all B × T laid end to end."""


def rows_of(
    batch: Batch, *, mask: int | None, num_draft_tokens: int, keep: float = 1.0, seed: int = 0
) -> RowInputs:
    """Returns the rows in which a draft reads a batch, a parallel one where `mask` is given.

    keep, seed  which masks are left out, as `parallel_inputs` does: none
    """
    lengths = batch.ends + 1
    if mask is None:
        return ordinary_inputs(batch.token_ids, lengths=lengths)
    return parallel_inputs(
        batch.token_ids,
        mask_id=mask,
        num_draft_tokens=num_draft_tokens,
        keep=keep,
        generator=torch.Generator().manual_seed(seed),
        lengths=lengths,
        starts=batch.starts,
    )


def scored_rows(rows: RowInputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns which of all B × R rows are scored, and which of all B × T the target has for them.

    Those whose step begins at a place that is: a draft proposes for answers only, so a mask counts
    where its anchor does. Rows that are to match the same one of the target stand side by side.
    """
    anchors = rows.teacher_rows - rows.depths
    is_scored = rows.is_real & (anchors >= batch.starts[:, None])
    is_scored &= rows.teacher_rows < batch.ends[:, None]
    selected = is_scored.flatten().nonzero()[:, 0]
    num_rows, num_tokens = rows.depths.shape[1], batch.token_ids.shape[1]
    at_target = selected // num_rows * num_tokens + rows.teacher_rows.flatten()[selected]
    if num_rows > num_tokens:
        at_target, order = at_target.sort(stable=True)
        selected = selected[order]
    return selected, at_target


@torch.no_grad()
def measure(
    draft: Any,
    shared: SharedIds,
    texts: Sequence[Text],
    read_target: ReadTarget,
    *,
    num_draft_tokens: int,
    mask: int | None,
    batch_tokens: int,
    with_log_probs: bool = False,
) -> Measured:
    """Returns the counts of texts by group; of a parallel draft where `mask` is given."""
    was_training = draft.training
    draft.eval()
    found: dict[bool, dict[str, Counts]] = {True: {}, False: {}}
    # A parallel draft has K rows for each token here.
    tokens_at_once = batch_tokens if mask is None else max(batch_tokens // num_draft_tokens, 1)
    for number, indices in enumerate(by_length(texts, tokens_at_once)):
        of_batch = [texts[index] for index in indices]
        batch = make_batch(of_batch, number, padding=0, with_log_probs=with_log_probs)
        measured = _measure_batch(draft, shared, batch, read_target, num_draft_tokens, mask)
        for text, (by_text, by_target, shares) in zip(of_batch, measured, strict=True):
            chances = by_text if text.is_greedy else shares
            counts = count_text(
                autoregressive(chances[:, 0], num_draft_tokens) if mask is None else chances,
                num_agreeing=int((by_text if text.is_greedy else by_target)[:, 0].sum()),
                sum_overlap=float(shares[:, 0].sum()),
            )
            groups = found[text.is_greedy]
            earlier = groups.get(text.group)
            groups[text.group] = counts if earlier is None else earlier + counts
    draft.train(was_training)
    return Measured(greedy=found[True], sampled=found[False])


def _measure_batch(
    draft: Any,
    shared: SharedIds,
    batch: Batch,
    read_target: ReadTarget,
    num_draft_tokens: int,
    mask: int | None,
) -> list[list[Any]]:
    """Returns of each text, at [n, j], for draft token j of a step that begins at place n of the
    answer: whether it is the text's, whether it is the target's most likely, and Σ min(p, q).
    """
    rows = rows_of(batch, mask=mask, num_draft_tokens=num_draft_tokens)
    selected, at_target = scored_rows(rows, batch)
    scores = read_target(batch, at_target)
    inputs = draft_inputs(rows, draft.device, is_parallel=mask is not None)
    hidden = hidden_states(draft, **inputs).flatten(0, 1)[moved(selected, draft.device)]
    head = Head(draft, shared)
    following = moved(shared.places(batch.token_ids.flatten()[at_target + 1]), draft.device)
    found = []
    for part in row_parts(len(selected), len(shared.ids)):
        log_probs = head.log_probs(hidden[part])
        target = scores.log_probs(part)
        proposed = log_probs.argmax(-1)
        found.append(
            torch.stack(
                (
                    (proposed == following[part]).float(),
                    (proposed == scores.most_likely(target, part)).float(),
                    overlap(scores.of_draft(log_probs, part), target),
                )
            )
        )
    values = torch.cat(found, dim=1).double().cpu().numpy()
    text = (selected // rows.depths.shape[1]).numpy()
    depths = rows.depths.flatten()[selected].numpy()
    anchors = (rows.teacher_rows - rows.depths).flatten()[selected].numpy()
    results = []
    for index, (start, end) in enumerate(
        zip(batch.starts.tolist(), batch.ends.tolist(), strict=True)
    ):
        here = text == index
        grids = np.zeros((3, end - start, 1 if mask is None else num_draft_tokens))
        grids[:, anchors[here] - start, depths[here]] = values[:, here]
        results.append(list(grids))
    return results
