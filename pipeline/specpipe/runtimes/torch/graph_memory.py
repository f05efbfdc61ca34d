"""What recorded launches take of a GPU's memory; importing this imports neither torch nor Triton.

On an H200 (torch 2.11, CUDA 13.0) 114 graphs of some 51,000 launches, by formulas such as these,
took 216 MiB: 72 with the first of them, and 2.9 KB a launch.
"""

from __future__ import annotations

from specpipe.runtimes.torch.fused_sizes import (
    CHUNK,
    MOST_CHUNKS,
    PROMPT_WIDTHS,
    ROW_COUNTS,
    ROWS,
)
from specpipe.runtimes.torch.round_sizes import MAX_DRAFT_TOKENS, PACKED, Form, RoundSizes

_FIRST_BYTES = 72 << 20
_LAUNCH_BYTES = 3 << 10

_LAUNCHES_OF_LAYER = 5
_LAUNCHES_OF_WIDE_LAYER = 7
"""Of a launch of more than ROWS rows, whose sums of squares are joined first."""

_LAUNCHES_OF_PROMPTS_LAYER = 7
"""Of a launch of prompts; integers are unpacked by 4 more."""

_LAUNCHES_OF_STEP = 8
"""Those around the layers: embedding, scores, and what proposes and judges tokens."""

_LAUNCHES_OF_DRAWING = {Form.GREEDY: 0, Form.DRAWN: 2, Form.CUT: 9, Form.CUT_TWICE: 15}
"""Between scores and tokens."""

_FEW = 4
"""Sequences that attention of 7 B gives programs of their own: Decoder.lists_blocks."""


def graph_bytes(
    num_layers: int,
    *,
    capacity: int,
    max_batch_size: int,
    max_draft_len: int,
    is_parallel: bool = False,
) -> int:
    """Returns what the launches of one engine take, in its forwards and in rounds of a pair.

    It is the more of a draft's, which a round asks more often, and a target's. Rounds that only
    copy draft tokens are counted, too: whether there are any, an engine does not know.

    is_parallel  it is a draft's that proposes all draft tokens in one launch. Its target does not
                 know, and counts as another's, which has no fewer rounds and no narrower ones
    """
    num_draft_tokens = min(max_draft_len, MAX_DRAFT_TOKENS)
    sizes = RoundSizes.of(max_batch_size, num_draft_tokens, is_parallel=is_parallel)

    def launches(steps: list[int], form: Form = Form.GREEDY) -> int:
        return sum(_launches(num_layers, num_rows, form) for num_rows in steps)

    # What is of few sequences is recorded for short texts and for long ones.
    of_few = 1 + (capacity > MOST_CHUNKS * CHUNK)
    drafting = verifying = 0
    shapes = sizes.shapes()
    for places in sizes.packed:
        if (places, PACKED) not in shapes:
            num_rows = [places * (PACKED + 1)]
            verifying += sum(launches(num_rows, form) for form in sizes.forms(places))
    for places, most in shapes:
        times = of_few if places <= _FEW else 1
        for form in sizes.forms(places):
            drafting += times * launches([places * g for g in sizes.draft_groups(most)], form)
            verifying += times * launches([places * (most + 1)] * (2 if most else 1), form)
    num_launches = max(drafting, verifying)
    rows = [num_rows for num_rows in ROW_COUNTS if num_rows <= sizes.rows]
    num_launches += launches([*rows, *[row for row in rows if row <= _FEW] * (of_few - 1)])
    # The last layer once more, for prompts that are scored.
    num_launches += len(PROMPT_WIDTHS) * (num_layers + 1) * _LAUNCHES_OF_PROMPTS_LAYER
    return _FIRST_BYTES // 2 + _LAUNCH_BYTES * num_launches


def _launches(num_layers: int, num_rows: int, form: Form) -> int:
    """Returns the launches of one step of a model."""
    of_layer = _LAUNCHES_OF_LAYER if num_rows <= ROWS else _LAUNCHES_OF_WIDE_LAYER
    return num_layers * of_layer + _LAUNCHES_OF_STEP + _LAUNCHES_OF_DRAWING[form]
