"""Answers as a clock would have recorded them, written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from specpipe.evaluate.bench.load import Load
from specpipe.evaluate.endpoints.base import Ending, Piece, Question, TimedAnswer, Usage

QUESTION = Question(text="x", max_tokens=100)


def answer(
    started_s: float,
    outputs: Sequence[tuple[float, int | None]],
    ended_s: float,
    *,
    text: str = "abcdefgh",
    ending: Ending = "complete",
    usage: Usage | None = None,
) -> TimedAnswer:
    """An answer whose outputs came at some times, each with some tokens (None: not told).

    Each output is one letter of `text`. A piece without output opens the stream, and one with the
    usage ends it.
    """
    outputs_as_pieces = [
        Piece(text=text[index], num_tokens=count) for index, (_, count) in enumerate(outputs)
    ]
    last = Piece(finish_reason="length", usage=usage)
    return TimedAnswer(
        question=QUESTION,
        started_s=started_s,
        ended_s=ended_s,
        pieces=(Piece(), *outputs_as_pieces, last),
        arrivals_s=(started_s, *(time_s for time_s, _ in outputs), ended_s),
        ending=ending,
        error=None if ending == "complete" else "it broke off",
    )


def load(*answers: TimedAnswer, concurrency: int = 1) -> Load:
    return Load(concurrency=concurrency, answers=answers)
