"""A prediction is followed as a reader would follow it; what is emitted does not depend on it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from specpipe.errors import RequestError
from specpipe.speculative.decode import decode
from specpipe.speculative.prediction import Prediction
from specpipe.speculative.request import Request, Sampling, Statistics
from specpipe.speculative.warp import softmax
from tests.speculative.table import NoisyModel, ScriptedModel, new_state, request


class Reader:
    """The same by reading: the most of the last tokens, nearest behind where the text was left."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self.prediction, self.output = list(prediction), list[int]()
        self.place, self.is_followed = 0, True

    def read(self, token_id: int) -> None:
        self.output.append(token_id)
        if self.is_followed and self.prediction[self.place : self.place + 1] == [token_id]:
            self.place += 1
            return
        self.is_followed = False
        for length in range(8, 1, -1):
            ends = [
                end
                for end in range(length, len(self.prediction) + 1)
                if self.prediction[end - length : end] == self.output[-length:]
            ]
            if ends:
                self.place = next((end for end in ends if end > self.place), ends[-1])
                self.is_followed = True
                return


@pytest.mark.parametrize("num_ids", [2, 3, 8, 40])
def test_a_prediction_is_followed_as_a_reader_follows_it(num_ids: int) -> None:
    rng = random.Random(num_ids)
    for length in (1, 2, 5, 30, 60):
        text = [rng.randrange(num_ids) for _ in range(length)]
        output = list(text)
        for _ in range(rng.randrange(4)):
            start = rng.randrange(length)
            output[start : start + rng.randrange(3)] = rng.choices(range(num_ids), k=2)
        prediction, reader = Prediction(text), Reader(text)
        for token_id in [*output, 1, 0, *output]:
            prediction.extend([token_id])
            reader.read(token_id)
            expected = text[reader.place : reader.place + 5] if reader.is_followed else []
            assert prediction.copy(5) == expected


def test_where_a_line_was_changed_the_rest_is_found_again() -> None:
    """Two tokens of it are enough, though the same two stood before, too."""
    text = [1, 2, 3, 9, 10, 11, 12, 4, 1, 2, 5, 6, 7]
    prediction = Prediction(text)
    prediction.extend([1, 2, 3])
    assert prediction.copy(3) == [9, 10, 11]
    prediction.extend([20, 21, 22, 1])
    assert prediction.copy(3) == []
    prediction.extend([2])
    assert prediction.copy(3) == [5, 6, 7]
    prediction.extend([5, 6, 7, 8])
    assert prediction.copy(3) == []


def test_what_came_true_is_the_measure_whoever_proposed_it() -> None:
    prediction = Prediction(range(100))
    before = prediction.acceptance_probability
    prediction.extend(range(20))
    assert prediction.acceptance_probability > 0.9 > before
    for place in range(20, 50, 3):  # found again, and wrong again
        prediction.extend([place, place + 1, 500])
    assert prediction.acceptance_probability < 0.7


def statistics_of(r: Request, target: object, draft: object = None) -> tuple[list[int], Statistics]:
    chunks = list(decode(new_state(r, vocab_size=104), target, draft))  # type: ignore[arg-type]
    assert chunks[-1].statistics is not None
    return [i for c in chunks for i in c.token_ids], chunks[-1].statistics


def test_tokens_of_the_prediction_are_counted_and_cost_no_draft() -> None:
    script = list(range(30, 50))
    predicted = [*script[:8], 90, 91, *script[9:]]
    r = request(max_tokens=20, num_draft_tokens=4, prediction_token_ids=tuple(predicted))
    found, statistics = statistics_of(r, ScriptedModel(3, script))
    assert found == script
    # 30 ... 34, 35 ... 37 and one that is not 90, then 39 and 40 alone, and the rest.
    assert statistics.num_steps == 6
    counts = (statistics.accepted_prediction_tokens, statistics.rejected_prediction_tokens)
    assert counts == (14, 1)
    assert (statistics.total_accepted_draft_tokens, statistics.total_draft_tokens) == (14, 15)
    assert statistics.draft_status == "drafted"


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_p": 0.9, "is_seeded": True}])
def test_output_does_not_depend_on_the_prediction(
    num_draft_tokens: int, settings: dict[str, float]
) -> None:
    target, draft = NoisyModel(1), NoisyModel(2, blend=0.4)
    sampling = Sampling(seed=7, **settings)  # type: ignore[arg-type]
    plain = request(prompt_token_ids=(1, 2), max_tokens=60, num_draft_tokens=0, sampling=sampling)
    expected, _ = statistics_of(plain, target)
    for changed in ([], [20], [0, 21, 22, 40]):
        predicted = [i if at not in changed else 11 - i for at, i in enumerate(expected)]
        r = request(
            prompt_token_ids=(1, 2),
            max_tokens=60,
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
            prediction_token_ids=tuple(predicted),
        )
        found, statistics = statistics_of(r, target, draft)
        assert found == expected
        if num_draft_tokens == 0:
            assert statistics.accepted_prediction_tokens == 0
            assert (statistics.total_draft_tokens, statistics.draft_status) == (0, "off_by_request")
        else:
            assert statistics.accepted_prediction_tokens > 15


def test_unseeded_output_has_the_distribution_of_the_target() -> None:
    """A copied token is one that was drawn with probability 1. Three tokens, so that what follows
    an accepted and what follows a rejected one both count.
    """
    table = np.random.default_rng(0).normal(size=(4, 4))
    warped = np.stack([softmax(row / 0.8) for row in table])
    probs = np.einsum("i,ij,jk->ijk", warped[1], warped, warped)
    num_draws = 250
    first, second, _ = np.unravel_index(int(probs.argmax()), probs.shape)
    for prediction in ((first, second), (first, (second + 1) % 4)):
        found = np.zeros_like(probs)
        for seed in range(num_draws):
            r = request(
                prompt_token_ids=(1,),
                max_tokens=3,
                num_draft_tokens=2,
                sampling=Sampling(temperature=0.8, seed=seed),
                prediction_token_ids=tuple(int(i) for i in prediction),
            )
            found[tuple(statistics_of(r, TableOfRows(table))[0])] += 1
        expected = num_draws * probs
        is_rare = expected < 5.0
        found, expected = (
            np.append(counts[~is_rare], counts[is_rare].sum()) for counts in (found, expected)
        )
        # At most 63 degrees of freedom: p < 3e-4 beyond.
        assert ((found - expected) ** 2 / expected).sum() < 110.0


class TableOfRows:
    """Logits of the token before."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table

    def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray:
        return self.table[token_ids[len(token_ids) - num_rows :]]


def test_a_prediction_of_ids_that_do_not_exist_is_refused() -> None:
    with pytest.raises(RequestError, match="^token id 104 is outside the vocabulary of 104$"):
        new_state(request(prediction_token_ids=(4, 104)))
