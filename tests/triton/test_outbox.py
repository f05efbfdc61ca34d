"""Which chunks leave together, and when: by a clock that is set, and responses that take of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe.speculative.request import Chunk, FinishReason
from specpipe.triton.outbox import Outbox


class Line:
    """A sending thread: a response takes response_s of its time. What left, and when it began to.

    A round gives each stream its number as text.
    """

    def __init__(self, interval_s: float | None, *, response_s: float = 0.0) -> None:
        self.now = 0.0
        self.sent: list[tuple[float, str, str]] = []
        self.num_gathered = 0
        self._response_s = response_s
        self._outbox = Outbox(interval_s, on_gathered=self._count_gathered, clock=lambda: self.now)

    def _count_gathered(self, num_chunks: int) -> None:
        self.num_gathered += num_chunks

    def add(
        self, name: str, text: str, end: FinishReason | None = None, *, is_stream: bool = True
    ) -> None:
        chunk = Chunk(request_id=name, text=text, finish_reason=end)
        self._outbox.add(chunk, self._send, is_stream=is_stream)

    def call(self, name: str) -> None:
        self._outbox.add_call(lambda: self.sent.append((self.now, "call", name)))

    def _send(self, chunk: Chunk) -> None:
        self.sent.append((self.now, chunk.request_id, chunk.text))
        self.now += self._response_s

    def run_until(self, end_s: float) -> None:
        """Sends what is due by then; what has begun is sent to its end."""
        while (wait_s := self._outbox.wait_s()) is not None and self.now + wait_s < end_s:
            self.now += wait_s
            assert self._outbox.send_next()
        self.now = max(self.now, end_s)

    @property
    def late_s(self) -> float:
        return self._outbox.late_s

    def texts(self, name: str) -> str:
        return "".join(text for _, to, text in self.sent if to == name)

    def gaps_s(self, name: str) -> list[float]:
        """Between the responses of a stream but the first and the last, which those of all streams
        are in one round with.
        """
        times = [at for at, to, _ in self.sent if to == name][1:-1]
        return [after - before for before, after in zip(times, times[1:], strict=False)]


def run_rounds(line: Line, names: Sequence[str], *, num_rounds: int, round_s: float) -> None:
    for number in range(num_rounds):
        line.run_until(number * round_s)
        for name in names:
            line.add(name, f"{number} ", "length" if number == num_rounds - 1 else None)
    line.run_until(float("inf"))


def test_the_first_text_and_the_end_leave_at_once_and_what_is_between_together() -> None:
    line = Line(0.050)
    for at, text in ((0.0, ""), (0.010, "a"), (0.020, "b"), (0.030, "c"), (0.070, "d")):
        line.run_until(at)
        line.add("s", text)
    line.run_until(0.080)
    line.add("s", "e", "stop")
    line.run_until(1.0)
    sent = [(round(at, 3), text) for at, _, text in line.sent]
    assert sent == [(0.0, ""), (0.010, "a"), (0.060, "bc"), (0.080, "de")]
    assert line.num_gathered == 2


def test_without_an_interval_each_chunk_has_a_response() -> None:
    line = Line(0, response_s=0.020)
    run_rounds(line, "ab", num_rounds=3, round_s=0.001)
    assert [text for *_, text in line.sent] == ["0 ", "0 ", "1 ", "1 ", "2 ", "2 "]
    assert line.num_gathered == 0


def test_a_whole_answer_is_sent_once_whatever_the_interval() -> None:
    for interval_s in (0, 0.050, None):
        line = Line(interval_s)
        for text in "abc":
            line.add("s", text, is_stream=False)
        line.run_until(1.0)
        assert line.sent == []
        line.add("s", "d", "length", is_stream=False)
        line.run_until(2.0)
        assert line.sent == [(1.0, "s", "abcd")]
        assert line.num_gathered == 0


@pytest.mark.parametrize("end", ["error", "cancelled"])
def test_text_is_not_beside_an_end_that_clients_raise_for(end: FinishReason) -> None:
    line = Line(0.050)
    for text in "abc":
        line.add("s", text)
    line.add("s", "", end)
    line.run_until(1.0)
    assert line.sent == [(0.0, "s", "a"), (0.0, "s", "bc"), (0.0, "s", "")]


def test_an_end_waits_for_no_texts_of_others_and_a_call_for_the_ends_before_it() -> None:
    line = Line(0.050)
    for name in ("a", "b"):
        line.add(name, "1")
    line.run_until(0.010)
    line.add("a", "2")
    line.add("b", "2", "stop")
    line.call("report")
    line.add("c", "1")
    line.run_until(0.011)
    assert [event[1:] for event in line.sent[2:]] == [("b", "2"), ("call", "report"), ("c", "1")]


def test_where_sending_is_quick_each_chunk_has_a_response() -> None:
    line = Line(None, response_s=0.0002)
    run_rounds(line, "abcd", num_rounds=50, round_s=0.010)
    assert line.num_gathered == 0


def test_where_it_is_not_sending_takes_its_share_and_texts_go_on() -> None:
    """8 streams whose chunks would take 0.3 of the time: an eighth is what they get."""
    names = "abcdefgh"
    line = Line(None, response_s=0.0003)
    run_rounds(line, names, num_rounds=1000, round_s=0.008)
    assert len(line.sent) * 0.0003 == pytest.approx(8.0 / 8, rel=0.1)
    assert max(max(line.gaps_s(name)) for name in names) < 0.030
    assert line.num_gathered == 8 * 1000 - len(line.sent)


def test_where_it_cannot_keep_up_gaps_are_what_a_response_to_all_takes() -> None:
    """128 streams, 1 ms a response: nothing piles up, nobody waits longer than for all others."""
    names = [str(number) for number in range(128)]
    line = Line(None, response_s=0.001)
    run_rounds(line, names, num_rounds=300, round_s=0.005)
    assert max(max(line.gaps_s(name)) for name in names) <= 0.128 + 0.005
    assert line.sent[-1][0] <= 300 * 0.005 + 0.128


@pytest.mark.parametrize(
    ("num_streams", "response_s", "round_s", "late_s"),
    [
        (128, 0.001, 0.005, 0.128 - 0.075),
        (8, 0.0002, 0.005, 0.0),
        (1, 0.001, 0.100, 0.0),
    ],
    ids=["behind", "in time", "rounds longer than the interval"],
)
def test_by_how_much_it_is_late(
    num_streams: int, response_s: float, round_s: float, late_s: float
) -> None:
    line = Line(None, response_s=response_s)
    run_rounds(
        line, [str(number) for number in range(num_streams)], num_rounds=300, round_s=round_s
    )
    assert line.late_s == pytest.approx(late_s, abs=num_streams * response_s / 8)


@settings(max_examples=40, deadline=None)
@given(
    interval_s=st.sampled_from((None, 0, 0.02)),
    response_s=st.sampled_from((0.0, 0.0004, 0.003)),
    chunks=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(("", "x", "yz")), st.integers(0, 20)),
        max_size=40,
    ),
)
def test_nothing_is_lost_or_told_twice_or_in_another_order(
    interval_s: float | None, response_s: float, chunks: list[tuple[str, str, int]]
) -> None:
    line = Line(interval_s, response_s=response_s)
    for number, (name, text, wait_ms) in enumerate(chunks):
        line.add(name, f"{number}{text}" if text else "")
        line.run_until(line.now + wait_ms / 1e3)
    for name in "abc":
        line.add(name, "end", "stop")
    line.run_until(line.now + 1.0)
    for name in "abc":
        told = [
            f"{number}{text}" for number, (of, text, _) in enumerate(chunks) if of == name and text
        ]
        assert line.texts(name) == "".join(told) + "end"
