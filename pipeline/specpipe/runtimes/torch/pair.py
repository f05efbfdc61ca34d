"""Two torch engines as a pair."""

from __future__ import annotations

import os
from pathlib import Path

from specpipe.errors import EngineMismatch
from specpipe.runtimes.base import DetokenizerFactory, PairOptions
from specpipe.runtimes.costs import measure_costs
from specpipe.runtimes.engine_pair import EnginePair
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
    draft_engine, target_engine = engines
    for engine, folder in zip(engines, (draft, target), strict=True):
        _check(engine, folder, options)
    costs = None
    if options.adaptive and options.num_draft_tokens > 0:
        costs = measure_costs(
            draft_engine,
            target_engine,
            max_batch_size=options.max_batch_size,
            num_draft_tokens=options.num_draft_tokens,
        )
    return EnginePair(
        draft_engine,
        target_engine,
        TorchSampler(
            min(draft_engine.vocab_size, target_engine.vocab_size), options.unused_token_ids
        ),
        options,
        detokenizer,
        costs=costs,
    )


def _check(engine: TorchEngine, folder: Path, options: PairOptions) -> None:
    for name, built, wanted in (
        ("max_batch_size", engine.max_batch_size, options.max_batch_size),
        ("max_draft_len", engine.max_draft_len, options.num_draft_tokens),
    ):
        if built < wanted:
            raise EngineMismatch(
                f"{folder} was built for {name} {built}, the pair is to serve {wanted}; "
                "build it again"
            )
