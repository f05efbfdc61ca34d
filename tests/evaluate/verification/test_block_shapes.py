"""Agreement of a target with itself, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specpipe.evaluate.verification.block_shapes import (
    Agreement,
    measure_agreement,
    measure_block_difference,
)
from specpipe.evaluate.verification.scorer import ScoredText
from tests.evaluate.verification.table import TableScorer
from tests.speculative.table import TableModel, half_rule, target_rule

TEXTS = [
    ScoredText(prompt=(4, 5), output=(10, 20, 30, 40, 50, 60), max_tokens=8),
    ScoredText(prompt=(4, 5, 6), output=(), max_tokens=8),
]
SCORER = TableScorer(TableModel(target_rule), in_blocks=TableModel(half_rule))
"""In blocks it chooses otherwise where the length is odd: 3 of the first text's 7 rows, after 3, 5
and 7 tokens, and the only one of the second."""


def test_what_is_chosen_in_both_shapes_is_counted() -> None:
    found = measure_agreement(SCORER, TEXTS, 5, lambda index, rows: rows.argmax(axis=1).tolist())
    assert found == Agreement(num_same=4, num_compared=8)
    same = measure_agreement(SCORER, TEXTS, 1, lambda index, rows: rows.argmax(axis=1).tolist())
    assert same == Agreement(num_same=8, num_compared=8)


def test_three_standard_errors_are_left_to_chance() -> None:
    """Were it 0.6577, 80 of 100 would be three standard errors above: sqrt(0.6577 * 0.3423 / 100)
    is 0.04745. All of n are that above n / (n + 9).
    """
    assert Agreement(80, 100).rate == 0.8
    assert Agreement(80, 100).least_rate == pytest.approx(0.8 - 3 * 0.04745, abs=1e-4)
    assert Agreement(18, 18).least_rate == pytest.approx(18 / 27)
    assert Agreement(100, 100).least_rate == pytest.approx(100 / 109)
    assert Agreement(0, 100).least_rate == 0.0


def test_the_percentile_is_over_texts_that_have_an_output() -> None:
    """One token is at 1 and all others at 0. Where the shapes choose otherwise, the distance of the
    one that wins in blocks to the best one goes from -1 to +1, and that of the others from -1 to 0.
    """
    found = measure_block_difference(SCORER, TEXTS, [5])
    assert found.value == 2.0
    assert found.num_compared == 2 * 7 * 99  # in blocks, and all together; 99 beside the best
    alone = measure_block_difference(SCORER, TEXTS[1:], [5])
    assert (alone.value, alone.num_compared) == (0.0, 0)


def test_what_is_never_used_is_no_difference() -> None:
    class Holes(TableModel):
        def logits(self, token_ids: object, num_rows: int) -> np.ndarray:
            rows = super().logits(token_ids, num_rows)  # type: ignore[arg-type]
            rows[:, 60:] = -np.inf
            return rows

    scorer = TableScorer(Holes(lambda context: 5), in_blocks=Holes(lambda context: 6))
    found = measure_block_difference(scorer, TEXTS, [5])
    assert (found.value, found.num_compared) == (2.0, 2 * 7 * 59)
