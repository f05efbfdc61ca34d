from __future__ import annotations

import pytest

from specpipe.errors import RequestError
from specpipe.runtimes.pair.admission import WaitingRequests
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.speculative.request import Request


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def request(name: str, **settings: float) -> Request:
    return Request(request_id=name, prompt_token_ids=(4,), max_tokens=1, **settings)  # type: ignore[arg-type]


def test_by_priority_then_by_arrival() -> None:
    waiting = WaitingRequests(PairOptions())
    for name, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0)):
        waiting.put(request(name, priority=priority), num_running=0)
    assert [waiting.pop().request.request_id for _ in range(4)] == ["c", "b", "d", "a"]
    assert not waiting


def test_one_more_than_the_queue_holds_is_refused() -> None:
    waiting = WaitingRequests(PairOptions(max_queue_size=1))
    waiting.put(request("a"), num_running=8)
    with pytest.raises(RequestError) as caught:
        waiting.put(request("b"), num_running=8)
    assert str(caught.value) == (
        "the queue is full: 1 requests wait (serving.max_queue_size), 8 run; try again later"
    )


def test_deadlines_are_those_of_requests_or_of_the_pair() -> None:
    clock = Clock()
    waiting = WaitingRequests(PairOptions(request_timeout_s=60), clock=clock)
    assert waiting.next_deadline() is None
    for name, settings in (
        ("a", {"timeout_s": 1e300}),  # no longer than the pair's own
        ("b", {"timeout_s": 5.0}),
        ("c", {"timeout_s": 2.0}),
    ):
        waiting.put(request(name, **settings), num_running=0)
    assert waiting.next_deadline() == 102.0
    clock.now = 105.0
    overdue = waiting.take_overdue(clock())
    assert [w.request.request_id for w in overdue] == ["b", "c"]
    assert overdue[0].overdue(105.5) == (
        "the request waited 5.5 s without being started, which is its time limit "
        "(timeout_s or serving.request_timeout_s)"
    )
    assert waiting.next_deadline() == 160.0
    assert len(waiting) == 1


def test_one_request_can_be_taken_out() -> None:
    waiting = WaitingRequests(PairOptions())
    for name in "abc":
        waiting.put(request(name), num_running=0)
    taken = waiting.take("b")
    assert taken is not None and taken.request.request_id == "b"
    assert waiting.take("b") is None
    assert [waiting.pop().request.request_id for _ in range(2)] == ["a", "c"]
