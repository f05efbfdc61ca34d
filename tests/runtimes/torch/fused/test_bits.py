"""Many requests on fused kernels: each is told, bit for bit, what it is told alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.bits.asked import Material, ask
from benchmarks.bits.trial import Outcome, try_pair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.torch.pair import fused_pair_of
from tests.runtimes.torch.fused.toy import toy_config, toy_engines
from tests.speculative.table import WordDetokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

TEXT = np.random.default_rng(3).integers(0, 64, 2_000).tolist()


def tried(options: PairOptions, number: int, lengths: dict[str, int], **model: int) -> Outcome:
    """The target is its own draft, but for a head that is disturbed."""
    config = toy_config(**model)
    limits = {
        "max_batch_size": options.max_batch_size,
        "max_seq_len": options.max_seq_len,
        "max_draft_len": options.num_draft_tokens,
    }
    draft, _ = toy_engines(config, seed=1, limits=limits)
    target, _ = toy_engines(config, seed=1, limits=limits)
    with torch.inference_mode():
        head = draft.decoder.weights.head.weight
        noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(3))
        head += 0.15 * noise.to(head)
    material = Material(
        text=TEXT,
        num_questions=-(-number // 2),
        max_num_draft_tokens=options.num_draft_tokens,
        vocab_size=config.vocab_size,
        end_token_ids=frozenset({5}),
        stop_strings=("w17 ", "9 w2"),
        **lengths,
    )
    pair = fused_pair_of(draft, target, options, lambda prompt, **_: WordDetokenizer())
    return try_pair(pair, ask(23, number, material), vocab_size=config.vocab_size)
