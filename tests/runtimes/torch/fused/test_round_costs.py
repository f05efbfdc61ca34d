"""What the times of rounds say about draft lengths."""

from __future__ import annotations

import pytest

from specpipe.runtimes.torch.fused.round_costs import costs_of, packed_costs_of
from specpipe.runtimes.torch.round_sizes import RoundSizes


def test_a_round_costs_what_the_next_greater_one_does_less_the_texts_it_lacks() -> None:
    sizes = RoundSizes(max_members=4, rows=64, num_draft_tokens=8)
    seconds = {(members, most): 2.0 + members / 4 + most / 2 for members, most in sizes.shapes()}
    costs = costs_of(sizes, seconds)
    assert list(costs) == [1, 2, 3, 4]
    assert costs[1].verify == pytest.approx([k / 2 / 2.25 for k in range(9)])
    # Three are not timed, nor are five draft tokens of several, nor seven.
    lengths = [0, 1, 2, 3, 4, 6, 6, 8, 8]
    assert costs[3].verify == pytest.approx([k / 2 / 2.75 for k in lengths])
    assert costs[3].seconds == 2.75
    assert costs_of(sizes, {}) == {}


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 5, 15])
@pytest.mark.parametrize("max_batch_size", [1, 2, 3, 7, 48, 128, 300])
def test_every_number_of_members_has_costs(max_batch_size: int, num_draft_tokens: int) -> None:
    sizes = RoundSizes.of(max_batch_size, num_draft_tokens)
    costs = costs_of(sizes, dict.fromkeys(sizes.shapes(), 1.0))
    for num_members in range(1, sizes.max_members + 1):
        most = sizes.most_draft_tokens(num_members)
        assert costs[num_members].verify == [0.0] * (most + 1)


def test_packed_rounds_cost_what_others_do_that_are_as_wide() -> None:
    sizes = RoundSizes(max_members=8, rows=128, num_draft_tokens=8)
    copying = {(1, 0): 9.0, (1, 8): 1.0, (2, 6): 1.1, (8, 1): 1.2, (8, 3): 2.0, (7, 8): 3.0}
    assert packed_costs_of(sizes, copying) == {8: 1.2, 16: 2.0, 32: 3.0}
    assert packed_costs_of(sizes, {}) == {}
