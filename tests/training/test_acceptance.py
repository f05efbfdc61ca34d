"""Acceptance, against decoding that is played step by step."""

from __future__ import annotations

import numpy as np
import pytest

from specpipe.training.acceptance import Counts, autoregressive, compare, count_text, total


def counts(num_tokens: float, num_steps: float) -> Counts:
    return Counts(num_tokens, num_steps, np.ones(2), np.ones(2), 1, 1, 1.0)


def test_a_greedy_answer_is_walked_as_decoding_does() -> None:
    agrees = np.array([1, 1, 0, 1, 1, 1, 1, 0, 1], float)
    # K = 3, steps: 0 1 and the target's 2; 3 4 5 and 6; none and 7; 8, which ends the text.
    found = count_text(autoregressive(agrees, 3), num_agreeing=7, sum_overlap=5.0)
    assert (found.num_tokens, found.num_steps) == (9, 4)
    assert found.drafted.tolist() == [4, 2, 2]
    assert found.accepted.tolist() == [3, 2, 1]
    assert found.acceptance_length == 9 / 4
    assert found.by_position == [3 / 4, 2 / 2, 1 / 2]
    assert found.to_json()["agreement"] == round(7 / 9, 4)


def test_the_steps_of_a_sampled_answer_are_those_of_many_plays() -> None:
    generator = np.random.default_rng(0)
    chances = generator.uniform(size=(12, 3))
    found = count_text(chances, num_agreeing=0, sum_overlap=0.0)
    num_plays, num_steps = 5_000, 0
    accepted = np.zeros(3)
    for _ in range(num_plays):
        place = 0
        while place < 12:
            num_steps += 1
            length = 0
            while length < min(3, 12 - place) and generator.uniform() < chances[place, length]:
                accepted[length] += 1
                length += 1
            place += length + 1
    assert found.num_steps == pytest.approx(num_steps / num_plays, rel=0.02)
    assert found.accepted == pytest.approx(accepted / num_plays, rel=0.06)


def test_counts_add_up_by_their_steps() -> None:
    assert total([counts(30, 10), counts(10, 10)]).acceptance_length == 2.0


def test_the_interval_of_a_gain_is_of_pairs() -> None:
    generator = np.random.default_rng(1)
    steps = generator.uniform(20, 80, size=40)  # files differ much more than the drafts do
    old = {str(n): counts(100, s) for n, s in enumerate(steps)}
    new = {str(n): counts(100, 0.9 * s) for n, s in enumerate(steps)}
    gain = compare(old, new)
    assert gain.new / gain.old == pytest.approx(1 / 0.9)
    assert 0 < gain.low < gain.difference < gain.high
    same = compare(old, old)
    assert (same.low, same.difference, same.high) == (0, 0, 0)
