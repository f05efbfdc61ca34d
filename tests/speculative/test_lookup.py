"""Copies are compared with a search of every place of the text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specpipe.speculative.adaptive import StepCosts, num_worth_copying
from specpipe.speculative.lookup import PromptLookup

CHEAP = StepCosts(0.0, [0.0, *[0.01 * (n + 1) for n in range(8)]])  # of one stream on an H100
DEAR = StepCosts(0.0, [0.0, *[0.9 * (n + 1) for n in range(8)]])


def searched(text: Sequence[int], num_tokens: int) -> list[int]:
    """The same by reading: each copied token joins the text before the next is looked for."""
    start = len(text) - 1  # else the last token again
    for length in (4, 3, 2):
        ends = [
            end
            for end in range(length, len(text))
            if text[end - length : end] == text[len(text) - length :]
        ]
        if ends:
            start = ends[-1]
            break
    longer = list(text)
    for place in range(start, start + num_tokens):
        longer.append(longer[place])
    return longer[len(text) :]


@pytest.mark.parametrize("num_ids", [2, 3, 6, 40])
def test_a_copy_is_what_followed_the_last_tokens_before(num_ids: int) -> None:
    rng = random.Random(num_ids)
    for length in [*range(1, 12), 40, 80]:
        for _ in range(20):
            text = [rng.randrange(num_ids) for _ in range(length)]
            assert PromptLookup(text).copy(7) == searched(text, 7)


def test_more_tokens_count_before_later_places() -> None:
    by_three, by_two = [1, 2, 3, 50], [9, 2, 3, 60]
    assert PromptLookup([*by_three, *by_two, 1, 2, 3]).copy(2) == [50, 9]
    assert PromptLookup([*by_three, *by_two, 8, 2, 3]).copy(2) == [60, 8]
    assert PromptLookup([*by_three, *by_two, 8, 7, 3]).copy(2) == [3, 3]


def test_a_text_that_grew_is_searched_whole() -> None:
    rng = random.Random(3)
    text = [rng.randrange(4) for _ in range(5)]
    lookup = PromptLookup(text)
    for num_new in (1, 3, 1, 9, 2, 30):
        new = [rng.randrange(4) for _ in range(num_new)]
        lookup.extend(new)
        text += new
        assert lookup.copy(5) == searched(text, 5)


def test_acceptance_is_of_what_came_whoever_proposed_it() -> None:
    lookup = PromptLookup([1, 2, 3])
    before = lookup.acceptance_probability
    lookup.extend([4, 5])
    lookup.extend([1, 2, 3, 4, 5])  # the first lap: nobody could know
    assert lookup.acceptance_probability < before / 2
    for _ in range(3):
        lookup.extend([1, 2, 3, 4, 5])
    assert lookup.acceptance_probability > 0.95
    lookup.extend([80])
    assert 0.7 < lookup.acceptance_probability < 0.9
    for token_id in range(81, 91):
        lookup.extend([token_id])
    assert lookup.acceptance_probability < 0.2


def test_what_copies_promise_decides() -> None:
    new, lap = PromptLookup([1, 2, 3, 4]), PromptLookup([1, 2, 3, 4] * 3)
    for _ in range(3):
        lap.extend([1, 2, 3, 4])
    for token_id in range(5, 15):
        new.extend([token_id])
    chance = {"new": new.acceptance_probability, "lap": lap.acceptance_probability}
    found = [
        num_worth_copying(chance[name], limit, costs, instead_of=other)
        for name, limit, costs, other in (
            ("new", 8, CHEAP, 1.0),
            ("lap", 8, CHEAP, 1.0),
            ("lap", 3, CHEAP, 1.0),
            ("lap", 8, CHEAP, 4.0),
            ("lap", 8, CHEAP, 9.0),
            ("lap", 8, DEAR, 1.0),
            ("lap", 0, CHEAP, 1.0),
            ("lap", -2, CHEAP, 1.0),
        )
    ]
    assert found == [0, 8, 3, 8, 0, 0, 0, 0]
