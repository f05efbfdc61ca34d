from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from specpipe.errors import RequestError, ServerError
from specpipe.evaluate.endpoints.base import Piece, Question, Usage
from specpipe.evaluate.endpoints.in_process import InProcess
from specpipe.evaluate.tune import schedule
from specpipe.evaluate.tune.measure import (
    Cell,
    Measurement,
    _student_t,
    compare,
    doubt,
    measure_cell,
    whole_rounds,
)
from tests.runtimes.table_engine import make_pair
from tests.speculative.table import TableModel, target_rule


def test_ratio_over_all_rounds_and_of_each() -> None:
    """At concurrency 2 alone 100 and 200 tokens in 10 s of a stream, with K = 4 as many in 5 and
    16: rates 2 · 300 / 20 = 30 and 2 · 300 / 21 = 28.57; single rounds 2 and 0.625 times.
    """
    cells = [
        Cell(2, 0, 0, 100, 10.0),
        Cell(2, 4, 0, 100, 5.0),
        Cell(2, 4, 1, 200, 16.0),
        Cell(2, 0, 1, 200, 10.0),
    ]
    assert compare(cells) == [
        Measurement(
            concurrency=2,
            num_draft_tokens=4,
            tokens_per_s=pytest.approx(600 / 21),
            speed_up=pytest.approx(20 / 21),
            lowest=pytest.approx(0.625),
            highest=pytest.approx(2.0),
            # exp of the logarithms' mean -+ 12.706 standard errors, with two rounds
            low=pytest.approx(math.exp(-7.2781), rel=1e-3),
            high=pytest.approx(math.exp(7.5013), rel=1e-3),
        )
    ]


def rounds(*ratios: float, tokens: float = 3.0) -> list[Measurement]:
    """One measurement of 2 draft tokens with these ratios to the target alone, round by round."""
    cells = [Cell(1, 0, number, 100, 10.0) for number in range(len(ratios))]
    cells += [Cell(1, 2, number, 100, 10.0 / ratio) for number, ratio in enumerate(ratios)]
    return compare(cells, {2: tokens})


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (rounds(1.5, 1.52, 1.49), None),  # pays
        (rounds(0.8, 0.83, 0.79), None),  # does not
        (rounds(1.01, 1.02, 1.015, 1.012), None),  # neither, but is known closely
        (
            rounds(1.95, tokens=1.48),
            "concurrency 1, K = 2: measured 1.95, which cannot be: a step gives 1.48 tokens at "
            "most, and no speed-up is more; other work disturbed the measurement",
        ),
        (
            rounds(1.95, 1.94, 1.96, tokens=1.48),
            "concurrency 1, K = 2: measured 1.95, which cannot be: a step gives 1.48 tokens at "
            "most, and no speed-up is more; other work disturbed the measurement",
        ),
        (rounds(1.4), "concurrency 1, K = 2: measured 1.40 in a single round, which may be chance"),
        (
            rounds(1.0, 1.4, 1.2),
            "concurrency 1, K = 2: measured 1.18, with 95% between 0.78 and 1.81, which leaves "
            "open what pays",
        ),
        (
            rounds(0.7, 1.1),
            "concurrency 1, K = 2: measured 0.86, with 95% between 0.05 and 15.50, which leaves "
            "open what pays",
        ),
    ],
)
def test_what_may_be_chance_is_told(measured: list[Measurement], says: str | None) -> None:
    assert schedule.doubt(measured) == says


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042)]
)
def test_students_quantiles(degrees: int, quantile: float) -> None:
    """As every table has them."""
    assert _student_t(degrees) == pytest.approx(quantile, rel=0.002)


def test_rounds_that_are_far_apart_are_doubted() -> None:
    assert doubt([(1.0, 1.29), (0.5, 0.6)]) is None
    assert doubt([]) is None
    assert doubt([(1.0, 1.29), (0.5, 1.3)]) == (
        "Rounds of one measurement differ by a factor of up to 2.6: other work disturbed this "
        "machine, and what measured best may be chance. Tune again when it is quiet, or with more "
        "--rounds."
    )


def test_interrupted_rounds_do_not_count() -> None:
    whole = [Cell(1, 0, 0, 9, 1.0), Cell(1, 2, 0, 9, 1.0)]
    cells = [*whole, Cell(1, 0, 1, 9, 1.0), Cell(4, 0, 0, 9, 1.0)]
    assert whole_rounds(cells, {1: [0, 2], 4: [0, 2]}) == whole
    assert whole_rounds(cells, {1: [0, 3], 4: [0, 3]}) == []  # other draft lengths are wanted now


class Words:
    """No prompt here is a text."""

    end_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_messages(self, messages: object) -> list[int]:
        raise NotImplementedError

    def encode_fragment(self, text: str) -> list[int]:
        raise NotImplementedError

    def is_used(self, token_id: int) -> bool:
        return True


def question(max_tokens: int) -> Question:
    return Question(token_ids=(4, 5, 6), max_tokens=max_tokens)


def test_every_stream_has_a_question() -> None:
    pair = make_pair(TableModel(target_rule), TableModel(target_rule), num_draft_tokens=4)
    endpoint = InProcess(pair, Words())
    cell = measure_cell(
        endpoint, [question(7), question(2)], concurrency=3, num_draft_tokens=4, round_number=1
    )
    endpoint.close()
    assert (cell.concurrency, cell.num_draft_tokens, cell.round_number) == (3, 4, 1)
    assert cell.num_tokens == 2 * (7 + 2)  # each of the two, asked twice
    assert cell.stream_s > 0


class Failing:
    name = "failing"

    def stream(self, question: Question) -> Iterator[Piece]:
        if question.max_tokens == 2:
            raise RequestError("no room")
        yield Piece(text="a", num_tokens=1, finish_reason="length")

    def close(self) -> None: ...


def test_a_failed_question_is_no_measurement() -> None:
    with pytest.raises(ServerError) as caught:
        measure_cell(
            Failing(),
            [question(1), question(2)],
            concurrency=1,
            num_draft_tokens=3,
            round_number=0,
        )
    assert str(caught.value) == (
        "1 of 2 questions failed with 3 draft tokens at concurrency 1: no room"
    )


class Silent:
    name = "silent"

    def stream(self, question: Question) -> Iterator[Piece]:
        yield Piece(finish_reason="stop", usage=Usage(num_output_tokens=0))

    def close(self) -> None: ...


def test_answers_without_a_token_have_no_speed() -> None:
    with pytest.raises(ServerError, match="^the target ends every answer at once, .* with --chat$"):
        measure_cell(Silent(), [question(7)], concurrency=1, num_draft_tokens=2, round_number=0)
