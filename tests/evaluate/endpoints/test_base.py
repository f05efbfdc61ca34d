from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from specpipe.errors import RequestError, ServerError
from specpipe.evaluate.endpoints.base import (
    CutStream,
    Piece,
    Question,
    Usage,
    ask,
    given_settings,
    record,
)
from specpipe.speculative.request import Sampling, Statistics
from tests.evaluate.endpoints.scripted import Scripted
from tests.waiting import PATIENCE_S

QUESTION = Question(text="x", max_tokens=4)
LAST = Piece(text="c", token_ids=(3,), num_tokens=1, finish_reason="length")


def test_an_answer_has_the_time_of_each_piece() -> None:
    first = Piece(text="ab", token_ids=(1, 2), num_tokens=2)
    endpoint = Scripted(lambda question: [(0.5, first), (0.25, LAST)])
    endpoint.clock.now_s = 10.0
    answer = record(endpoint, QUESTION, clock=endpoint.clock)
    assert (answer.started_s, answer.arrivals_s, answer.ended_s) == (10.0, (10.5, 10.75), 10.75)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("abc", (1, 2, 3), "length")
    assert (answer.ending, answer.error, answer.num_output_tokens) == ("complete", None, 3)


@pytest.mark.parametrize(
    ("failure", "ending"),
    [
        (CutStream("it broke off"), "cut"),
        (ServerError("no memory"), "failed"),
        (RequestError("max_tokens is 0"), "failed"),
    ],
)
def test_a_failure_becomes_part_of_the_answer(failure: Exception, ending: str) -> None:
    endpoint = Scripted(lambda question: [(1.0, Piece(text="a")), (2.0, failure)])
    answer = record(endpoint, QUESTION, clock=endpoint.clock)
    assert (answer.ending, answer.error) == (ending, str(failure))
    assert (answer.text, answer.arrivals_s, answer.ended_s) == ("a", (1.0,), 3.0)
    assert not answer.is_complete


def test_a_bug_is_no_answer() -> None:
    endpoint = Scripted(lambda question: [(1.0, ZeroDivisionError())])
    with pytest.raises(ZeroDivisionError):
        record(endpoint, QUESTION)


def test_the_reported_count_wins_and_an_unknown_one_stays_unknown() -> None:
    def count(*pieces: Piece) -> int | None:
        endpoint = Scripted(lambda question: [(0.0, piece) for piece in pieces])
        return record(endpoint, QUESTION, clock=endpoint.clock).num_output_tokens

    reported = Piece(finish_reason="stop", usage=Usage(num_output_tokens=5))
    assert count(Piece(text="a", num_tokens=1), reported) == 5
    assert count(Piece(text="a", num_tokens=1), Piece(text="b", num_tokens=2)) == 3
    assert count(Piece(text="a", num_tokens=1), Piece(text="b")) is None
    assert count(Piece(), Piece(text="a", num_tokens=1), Piece(finish_reason="stop")) == 1


def test_ids_are_unknown_where_a_piece_lacks_them() -> None:
    endpoint = Scripted(lambda question: [(0.0, Piece(text="a")), (0.0, LAST)])
    assert record(endpoint, QUESTION, clock=endpoint.clock).token_ids is None


def test_usage_has_the_fields_of_the_statistics() -> None:
    statistics = Statistics(
        num_input_tokens=1,
        num_output_tokens=2,
        num_steps=3,
        total_draft_tokens=4,
        total_accepted_draft_tokens=5,
        seed_used=6,
        acceptance_rate=1.25,
        is_lossless=False,
        draft_status="drafted",
        accepted_prediction_tokens=7,
        rejected_prediction_tokens=8,
        acceptance_histogram=(9, 10),
        num_cached_input_tokens=11,
        num_preemptions=12,
    )
    assert Usage.from_statistics(statistics) == Usage(
        num_input_tokens=1,
        num_output_tokens=2,
        num_steps=3,
        total_draft_tokens=4,
        total_accepted_draft_tokens=5,
        seed_used=6,
        is_lossless=False,
        draft_status="drafted",
        accepted_prediction_tokens=7,
        rejected_prediction_tokens=8,
        acceptance_histogram=(9, 10),
        num_cached_input_tokens=11,
        num_preemptions=12,
    )


def test_answers_come_in_the_order_of_the_questions() -> None:
    """Each of the three waits until all have been asked, so they were asked at once."""
    barrier = threading.Barrier(3, timeout=PATIENCE_S)

    class AllAtOnce(Scripted):
        def stream(self, question: Question) -> Iterator[Piece]:
            barrier.wait()
            yield Piece(text=question.text or "")

    questions = [Question(text=text, max_tokens=1) for text in "abc"]
    answers = ask(AllAtOnce(lambda question: []), questions, at_once=3)
    assert [answer.text for answer in answers] == ["a", "b", "c"]
    assert [answer.question for answer in answers] == questions


def test_only_given_settings_are_sent() -> None:
    assert given_settings(QUESTION) == {}
    sampling = Sampling(temperature=0.5, top_k=7, seed=3, is_seeded=True)
    question = Question(text="x", max_tokens=4, num_draft_tokens=0, sampling=sampling)
    assert given_settings(question) == {
        "temperature": 0.5,
        "top_k": 7,
        "seed": 3,
        "num_draft_tokens": 0,
    }
    unseeded = Question(text="x", max_tokens=4, sampling=Sampling(temperature=0.5, seed=3))
    assert given_settings(unseeded) == {"temperature": 0.5}


def test_words_as_token_ids_go_to_a_pair_only() -> None:
    question = Question(text="x", max_tokens=4, sampling=Sampling(bad_words=((5,),)))
    with pytest.raises(RequestError, match="^bad_words: as token ids only a pair in this process"):
        given_settings(question)
