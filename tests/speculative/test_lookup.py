"""Copies are compared with a search of every place of the text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from specpipe.speculative.adaptive import StepCosts, num_worth_copying
from specpipe.speculative.lookup import CopyOdds, PromptLookup

CHEAP = StepCosts(0.0, [0.0, *[0.01 * (n + 1) for n in range(8)]])  # of one stream on an H100
DEAR = StepCosts(0.0, [0.0, *[0.9 * (n + 1) for n in range(8)]])


def searched(text: Sequence[int], num_tokens: int) -> list[int]:
    """The same by reading: each copied token joins the text before the next is looked for."""
    start = len(text) - 1  # else the last token again
    for length in (4, 3, 2, 1):
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
    assert PromptLookup([*by_three, *by_two, 8, 7, 3]).copy(2) == [60, 8]
    assert PromptLookup([*by_three, *by_two, 8, 7]).copy(2) == [7, 7]


def test_a_text_that_grew_is_searched_whole() -> None:
    rng = random.Random(3)
    text = [rng.randrange(4) for _ in range(5)]
    lookup = PromptLookup(text)
    for num_new in (1, 3, 1, 9, 2, 30):
        new = [rng.randrange(4) for _ in range(num_new)]
        lookup.extend(new)
        text += new
        assert lookup.copy(5) == searched(text, 5)


def test_tokens_that_match_are_counted_beyond_those_that_are_looked_for() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 9, 2, 3])
    found = [lookup.num_matched]
    for token_id in (4, 5, 6, 7, 1, 9, 2):
        lookup.extend([token_id])
        found.append(lookup.num_matched)
    assert found == [2, 3, 4, 5, 6, 1, 1, 2]
    assert lookup.copy(1) == [3]


def expected(odds: CopyOdds, num_matched: int, *, num_ahead: int = 0) -> list[float]:
    found: list[float] = odds.expected_tokens([num_matched], [num_ahead])[0].tolist()
    return found


def test_odds_are_of_all_texts_by_how_much_of_them_matched() -> None:
    """Two tokens that match are never right, six and more always."""
    odds = CopyOdds()
    for _ in range(600):
        PromptLookup([1, 2, 3, 1, 2], odds).extend([9])
        PromptLookup([1, 2, 3, 4, 5, 6] * 3, odds).extend([1, 2, 3, 4, 5, 6])
        for num_matched in (6, 8, 12, 16, 24):
            odds.observe(num_matched, True)
        odds.observe(0, False, follows=False)
    assert expected(odds, 2)[4] < 1.01
    assert expected(odds, 6)[4] > 4.9
    # Three tokens ahead it will be six that match, if they all come as those of a copy.
    assert expected(odds, 3, num_ahead=3)[4] == pytest.approx(
        1.0 + 4.0 * (expected(odds, 3)[3] - expected(odds, 3)[2]), rel=0.01
    )
    assert expected(odds, 500, num_ahead=500)[:2] == pytest.approx([1.0, 2.0], abs=0.1)


def test_behind_a_token_that_no_copy_would_have_had_one_may_begin_anew() -> None:
    """What is unknown of a text is likely to hold such a token."""
    found = []
    for emitted in ([9, 1], [9, 9]):  # what 9 is followed by nobody knows: 9 is copied
        odds = CopyOdds()
        for _ in range(600):
            PromptLookup([1, 2, 3, 1, 2], odds).extend(emitted)
        found.append(expected(odds, 2, num_ahead=9)[1])
        assert expected(odds, 2)[1] < 1.01
    assert found == pytest.approx([1.0, 2.0], abs=0.02)


def test_what_is_expected_grows_with_what_is_copied_and_falls_with_what_is_unknown() -> None:
    odds = CopyOdds()
    for num_matched in (0, 2, 3, 4, 9, 40):
        by_length = expected(odds, num_matched)
        assert by_length[0] == 1.0
        assert by_length == sorted(by_length)
        assert all(b - a <= 1.0 for a, b in pairwise(by_length))
        assert by_length[1] <= 2.0
        if num_matched:
            assert expected(odds, num_matched, num_ahead=5)[1] < by_length[1]


def test_what_copies_promise_decides() -> None:
    odds = CopyOdds()
    chance = {"new": expected(odds, 0), "lap": expected(odds, 40)}
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
