"""The sides of a comparison, each a way of asking all prompts, and what they answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specpipe.evaluate.endpoints.base import Endpoint, Question, TimedAnswer, ask
from specpipe.evaluate.verification.draft_steps import DraftedAnswer, drafted_answer
from specpipe.evaluate.verification.verdict import Stream
from specpipe.speculative.request import Sampling

SideKind = Literal["reference", "speculation", "control"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt as token ids, and how long its answer may be."""

    name: str
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class VerifySide:
    """One way of asking all prompts.

    num_draft_tokens  0: the target alone; None: as the pair is served
    at_once           requests in flight, hence how many sequences share a forward
    is_wrong_draft    whether no draft token is ever the target's
    is_own_draft      whether the target drafts for itself
    """

    name: str
    kind: SideKind
    num_draft_tokens: int | None
    at_once: int
    is_wrong_draft: bool = False
    is_own_draft: bool = False


@dataclass(frozen=True, kw_only=True)
class SideAnswers:
    """What one side answered, in the order of the prompts."""

    side: VerifySide
    streams: tuple[Stream, ...]
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_statuses: tuple[str, ...] = ()
    """The server's words, each once, for why it drafted or not."""
    is_lossless: bool = True
    """Whether the server keeps the target's output; False where it says itself that it does not."""
    drafted: tuple[DraftedAnswer, ...] = ()
    """What was drafted for each."""

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self.streams)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


def ask_side(
    endpoint: Endpoint, cases: Sequence[Case], side: VerifySide, sampling: Sampling
) -> SideAnswers:
    """Returns the answers to every prompt; a request's seed, if any, is the same on every side."""
    questions = [
        Question(
            token_ids=case.token_ids,
            max_tokens=case.max_tokens,
            num_draft_tokens=side.num_draft_tokens,
            sampling=case_sampling(sampling, index),
        )
        for index, case in enumerate(cases)
    ]
    answers = ask(endpoint, questions, at_once=side.at_once)
    usages = [answer.usage for answer in answers if answer.usage is not None]
    return SideAnswers(
        side=side,
        streams=tuple(_stream(answer) for answer in answers),
        num_draft_tokens=sum(usage.total_draft_tokens or 0 for usage in usages),
        num_accepted_tokens=sum(usage.total_accepted_draft_tokens or 0 for usage in usages),
        draft_statuses=tuple(sorted({u.draft_status for u in usages if u.draft_status})),
        is_lossless=all(usage.is_lossless is not False for usage in usages),
        drafted=tuple(drafted_answer(answer, side.num_draft_tokens) for answer in answers),
    )


def case_sampling(sampling: Sampling, index: int) -> Sampling:
    """Returns the settings of the request for that prompt."""
    if not sampling.is_seeded:
        return sampling
    return dataclasses.replace(sampling, seed=sampling.seed + index)


def _stream(answer: TimedAnswer) -> Stream:
    error = answer.error
    if error is None and answer.token_ids is None:
        error = f"{answer.ending}, without token ids"
    return Stream(answer.token_ids or (), answer.finish_reason, error)
