"""What launches of prompts cost on the GPU that is here, by their rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specpipe.runtimes.pair.costs import PromptCosts, settled
from specpipe.runtimes.torch.fused.engine import FusedEngine

_MOST_TIMES = 6
_FAR = 6144
"""Positions that the widest launch has before it where looking back is timed."""


@torch.inference_mode()
def measured_prompt_costs(engine: FusedEngine) -> PromptCosts:
    """Times a launch of each width; while no sequence runs."""
    most = engine.max_seq_len
    widths = [min(width, most) for width in engine.prompt_widths]
    sequence = engine.allocate(prompt_length=most + 2, max_tokens=most)
    costs = {
        width: settled(_seconds(engine, sequence, 0, num_rows))
        for width, num_rows in zip(engine.prompt_widths, widths, strict=True)
    }
    num_rows = widths[-1]
    far = min(most - num_rows, _FAR)
    per_look = 0.0
    if far:
        more = settled(_seconds(engine, sequence, far, num_rows)) - costs[engine.prompt_widths[-1]]
        per_look = max(more, 0.0) / (far * num_rows)
    engine.free(sequence)
    return PromptCosts(costs, per_look)


def _seconds(engine: FusedEngine, sequence: int, first: int, num_rows: int) -> Iterator[float]:
    """Yields the times of a launch of rows from a position on."""
    for number in range(1 + _MOST_TIMES):
        engine.truncate(sequence, 0)
        engine.skip(sequence, first)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        engine.forward([(sequence, [0] * num_rows)], [0])
        end.record()
        end.synchronize()
        if number:  # a GPU that was idle is slow at first
            yield start.elapsed_time(end) / 1e3
