"""Asking whatever answers: a Triton, an OpenAI-compatible server, a pair in this process.

Verification, benchmarks and tuning know questions and answers only; which server or pair is behind
an endpoint, and how it is spoken to, stays in the endpoint's file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter, ValidationError

from specpipe.errors import CutStream, RequestError, ServerError, SpecpipeError, show
from specpipe.machine.callables import Clock
from specpipe.machine.signals import thread_pool
from specpipe.progress import counted
from specpipe.speculative.request import GREEDY, FinishReason, Sampling, Statistics, TopLogProbs

Ending = Literal["complete", "failed", "cut"]
"""How an answer ended: as it should; with an error; or it just stopped coming."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request, whatever answers it; exactly one of text, messages and token_ids.

    num_draft_tokens   None: as the server was set up; 0: the target alone
    ignores_end        no end id ends the answer, so that it has max_tokens tokens
    starts_text        token_ids are a conversation's: the answer is a text of its own
    returns_ids        the answer's token ids are wanted where they can be had, that which ended it
                       included where it is told
    num_top_log_probs  how many of the likeliest tokens are wanted with each of the answer
    """

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int
    num_draft_tokens: int | None = None
    sampling: Sampling = GREEDY
    stop_strings: tuple[str, ...] = ()
    ignores_end: bool = False
    starts_text: bool = False
    returns_ids: bool = False
    num_top_log_probs: int = 0

    def __post_init__(self) -> None:
        assert [self.text, self.messages, self.token_ids].count(None) == 2


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the end of an answer reports; None where this endpoint does not report it.

    The fields of `Statistics`, which names them, without the rate: it is accepted / drafted.

    acceptance_histogram  steps with at least one draft token by how many were accepted: 0, 1, …
    """

    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_steps: int | None = None
    total_draft_tokens: int | None = None
    total_accepted_draft_tokens: int | None = None
    seed_used: int | None = None
    is_lossless: bool | None = None
    draft_status: str | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    acceptance_histogram: tuple[int, ...] | None = None
    num_cached_input_tokens: int | None = None
    num_preemptions: int | None = None

    @classmethod
    def from_statistics(cls, statistics: Statistics) -> Usage:
        values = statistics.to_json()
        values.pop("acceptance_rate")
        return cls(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What arrives at one moment; the last one may have a finish_reason and the usage.

    num_tokens        tokens in it; None where the endpoint does not count them
    top_log_probs     for each of the token ids, where the question wants them
    prompt_token_ids  in the first one, where the endpoint tells them
    """

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    top_log_probs: tuple[TopLogProbs, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    num_tokens: int | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    @property
    def has_output(self) -> bool:
        """Whether the piece has text or tokens, and does not only open or end the stream."""
        return bool(self.text or self.num_tokens)


_PIECES = TypeAdapter(Piece)


def read_piece(values: Mapping[str, Any], server: str) -> Piece:
    """Returns a piece of what a server sent; raises ServerError where its values are of no use."""
    try:
        return _PIECES.validate_python(values)
    except ValidationError as exc:
        raise ServerError(f"{server} sent what is no answer: {show(dict(values))}") from exc


class Endpoint(Protocol):
    """Something that answers. Threads may ask at the same time."""

    @property
    def name(self) -> str:
        """What results call it."""

    def stream(self, question: Question) -> Iterator[Piece]:
        """Yields the answer as it comes; closing the iterator early cancels.

        Raises RequestError for what cannot be asked here or is refused, CutStream when the answer
        stops in the middle, ServerError for any other failure.
        """

    def close(self) -> None:
        """Ends connections and threads."""


@dataclass(frozen=True, kw_only=True)
class TimedAnswer:
    """A timed answer; times are readings of one clock, in seconds.

    ended_s     when the stream was over, its connection included
    arrivals_s  one for each piece
    error       what went wrong; None for a complete answer
    """

    question: Question
    started_s: float
    ended_s: float
    pieces: tuple[Piece, ...] = ()
    arrivals_s: tuple[float, ...] = ()
    ending: Ending = "complete"
    error: str | None = None

    def __post_init__(self) -> None:
        assert len(self.pieces) == len(self.arrivals_s)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def is_complete(self) -> bool:
        return self.ending == "complete"

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason in the last piece that has one; some servers report none."""
        return next((p.finish_reason for p in reversed(self.pieces) if p.finish_reason), None)

    @property
    def usage(self) -> Usage | None:
        """What the end reported."""
        return next((p.usage for p in reversed(self.pieces) if p.usage), None)

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """All output ids; None where the endpoint does not send them."""
        token_ids: list[int] = []
        for piece in self.pieces:
            if piece.token_ids is not None:
                token_ids += piece.token_ids
            elif piece.has_output:
                return None
        return tuple(token_ids)

    @property
    def top_log_probs(self) -> tuple[TopLogProbs, ...]:
        """Those of all output ids."""
        return tuple(top for piece in self.pieces for top in piece.top_log_probs)

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | None:
        """The prompt as it was read; None where the endpoint does not tell."""
        return next((p.prompt_token_ids for p in self.pieces if p.prompt_token_ids), None)

    @property
    def num_output_tokens(self) -> int | None:
        """The count that the end reports, else that of the pieces; None where neither has one."""
        if self.usage is not None and self.usage.num_output_tokens is not None:
            return self.usage.num_output_tokens
        counts = [piece.num_tokens for piece in self.pieces if piece.has_output]
        return None if None in counts else sum(count or 0 for count in counts)


def record(
    endpoint: Endpoint, question: Question, *, clock: Clock = time.perf_counter
) -> TimedAnswer:
    """Returns the answer, with the time of each piece; a failure is part of it, to be counted."""
    pieces: list[Piece] = []
    arrivals_s: list[float] = []
    ending: Ending = "complete"
    error = None
    started_s = clock()
    try:
        for piece in endpoint.stream(question):
            arrivals_s.append(clock())
            pieces.append(piece)
    except SpecpipeError as exc:
        ending = "cut" if isinstance(exc, CutStream) else "failed"
        error = str(exc)
    return TimedAnswer(
        question=question,
        started_s=started_s,
        ended_s=clock(),
        pieces=tuple(pieces),
        arrivals_s=tuple(arrivals_s),
        ending=ending,
        error=error,
    )


def ask(
    endpoint: Endpoint,
    questions: Sequence[Question],
    *,
    at_once: int = 1,
    clock: Clock = time.perf_counter,
) -> list[TimedAnswer]:
    """Returns the answers to the questions in their order; up to `at_once` are asked at a time."""
    with thread_pool(at_once) as pool:
        answers = pool.map(lambda question: record(endpoint, question, clock=clock), questions)
        return list(counted(answers, len(questions), "answers"))


def given_settings(question: Question) -> dict[str, Any]:
    """Returns the settings of a question that are not the default, by the ensemble's names."""
    sampling = question.sampling
    if sampling.bad_words:
        raise RequestError("bad_words: as token ids only a pair in this process takes them")
    default = Sampling()
    settings: dict[str, Any] = {
        name: getattr(sampling, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "min_tokens",
        )
        if getattr(sampling, name) != getattr(default, name)
    }
    if sampling.is_seeded:
        settings["seed"] = sampling.seed
    if question.num_draft_tokens is not None:
        settings["num_draft_tokens"] = question.num_draft_tokens
    return settings
