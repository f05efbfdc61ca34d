"""Two torch engines as a pair."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from specpipe.runtimes.base import DetokenizerFactory, PairOptions
from specpipe.runtimes.costs import measure_costs
from specpipe.runtimes.engine_fit import check_limits
from specpipe.runtimes.engine_pair import Engine, EnginePair
from specpipe.runtimes.torch.engine import TorchEngine, check_memory
from specpipe.runtimes.torch.sampling import TorchSampler


def load_pair(
    draft: Path, target: Path, options: PairOptions, detokenizer: DetokenizerFactory
) -> EnginePair:
    """Loads both engines and measures what their steps cost, unless drafting is fixed or off."""
    check_memory([draft, target])
    # A core to spare: a thread that waits for one which Triton displaced makes each step many
    # times slower.
    num_threads = options.num_threads or max(len(os.sched_getaffinity(0)) - 1, 1)
    engines = [TorchEngine.load(folder, num_threads=num_threads) for folder in (draft, target)]
    for engine, folder in zip(engines, (draft, target), strict=True):
        check_limits(folder, engine, options)
    draft_engine, target_engine = engines
    return pair_of(draft_engine, target_engine, options, detokenizer)


def pair_of(
    draft: Engine,
    target: Engine,
    options: PairOptions,
    detokenizer: DetokenizerFactory,
    *,
    on_close: Callable[[], None] = lambda: None,
) -> EnginePair:
    """Pairs engines whose logits are torch's, wherever they were computed."""
    costs = None
    if options.adaptive and options.num_draft_tokens > 0:
        costs = measure_costs(
            draft,
            target,
            max_batch_size=options.max_batch_size,
            num_draft_tokens=options.num_draft_tokens,
        )
    sampler = TorchSampler(min(draft.vocab_size, target.vocab_size), options.unused_token_ids)
    return EnginePair(draft, target, sampler, options, detokenizer, costs=costs, on_close=on_close)
