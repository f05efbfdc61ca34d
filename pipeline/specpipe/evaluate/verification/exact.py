"""Token by token: greedy and seeded output against the target's own under the same server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specpipe.evaluate.verification import draft_counts
from specpipe.evaluate.verification.asking import Case, SideAnswers, VerifySide, case_sampling
from specpipe.evaluate.verification.block_shapes import Agreement, less_chance, measure_agreement
from specpipe.evaluate.verification.draft_steps import DraftedAnswer
from specpipe.evaluate.verification.scorer import ScoredText, Scorer, rows_of
from specpipe.evaluate.verification.seeded import SeededChoice
from specpipe.evaluate.verification.verdict import (
    Choice,
    GreedyChoice,
    Stream,
    StreamComparison,
    TieThreshold,
    Verdict,
    compare,
    worst,
)
from specpipe.speculative.noise import Floats
from specpipe.speculative.request import GREEDY, Sampling

CHECKPOINT_FACTOR = 8.0
"""How much farther apart the logits of engine and checkpoint may be than those of two blocks. A
guess."""

DISAGREEMENT_FACTOR = 4.0
"""How much more often both may choose differently than the checkpoint does by itself. A guess."""


@dataclass(frozen=True)
class CaseComparison:
    """The comparison of one prompt's streams."""

    case: str
    comparison: StreamComparison


@dataclass(frozen=True, kw_only=True)
class SideResult:
    """What became of one side: its verdict, with every prompt that was not identical.

    notes    sentences on what the numbers of draft tokens say
    drafted  what was drafted for each prompt, in their order
    """

    check: str
    side: VerifySide
    verdict: Verdict
    num_identical: int
    ties: tuple[CaseComparison, ...]
    faults: tuple[CaseComparison, ...]
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    notes: tuple[str, ...] = ()
    drafted: tuple[DraftedAnswer, ...] = ()

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
            "ties": [_case_json(differing) for differing in self.ties],
            "faults": [_case_json(differing) for differing in self.faults],
            "num_tokens": self.num_tokens,
            "total_draft_tokens": self.num_draft_tokens,
            "total_accepted_draft_tokens": self.num_accepted_tokens,
            "notes": list(self.notes),
        }


def judge(
    check: str,
    reference: SideAnswers,
    asked: SideAnswers,
    cases: Sequence[Case],
    *,
    scorer: Scorer,
    sampling: Sampling,
    threshold: TieThreshold,
    end_token_ids: frozenset[int],
    agreement: Agreement | None = None,
) -> SideResult:
    """Compares one side with the target alone, prompt by prompt.

    agreement is what a target that drafts for itself is judged by; None: it always agrees.
    """
    by_verdict: Mapping[Verdict, list[CaseComparison]] = {"identical": [], "tie": [], "fault": []}
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
        by_verdict[comparison.verdict].append(CaseComparison(case.name, comparison))
    faults = draft_counts.wrong_counts(asked, agreement)
    notes = faults or draft_counts.remarks(asked, agreement)
    verdicts: list[Verdict] = [verdict for verdict, members in by_verdict.items() if members]
    return SideResult(
        check=check,
        side=asked.side,
        verdict=worst([*verdicts, *(["fault"] if faults else [])]),  # type: ignore[list-item]
        num_identical=len(by_verdict["identical"]),
        ties=tuple(by_verdict["tie"]),
        faults=tuple(by_verdict["fault"]),
        num_tokens=asked.num_tokens,
        num_draft_tokens=asked.num_draft_tokens,
        num_accepted_tokens=asked.num_accepted_tokens,
        notes=tuple(notes),
        drafted=asked.drafted,
    )


def judge_target(
    reference: SideAnswers,
    cases: Sequence[Case],
    *,
    scorer: Scorer,
    threshold: TieThreshold,
    end_token_ids: frozenset[int],
    agreement: Agreement | None = None,
) -> SideResult:
    """Compares the target alone, as it is served and greedy, with what its checkpoint says.

    Two implementations differ by more than two block shapes of one, hence the wider threshold. An
    engine with other weights than the checkpoint's may well equal itself with and without a draft.

    Where rounding makes the threshold so wide that it proves little, the two are judged by their
    agreement in addition: how often the checkpoint chooses what was served.
    """
    wide = dataclasses.replace(
        threshold,
        block_difference=CHECKPOINT_FACTOR
        * max(threshold.block_difference, threshold.fixed or 0.0),
        fixed=None,
    )
    streams, num_same = [], 0
    for case, stream in zip(cases, reference.streams, strict=True):
        rows = rows_of(scorer, ScoredText(case.token_ids, stream.token_ids, case.max_tokens))
        chosen = [int(i) for i in rows.argmax(axis=1)]
        streams.append(_until_difference(stream, chosen, end_token_ids))
        num_same += sum(a == b for a, b in zip(stream.token_ids, chosen, strict=False))
    side = VerifySide(
        name="the target's checkpoint, scored", kind="control", num_draft_tokens=0, at_once=1
    )
    by_checkpoint = SideAnswers(side=side, streams=tuple(streams))
    # The checkpoint is what is expected here, the server what is found.
    result = judge(
        "checkpoint",
        by_checkpoint,
        dataclasses.replace(reference, side=side),
        cases,
        scorer=scorer,
        sampling=GREEDY,
        threshold=wide,
        end_token_ids=end_token_ids,
    )
    if agreement is None or not reference.num_tokens:
        return result
    rate = num_same / reference.num_tokens
    least = less_chance(
        max(1.0 - DISAGREEMENT_FACTOR * (1.0 - agreement.least_rate), 0.0), reference.num_tokens
    )
    if rate >= least:
        return result
    sentence = (
        f"the checkpoint chooses {rate:.2f} of the tokens that were served, less than {least:.2f}; "
        f"whatever the block shape it chooses the same {agreement.rate:.2f}"
    )
    return dataclasses.replace(result, verdict="fault", notes=(sentence,))


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
        text = ScoredText(case.token_ids, reference.token_ids[:position], case.max_tokens)
        return _choice(rows_of(scorer, text)[-1], text, sampling, end_token_ids)

    return choice


def _choice(
    logits: Floats, text: ScoredText, sampling: Sampling, end_token_ids: frozenset[int]
) -> Choice:
    """Returns how the target chooses what follows a text."""
    if sampling.is_greedy:
        return GreedyChoice(logits)
    return SeededChoice(logits, text, sampling, end_token_ids)


def own_agreement(
    reference: SideAnswers,
    cases: Sequence[Case],
    *,
    scorer: Scorer,
    sampling: Sampling,
    block_size: int,
    end_token_ids: frozenset[int],
) -> Agreement:
    """Returns how often the target chooses the same along its own answers to the first cases, one
    token at a time or in blocks.
    """
    texts = [
        ScoredText(case.token_ids, stream.token_ids, case.max_tokens)
        for case, stream in zip(cases, reference.streams, strict=False)
    ]

    def choose(index: int, rows: Floats) -> list[int]:
        text, settings = texts[index], case_sampling(sampling, index)
        return [
            _choice(
                logits,
                dataclasses.replace(text, output=text.output[:position]),
                settings,
                end_token_ids,
            ).token_id
            for position, logits in enumerate(rows)
        ]

    return measure_agreement(scorer, texts, block_size, choose)


def _case_json(differing: CaseComparison) -> dict[str, Any]:
    divergence = differing.comparison.divergence
    return {
        "prompt": differing.case,
        "reason": differing.comparison.reason,
        **({} if divergence is None else divergence.to_json()),
    }
