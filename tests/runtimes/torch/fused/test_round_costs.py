"""What the times of rounds say about draft lengths."""

from __future__ import annotations

import pytest

from specpipe.runtimes.torch.fused.round_costs import costs_of
from specpipe.runtimes.torch.round_sizes import RoundSizes


def test_a_round_costs_what_the_one_does_that_runs_for_it() -> None:
    sizes = RoundSizes(max_members=4, rows=64, num_draft_tokens=8)
    seconds = {(places, most): 2.0 + places / 4 + most / 2 for places, most in sizes.shapes()}
    costs = costs_of(sizes, seconds)
    assert list(costs) == [1, 2, 3, 4]
    assert {(n, k) for n in costs for k in range(9) if costs[n].draft_step} == set()
    assert costs[1].verify == pytest.approx([k / 2 / 2.25 for k in range(9)])
    # Of five draft tokens there is a round of six, and not of three members each.
    lengths = [0, 1, 2, 3, 4, 6, 6, 8, 8]
    places = [4, 4, 4, 4, 3, 4, 4, 3, 3]
    wanted = [(2.0 + p / 4 + k / 2) / 3.0 - 1 for p, k in zip(places, lengths, strict=True)]
    assert costs[3].verify == pytest.approx(wanted)
