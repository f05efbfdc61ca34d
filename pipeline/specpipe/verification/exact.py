"""Token by token: greedy and seeded output against the target's own under the same server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specpipe.endpoints.base import Answer, Endpoint, Question, ask
from specpipe.speculative.request import GREEDY, Sampling
from specpipe.verification.scorer import Scorer, Text
from specpipe.verification.seeded import SeededChoice
from specpipe.verification.verdict import (
    Choice,
    Comparison,
    GreedyChoice,
    Stream,
    TieThreshold,
    Verdict,
    compare,
    worst,
)

Kind = Literal["reference", "speculation", "control"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt as token ids, and how long its answer may be."""

    name: str
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way of asking all prompts.

    num_draft_tokens  0: the target alone; None: as the pair is served
    at_once           requests in flight, hence how many sequences share a forward
    is_wrong_draft    whether no draft token is ever the target's
    is_own_draft      whether the target drafts for itself
    """

    name: str
    kind: Kind
    num_draft_tokens: int | None
    at_once: int
    is_wrong_draft: bool = False
    is_own_draft: bool = False


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one side answered, in the order of the prompts."""

    side: Side
    streams: tuple[Stream, ...]
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    is_lossless: bool = True
    """False where the server itself says that it does not keep the target's output."""

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self.streams)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


def ask_side(endpoint: Endpoint, cases: Sequence[Case], side: Side, sampling: Sampling) -> Asked:
    """Asks every prompt; a seeded request has a seed of its own, the same one on every side."""
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
    return Asked(
        side=side,
        streams=tuple(_stream(answer) for answer in answers),
        num_draft_tokens=sum(usage.total_draft_tokens or 0 for usage in usages),
        num_accepted_tokens=sum(usage.total_accepted_draft_tokens or 0 for usage in usages),
        is_lossless=all(usage.is_lossless is not False for usage in usages),
    )


def case_sampling(sampling: Sampling, index: int) -> Sampling:
    """Returns the settings of the request for that prompt."""
    if not sampling.is_seeded:
        return sampling
    return dataclasses.replace(sampling, seed=sampling.seed + index)


def _stream(answer: Answer) -> Stream:
    error = answer.error
    if error is None and answer.token_ids is None:
        error = f"{answer.ending}, without token ids"
    return Stream(answer.token_ids or (), answer.finish_reason, error)


@dataclass(frozen=True)
class Found:
    """The comparison of one prompt's streams."""

    case: str
    comparison: Comparison


@dataclass(frozen=True, kw_only=True)
class SideResult:
    """What became of one side: its verdict, with every prompt that was not identical.

    notes  sentences on what the numbers of draft tokens say
    """

    check: str
    side: Side
    verdict: Verdict
    num_identical: int
    ties: tuple[Found, ...]
    faults: tuple[Found, ...]
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    notes: tuple[str, ...] = ()

    @property
    def reason(self) -> str | None:
        """The first fault in words; None without one."""
        if self.faults:
            first = self.faults[0]
            return f"prompt {first.case}: {first.comparison.reason}"
        return self.notes[0] if self.verdict == "fault" else None

    def to_json(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "side": self.side.name,
            "kind": self.side.kind,
            "num_draft_tokens": self.side.num_draft_tokens,
            "at_once": self.side.at_once,
            "verdict": self.verdict,
            "num_identical": self.num_identical,
            "ties": [_found_json(found) for found in self.ties],
            "faults": [_found_json(found) for found in self.faults],
            "num_tokens": self.num_tokens,
            "total_draft_tokens": self.num_draft_tokens,
            "total_accepted_draft_tokens": self.num_accepted_tokens,
            "notes": list(self.notes),
        }


def judge(
    check: str,
    reference: Asked,
    asked: Asked,
    cases: Sequence[Case],
    *,
    scorer: Scorer,
    sampling: Sampling,
    threshold: TieThreshold,
    end_token_ids: frozenset[int],
) -> SideResult:
    """Compares one side with the target alone, prompt by prompt."""
    found: Mapping[Verdict, list[Found]] = {"identical": [], "tie": [], "fault": []}
    for index, case in enumerate(cases):
        comparison = compare(
            reference.streams[index],
            asked.streams[index],
            _choice_at(
                case,
                reference.streams[index],
                scorer,
                case_sampling(sampling, index),
                end_token_ids,
            ),
            threshold,
            end_token_ids,
        )
        found[comparison.verdict].append(Found(case.name, comparison))
    faults = _wrong_counts(asked)
    notes = faults or _notes(asked)
    verdicts: list[Verdict] = [verdict for verdict, those in found.items() if those]
    return SideResult(
        check=check,
        side=asked.side,
        verdict=worst([*verdicts, *(["fault"] if faults else [])]),  # type: ignore[list-item]
        num_identical=len(found["identical"]),
        ties=tuple(found["tie"]),
        faults=tuple(found["fault"]),
        num_tokens=asked.num_tokens,
        num_draft_tokens=asked.num_draft_tokens,
        num_accepted_tokens=asked.num_accepted_tokens,
        notes=tuple(notes),
    )


def judge_target(
    reference: Asked,
    cases: Sequence[Case],
    *,
    scorer: Scorer,
    threshold: TieThreshold,
    end_token_ids: frozenset[int],
) -> SideResult:
    """Compares the target alone, as it is served and greedy, with what its checkpoint says.

    Two implementations differ by more than two block shapes of one, hence the wider threshold. An
    engine with other weights than the checkpoint's may well equal itself with and without a draft.
    """
    wide = dataclasses.replace(
        threshold,
        block_difference=CHECKPOINT_FACTOR
        * max(threshold.block_difference, threshold.fixed or 0.0),
        fixed=None,
    )
    streams = []
    for case, stream in zip(cases, reference.streams, strict=True):
        rows = scorer.rows(Text(case.token_ids, stream.token_ids, case.max_tokens))
        chosen = [int(i) for i in rows.argmax(axis=1)]
        streams.append(_until_difference(stream, chosen, end_token_ids))
    side = Side(
        name="the target's checkpoint, scored", kind="control", num_draft_tokens=0, at_once=1
    )
    by_checkpoint = Asked(side=side, streams=tuple(streams))
    # The checkpoint is what is expected here, the server what is found.
    return judge(
        "checkpoint",
        by_checkpoint,
        dataclasses.replace(reference, side=side),
        cases,
        scorer=scorer,
        sampling=GREEDY,
        threshold=wide,
        end_token_ids=end_token_ids,
    )


CHECKPOINT_FACTOR = 8.0


def _until_difference(
    stream: Stream, chosen: Sequence[int], end_token_ids: frozenset[int]
) -> Stream:
    """Returns the stream up to where the scorer chooses another token, and that token.

    chosen has one token more than the stream: what follows its last one.
    """
    for position, (token_id, wanted) in enumerate(zip(stream.token_ids, chosen, strict=False)):
        if token_id != wanted:
            kept = stream.token_ids[:position]
            return (
                Stream(kept, "stop")
                if wanted in end_token_ids
                else Stream((*kept, wanted), stream.finish_reason)
            )
    if stream.finish_reason == "stop" and chosen[-1] not in end_token_ids:
        return Stream((*stream.token_ids, chosen[-1]), "length")
    return stream


def _choice_at(
    case: Case,
    reference: Stream,
    scorer: Scorer,
    sampling: Sampling,
    end_token_ids: frozenset[int],
) -> Callable[[int], Choice]:
    def choice(position: int) -> Choice:
        text = Text(case.token_ids, reference.token_ids[:position], case.max_tokens)
        logits = scorer.rows(text)[-1]
        if sampling.is_greedy:
            return GreedyChoice(logits)
        return SeededChoice(logits, text, sampling, end_token_ids)

    return choice


MIN_OWN_ACCEPTANCE = 0.95
"""A target that drafts for itself is right but for ties, each of which costs one step its rest."""

MAX_WRONG_ACCEPTANCE = 0.05


def _wrong_counts(asked: Asked) -> list[str]:
    """What the counts of draft tokens say against a side, a sentence each."""
    side, rate = asked.side, asked.acceptance_rate
    if side.num_draft_tokens == 0:
        return ["the target alone drafted"] if asked.num_draft_tokens else []
    if rate is None:
        # As served, drafting may be off where it does not pay.
        return [] if side.num_draft_tokens is None else ["nothing was drafted, so nothing is shown"]
    if side.is_own_draft and rate < MIN_OWN_ACCEPTANCE:
        return [
            f"the target accepts {rate:.2f} of its own draft tokens, less than "
            f"{MIN_OWN_ACCEPTANCE}: what the draft has read is not the text"
        ]
    if side.is_wrong_draft and rate > MAX_WRONG_ACCEPTANCE:
        return [f"{rate:.2f} of draft tokens that are always wrong were accepted"]
    return []


def _notes(asked: Asked) -> list[str]:
    if asked.side.num_draft_tokens is None and asked.acceptance_rate is None:
        return ["as served, nothing was drafted here: it did not pay on this machine"]
    return []


def _found_json(found: Found) -> dict[str, Any]:
    divergence = found.comparison.divergence
    return {
        "prompt": found.case,
        "reason": found.comparison.reason,
        **({} if divergence is None else divergence.to_json()),
    }
