from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from specpipe.errors import ServerError
from specpipe.evaluate.bench.load import in_turns, run_load
from specpipe.evaluate.endpoints.base import CutStream, Piece, Question
from tests.evaluate.endpoints.scripted import Scripted
from tests.waiting import PATIENCE_S

QUESTIONS = [Question(text=str(number), max_tokens=1) for number in range(6)]


class Counting:
    """Notes how many answers are under way whenever one begins or ends.

    meeting  of so many the first answers go on only once all of them have begun
    """

    name = "counting"

    def __init__(self, seconds: float = 0.02, *, meeting: int = 1) -> None:
        self.seconds = seconds
        self._meeting, self._all_here = meeting, threading.Barrier(meeting, timeout=PATIENCE_S)
        self.asked: list[str] = []
        self.num_under_way: list[int] = []
        self._now = 0
        self._lock = threading.Lock()

    def stream(self, question: Question) -> Iterator[Piece]:
        assert question.text is not None
        with self._lock:
            self._now += 1
            self.asked.append(question.text)
            self.num_under_way.append(self._now)
            is_first = len(self.asked) <= self._meeting
        try:
            if is_first:
                self._all_here.wait()
            for _ in range(4):
                time.sleep(self.seconds / 4)
                yield Piece(text=question.text, num_tokens=1)
        finally:
            with self._lock:
                self._now -= 1

    def close(self) -> None: ...


def test_answers_are_those_of_the_questions_in_their_order() -> None:
    load = run_load(Counting(), QUESTIONS, concurrency=2)
    assert [answer.text for answer in load.answers] == [f"{n}{n}{n}{n}" for n in range(6)]
    assert load.concurrency == 2


def test_one_stream_asks_one_question_at_a_time() -> None:
    endpoint = Counting(0.0)
    run_load(endpoint, QUESTIONS, concurrency=1)
    assert endpoint.num_under_way == [1] * 7
    # The first is the warm-up: its answer is dropped, and nothing follows the last.
    assert endpoint.asked == ["5", "0", "1", "2", "3", "4", "5"]


def test_all_streams_are_busy_until_the_last_measured_answer() -> None:
    """The last question is answered once the others have been asked again and again."""
    is_asked_again = threading.Event()

    class LastWaits(Counting):
        def stream(self, question: Question) -> Iterator[Piece]:
            is_last = question.text == "5" and self.asked.count("5") == 1
            pieces = super().stream(question)
            yield next(pieces)
            # Warm-up 3, measured 6: what comes then only keeps the streams busy.
            if len(self.asked) > 9 + 4:
                is_asked_again.set()
            if is_last:
                assert is_asked_again.wait(PATIENCE_S)
            yield from pieces

    endpoint = LastWaits(0.004, meeting=3)
    load = run_load(endpoint, QUESTIONS, concurrency=3)
    assert is_asked_again.is_set()
    assert max(endpoint.num_under_way) == 3
    assert [answer.text[0] for answer in load.answers] == ["0", "1", "2", "3", "4", "5"]


def test_more_streams_than_questions_are_busy_too() -> None:
    endpoint = Counting(meeting=5)
    load = run_load(endpoint, QUESTIONS[:2], concurrency=5)
    assert max(endpoint.num_under_way) == 5
    assert [answer.text[0] for answer in load.answers] == ["0", "1"]


def test_warm_up_comes_first_and_is_thrown_away() -> None:
    endpoint = Counting(0.0)
    load = run_load(endpoint, QUESTIONS, concurrency=1, num_warm_up=4)
    assert endpoint.asked == ["2", "3", "4", "5", "0", "1", "2", "3", "4", "5"]
    assert len(load.answers) == 6


def test_failures_are_answers_and_end_no_load() -> None:
    def script(question: Question) -> list[tuple[float, Piece | Exception]]:
        if question.text == "1":
            return [(0.0, ServerError("no"))]
        if question.text == "2":
            return [(0.0, Piece(text="a")), (0.0, CutStream("off"))]
        return [(0.0, Piece(text="a"))]

    load = run_load(Scripted(script), QUESTIONS, concurrency=2)
    assert Counter(answer.ending for answer in load.answers) == {
        "complete": 4,
        "failed": 1,
        "cut": 1,
    }


def test_a_bug_in_one_stream_ends_them_all() -> None:
    def script(question: Question) -> list[tuple[float, Piece | Exception]]:
        return [(0.0, ZeroDivisionError() if question.text == "5" else Piece(text="a"))]

    with pytest.raises(ZeroDivisionError):
        run_load(Scripted(script), [*QUESTIONS, *QUESTIONS[:5]], concurrency=2)


def test_times_can_be_told_since_1970() -> None:
    before = time.time()
    load = run_load(Counting(0.0), QUESTIONS[:1], concurrency=1)
    assert before - 0.1 <= load.answers[0].started_s + load.epoch_s <= time.time() + 0.1


def test_sides_take_turns_in_alternating_order() -> None:
    assert "".join(in_turns("AB", 3)) == "ABBAAB"
