"""How far a token is from being drawn, under one noise for draft and target."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specpipe.evaluate.verification.scorer import ScoredText
from specpipe.evaluate.verification.seeded import SeededChoice
from specpipe.speculative.noise import Purpose, gumbel
from specpipe.speculative.request import Sampling

TEXT = ScoredText(prompt=(1, 2, 3), output=(4,), max_tokens=8)
NOISE = gumbel(5, 4, Purpose.TOKEN, 6)
"""At position 4, the fifth token of prompt and output."""


def choice(logits: list[float], **settings: float) -> SeededChoice:
    sampling = Sampling(**{"temperature": 0.5, "seed": 5, "is_seeded": True, **settings})  # type: ignore[arg-type]
    return SeededChoice(np.array(logits), TEXT, sampling)


def test_the_token_that_is_drawn_lacks_nothing() -> None:
    logits = np.array([1.0, 2.0, 0.5, 1.5, 0.0, 1.0])
    drawn = int(np.argmax(logits / 0.5 + NOISE))
    assert choice(list(logits)).shortfall((drawn,)) == 0.0


def test_without_a_cut_the_shortfall_is_the_difference_of_scores_times_temperature() -> None:
    """Logits that cancel the noise but for 0.25 of one token: that is what the others lack."""
    logits = -0.5 * NOISE
    logits[2] += 0.25
    made = choice(list(logits))
    assert made.shortfall((2,)) == 0.0
    assert made.shortfall((3,)) == pytest.approx(0.25)
    assert made.shortfall((0, 3, 2)) == 0.0


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.999999}, {"min_p": 1e-9}])
def test_a_cut_that_is_far_away_changes_nothing(cut: dict[str, float]) -> None:
    logits = -0.5 * NOISE
    logits[2] += 0.25
    logits[4] = -30.0
    assert choice(list(logits), **cut).shortfall((3,)) == pytest.approx(0.25, rel=1e-3)


def test_a_token_just_beyond_the_cut_lacks_what_brings_it_in() -> None:
    """With seed 7 the noise of ids 0 and 1 is 0.294 and 3.133, so 1 is drawn once it is let in.

    For that exp((2.99 - 3) / 0.5) must come to 0.999: the difference, 0.01, must shrink to 0.0005.
    """
    made = choice([3.0, 2.99, -40.0, -40.0, -40.0, -40.0], seed=7, min_p=0.999)
    assert made.shortfall((0,)) == 0.0
    assert made.shortfall((1,)) == pytest.approx(0.01 + 0.5 * math.log(0.999), rel=1e-3)


def test_a_token_that_wins_when_a_rival_falls_to_the_cut_lacks_little() -> None:
    """Top-p just lets in the second token, which the noise then draws. The first one is 0.32 behind
    it, and yet the one to be drawn if the cut falls a hair otherwise.
    """
    logits = [2.0, 2.0 - 0.5 * math.log(9.0), -40.0, -40.0, -40.0, -40.0]  # 0.9 and 0.1
    made = choice(logits, seed=7, top_p=0.9 + 1e-6)
    assert made.shortfall((1,)) == 0.0
    assert made.shortfall((0,)) < 1e-4
    assert choice(logits, seed=7).shortfall((0,)) == pytest.approx(0.321, abs=1e-3)


def test_an_id_that_is_not_used_is_never_drawn() -> None:
    logits = [1.0, 2.0, -math.inf, 1.5, 0.0, 1.0]
    assert choice(logits).shortfall((2,)) == math.inf
    assert choice(logits, top_p=0.9).shortfall((2,)) == math.inf


def test_the_magnitude_is_that_of_the_largest_logit() -> None:
    assert choice([1.0, -9.0, 3.0, 0.0, 0.0, 0.0]).magnitude == 3.0
