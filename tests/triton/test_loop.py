"""The loop's thread: order, cancellation, refusals, faults."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from specpipe.errors import RequestError
from specpipe.runtimes.pair.pair import Occupancy
from specpipe.speculative.guide import Guide
from specpipe.speculative.request import Chunk, Request
from specpipe.triton import loop as loop_module
from specpipe.triton.loop import PairLoop
from tests.waiting import wait_until

GUIDE, BAD_GUIDE = Guide(type="json"), Guide(type="regex", text="(")


class CountingPair:
    """Emits "1", "2", ... for each request, max_tokens of them; its steps wait for `go`."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.fault: Exception | None = None
        self.may_compile = threading.Semaphore(0)
        self.num_steps = 0
        self.num_interrupts = 0
        self.is_closed = False
        self._running: dict[str, list[int]] = {}
        self._cancelled: set[str] = set()

    def prepare(self, request: Request) -> None:
        self.may_compile.acquire()
        if request.guide == BAD_GUIDE:
            raise RequestError("guided_decoding_guide: it is bad")

    def submit(self, request: Request) -> str:
        if request.max_tokens > 100:
            raise RequestError("max_tokens is 101; prompt and output together may have 100")
        self._running[request.request_id] = [0, request.max_tokens]
        return request.request_id

    def cancel(self, request_id: str) -> None:
        self._cancelled.add(request_id)

    def has_work(self) -> bool:
        return bool(self._running)

    def interrupt(self) -> None:
        self.num_interrupts += 1

    def close(self) -> None:
        self.is_closed = True

    def occupancy(self) -> Occupancy:
        return Occupancy(num_running=len(self._running))

    def step(self) -> list[Chunk]:
        self.go.acquire()
        if self.fault is not None:
            raise self.fault
        self.num_steps += 1
        chunks = []
        for request_id in list(self._running):
            count = self._running[request_id]
            count[0] += 1
            is_cancelled = request_id in self._cancelled
            is_last = is_cancelled or count[0] == count[1]
            chunks.append(
                Chunk(
                    request_id=request_id,
                    text="" if is_cancelled else str(count[0]),
                    finish_reason="cancelled" if is_cancelled else "length" if is_last else None,
                )
            )
            if is_last:
                del self._running[request_id]
        return chunks


class Caller:
    """One request's end of the loop."""

    def __init__(
        self, loop: PairLoop, name: str, max_tokens: int, guide: Guide | None = None
    ) -> None:
        self.received: queue.SimpleQueue[Chunk | RequestError] = queue.SimpleQueue()
        request = Request(
            request_id=name, prompt_token_ids=(1,), max_tokens=max_tokens, guide=guide
        )
        loop.submit(request, on_chunk=self.received.put, on_refusal=self.received.put)

    def next(self) -> Chunk:
        chunk = self.received.get(timeout=5)
        assert isinstance(chunk, Chunk)
        return chunk

    def texts(self) -> list[str]:
        """The texts up to the last chunk's."""
        texts = []
        while True:
            chunk = self.next()
            texts.append(chunk.text)
            if chunk.finish_reason is not None:
                return texts


@pytest.fixture
def pair() -> CountingPair:
    return CountingPair()


@pytest.fixture
def faults() -> list[str]:
    return []


@pytest.fixture
def loop(pair: CountingPair, faults: list[str]) -> Iterator[PairLoop]:
    made = PairLoop(pair, on_fault=lambda: faults.append("fault"))
    yield made
    pair.may_compile.release(1000)
    pair.go.release(1000)
    made.close()


def test_requests_join_while_others_run_and_each_gets_its_chunks_in_order(
    loop: PairLoop, pair: CountingPair
) -> None:
    first = Caller(loop, "a", 3)
    pair.go.release()
    assert first.next().text == "1"
    second = Caller(loop, "b", 2)
    pair.go.release(10)
    assert first.texts() == ["2", "3"]
    assert second.texts() == ["1", "2"]


def test_a_guide_is_compiled_while_the_steps_of_others_go_on(
    loop: PairLoop, pair: CountingPair, faults: list[str]
) -> None:
    guided = Caller(loop, "guided", 1, GUIDE)
    gone = Caller(loop, "gone", 1, GUIDE)
    refused = Caller(loop, "refused", 1, BAD_GUIDE)
    other = Caller(loop, "other", 2)
    pair.go.release(2)
    assert other.texts() == ["1", "2"]
    loop.cancel("gone")
    assert gone.next().finish_reason == "cancelled"
    pair.may_compile.release(3)
    assert str(refused.received.get(timeout=5)) == "guided_decoding_guide: it is bad"
    pair.go.release()
    assert guided.texts() == ["1"]
    assert gone.received.empty() and faults == []


def test_a_refused_request_hears_why_and_others_go_on(loop: PairLoop, pair: CountingPair) -> None:
    good, bad = Caller(loop, "a", 2), Caller(loop, "b", 101)
    pair.go.release(10)
    assert str(bad.received.get(timeout=5)).startswith("max_tokens is 101; ")
    assert good.texts() == ["1", "2"]


def test_an_exception_while_a_request_is_submitted_fails_that_one_alone(
    loop: PairLoop, pair: CountingPair, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = pair.submit

    def fail(request: Request) -> str:
        if request.request_id == "bad":
            raise TypeError("'<' not supported between instances of 'str' and 'int'")
        return submit(request)

    monkeypatch.setattr(pair, "submit", fail)
    good, bad = Caller(loop, "good", 2), Caller(loop, "bad", 2)
    pair.go.release(10)
    last = bad.next()
    assert (last.finish_reason, last.error) == (
        "error",
        "the request failed inside the server, whose log says how",
    )
    assert good.texts() == ["1", "2"]
    assert faults == []


def test_cancel_ends_a_request_and_unknown_ids_are_ignored(
    loop: PairLoop, pair: CountingPair
) -> None:
    caller = Caller(loop, "a", 100)
    loop.cancel("nobody")
    pair.go.release()
    caller.next()
    loop.cancel("a")
    pair.go.release(3)
    last = caller.next()
    while last.finish_reason is None:
        last = caller.next()
    assert last.finish_reason == "cancelled"


def test_a_fault_fails_open_and_later_requests_and_is_reported_once(
    loop: PairLoop, pair: CountingPair, faults: list[str]
) -> None:
    callers = [Caller(loop, name, 5) for name in ("a", "b")]
    pair.fault = ValueError("shapes differ")
    pair.go.release()
    for caller in callers:
        last = caller.next()
        assert last.finish_reason == "error"
        assert last.error == "the draft-verify loop failed: ValueError: shapes differ"
    late = Caller(loop, "c", 5).next()
    assert late.error == "the draft-verify loop failed: ValueError: shapes differ"
    assert faults == ["fault"]


def test_a_caller_that_cannot_be_answered_does_not_stop_the_others(
    loop: PairLoop, pair: CountingPair
) -> None:
    def fail(chunk: Chunk) -> None:
        raise OSError("the client is gone")

    request = Request(request_id="a", prompt_token_ids=(1,), max_tokens=50)
    loop.submit(request, on_chunk=fail, on_refusal=lambda exc: None)
    other = Caller(loop, "b", 3)
    pair.go.release(10)
    assert other.texts() == ["1", "2", "3"]


def test_close_cancels_what_is_open(pair: CountingPair) -> None:
    loop = PairLoop(pair)
    caller = Caller(loop, "a", 100)
    pair.go.release(2)
    caller.next()
    closing = threading.Thread(target=loop.close)
    closing.start()
    pair.go.release(10)
    closing.join(5)
    assert not closing.is_alive()
    last = caller.next()
    while last.finish_reason is None:
        last = caller.next()
    assert last.finish_reason == "cancelled"


def test_close_waits_for_no_interval_of_streams_that_have_ended(pair: CountingPair) -> None:
    loop = PairLoop(pair, stream_interval_s=60.0)
    caller = Caller(loop, "a", 4)
    pair.go.release(4)
    assert caller.texts() == ["1", "234"]
    closing = threading.Thread(target=loop.close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()


def test_a_closed_loop_answers_what_is_asked_then(pair: CountingPair) -> None:
    """Else the thread that asks would wait for ever: Ctrl-C closes a pair that many threads ask."""
    loop = PairLoop(pair)
    loop.close()
    assert Caller(loop, "late", 3).next() == Chunk(request_id="late", finish_reason="cancelled")


def test_rounds_hand_the_interpreter_over_sooner_while_answers_are_late(pair: CountingPair) -> None:
    usual_s, seen_s = sys.getswitchinterval(), []
    loop = PairLoop(pair, stream_interval_s=0.01)

    def take(chunk: Chunk) -> None:
        time.sleep(0.03)  # for each of four streams, so that none of them can be in time
        seen_s.append(sys.getswitchinterval())
        pair.go.release()

    for name in "abcd":
        request = Request(request_id=name, prompt_token_ids=(1,), max_tokens=100)
        loop.submit(request, on_chunk=take, on_refusal=lambda exc: None)
    pair.go.release()
    assert wait_until(lambda: len(seen_s) > 12)
    closing = threading.Thread(target=loop.close)
    closing.start()
    pair.go.release(100)
    closing.join()
    assert seen_s[0] == usual_s
    assert min(seen_s) < usual_s / 2
    assert sys.getswitchinterval() == usual_s


def reports_of_five_steps(pair: CountingPair) -> list[tuple[int, int]]:
    """The number of steps and of running requests in each report."""
    reported: list[tuple[int, int]] = []
    loop = PairLoop(pair, on_report=lambda steps, held: reported.append((steps, held.num_running)))
    caller = Caller(loop, "a", 5)
    pair.go.release(5)
    caller.texts()
    loop.close()
    return reported


def test_every_step_is_reported(pair: CountingPair) -> None:
    reported = reports_of_five_steps(pair)
    assert sum(num_steps for num_steps, _ in reported) == 5
    assert len(reported) <= 4


def test_what_runs_is_reported_while_it_runs(
    pair: CountingPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_REPORT_INTERVAL_S", 0.0)
    reported = reports_of_five_steps(pair)
    assert reported == [(0, 0), (0, 1), *[(1, 1)] * 4, (1, 0), (0, 0)]


def test_a_broken_pair_is_not_asked_what_it_holds(pair: CountingPair) -> None:
    reported: list[tuple[int, Occupancy]] = []
    loop = PairLoop(pair, on_fault=lambda: None, on_report=lambda *report: reported.append(report))
    caller = Caller(loop, "a", 5)
    pair.fault = ValueError("shapes differ")
    pair.go.release()
    assert caller.next().finish_reason == "error"
    assert pair.has_work()
    loop.close()
    assert reported[-1] == (0, Occupancy())


class WaitingPair(CountingPair):
    """Its steps wait until something happened, as those of a pair whose models run elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.go.release(1000)
        self._news = threading.Event()

    def submit(self, request: Request) -> str:
        self._news.set()
        return super().submit(request)

    def interrupt(self) -> None:
        self._news.set()

    def step(self) -> list[Chunk]:
        if not self._news.wait(5):
            raise TimeoutError("nobody said that there is news")
        self._news.clear()
        return super().step()


def test_news_reach_a_step_that_waits() -> None:
    loop = PairLoop(WaitingPair(), on_fault=lambda: None)
    first = Caller(loop, "a", 100)
    assert first.next().text == "1"
    second = Caller(loop, "b", 100)
    assert second.next().text == "1"
    loop.close()


def test_close_stops_what_the_pair_runs(pair: CountingPair) -> None:
    loop = PairLoop(pair)
    caller = Caller(loop, "a", 100)
    pair.go.release()
    caller.next()
    pair.go.release()
    loop.close()
    assert pair._cancelled == {"a"}
    assert pair.is_closed
