"""What recorded launches take of a GPU's memory; importing this imports neither torch nor Triton.

On an H200 (torch 2.11, CUDA 13.0) 114 graphs of 51,000 launches took 216 MiB: 72 with the first of
them, and 2.9 KB a launch.
"""

from __future__ import annotations

from specpipe.runtimes.torch.fused_sizes import CHUNK, MOST_CHUNKS, ROW_COUNTS, ROWS
from specpipe.runtimes.torch.round_sizes import MAX_DRAFT_TOKENS, RoundSizes

_FIRST_BYTES = 72 << 20
_LAUNCH_BYTES = 3 << 10

_LAUNCHES_OF_LAYER = 5
_LAUNCHES_OF_WIDE_LAYER = 7
"""Of a launch of more than ROWS rows, whose sums of squares are joined first."""

_LAUNCHES_OF_STEP = 8
"""Those around the layers: embedding, scores, and what draws and judges tokens."""

_FORMS = 2
"""Rounds of greedy requests alone, and those in which tokens are drawn."""


def graph_bytes(num_layers: int, *, capacity: int, max_batch_size: int, max_draft_len: int) -> int:
    """Returns what the launches of one engine take, in its forwards and in rounds of a pair.

    It is that of a draft, which a round asks more often than a target. Rounds that only copy draft
    tokens are counted, too: whether there are any, an engine does not know.
    """
    num_draft_tokens = min(max_draft_len, MAX_DRAFT_TOKENS)
    sizes = RoundSizes.of(max_batch_size, num_draft_tokens)
    steps = [num_rows for num_rows in ROW_COUNTS if num_rows <= sizes.rows]
    for places, most in sizes.shapes():
        drafting = [places * (2 if step == 0 else 1) for step in range(most)]
        verifying = [places * (most + 1)] * (2 if most else 1)
        steps += (drafting + verifying) * _FORMS
    num_launches = sum(_launches(num_layers, num_rows) for num_rows in steps)
    if capacity > MOST_CHUNKS * CHUNK:
        num_launches *= 2  # for short texts and for long ones
    return _FIRST_BYTES // 2 + _LAUNCH_BYTES * num_launches


def _launches(num_layers: int, num_rows: int) -> int:
    """Returns the launches of one step of a model."""
    of_layer = _LAUNCHES_OF_LAYER if num_rows <= ROWS else _LAUNCHES_OF_WIDE_LAYER
    return num_layers * of_layer + _LAUNCHES_OF_STEP
