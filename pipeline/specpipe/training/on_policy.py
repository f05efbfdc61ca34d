"""Answers that the present draft writes, so that it learns at places where its own words lead.

On-policy distillation: Agarwal et al. 2024, arXiv:2306.13649.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specpipe.training.batches import Batch


def write_answers(
    draft: Any, batch: Batch, *, allowed: Sequence[int], end_ids: Sequence[int], seed: int
) -> Batch:
    """Returns the prompts of a batch with answers of the draft, drawn at temperature 1.

    Answers have the length of those that they replace at most. The same seed and batch give the
    same ones; the state of torch's own generators stays as it is.
    """
    import transformers

    make_settings: Any = transformers.GenerationConfig
    token_ids = batch.token_ids
    device = draft.device
    starts = batch.answers.tolist()
    longest, most = max(starts), int((batch.ends + 1 - batch.answers).max())
    prompts = token_ids.new_zeros(len(token_ids), longest)
    is_prompt = torch.zeros_like(prompts)
    for row, start in enumerate(starts):
        prompts[row, longest - start :] = token_ids[row, :start]
        is_prompt[row, longest - start :] = 1
    num_rows = draft.get_input_embeddings().weight.shape[0]
    refused = sorted(set(range(num_rows)) - set(allowed))
    settings = make_settings(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=most,
        eos_token_id=list(end_ids) or None,
        pad_token_id=0,
        suppress_tokens=refused or None,
        use_cache=True,
    )
    was_training, own_settings = draft.training, draft.generation_config
    draft.eval()
    # What settings leave out, as penalties, generate would take from the checkpoint's own.
    draft.generation_config = settings
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        written = draft.generate(
            prompts.to(device), attention_mask=is_prompt.to(device), generation_config=settings
        ).cpu()
    draft.generation_config = own_settings
    draft.train(was_training)
    answers = written[:, longest:]
    is_end = torch.isin(answers, torch.tensor(list(end_ids), dtype=answers.dtype))
    texts = []
    ends = []
    for row, start in enumerate(starts):
        first_end = is_end[row].nonzero()[:1, 0].tolist()
        num_written = first_end[0] + 1 if first_end else answers.shape[1]
        room = int(batch.ends[row]) + 1 - start
        text = torch.cat((token_ids[row, :start], answers[row, : min(num_written, room)]))
        texts.append(text)
        ends.append(len(text) - 1)
    filled = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return replace(batch, token_ids=filled, ends=batch.ends.new_tensor(ends))
