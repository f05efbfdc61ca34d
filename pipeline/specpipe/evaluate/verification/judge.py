"""Every side against the target alone: the threshold, and the verdicts by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specpipe.evaluate.verification import draft_counts, exact
from specpipe.evaluate.verification.asking import Case, SideAnswers
from specpipe.evaluate.verification.block_shapes import Agreement, measure_block_difference
from specpipe.evaluate.verification.exact import SideResult
from specpipe.evaluate.verification.scorer import ScoredText, Scorer
from specpipe.evaluate.verification.verdict import TieThreshold
from specpipe.progress import counted
from specpipe.speculative.request import Sampling

FLOAT32_MARGIN = 1e-4
"""The largest margin of a tie in float32, some ten units in the last place of a logit of 100."""

_NUM_TEXTS = 8
"""Answers that are read in other block shapes, too; each takes forwards of its own. A guess."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Judges what was asked; `asked` has the target alone first, for each check.

    lengths  every K that was asked for
    skipped  what could not be judged, and why, a sentence each
    """

    scorer: Scorer
    cases: Sequence[Case]
    asked: Mapping[str, Sequence[SideAnswers]]
    samplings: Mapping[str, Sampling]
    lengths: Sequence[int]
    end_token_ids: frozenset[int]
    is_float32: bool = False
    skipped: list[str] = field(default_factory=list)

    def threshold(self) -> TieThreshold:
        """Returns how large the margin of a tie may be."""
        if self.is_float32:
            return TieThreshold(dtype="float32", fixed=FLOAT32_MARGIN)
        texts = [
            ScoredText(case.token_ids, stream.token_ids, case.max_tokens)
            for case, stream in zip(self.cases, self.asked["greedy"][0].streams, strict=True)
        ]
        difference = measure_block_difference(
            self.scorer, texts[:_NUM_TEXTS], [length + 1 for length in self.lengths]
        )
        return TieThreshold(
            dtype=self.scorer.dtype,
            block_difference=difference.value,
            rounding=self.scorer.rounding,
        )

    def sides(self, threshold: TieThreshold) -> list[SideResult]:
        """Compares all sides, and the target alone with its checkpoint."""
        results = []
        pairs = [
            (check, reference, other)
            for check, (reference, *others) in self.asked.items()
            for other in others
        ]
        for check, reference, other in counted(pairs, len(pairs), "sides"):
            if other.side.kind == "speculation" and not other.is_lossless:
                self.skipped.append(
                    f"{check}, {other.side.name}: the server says that it is not lossless"
                )
                continue
            results.append(self._side(check, reference, other, threshold))
        results.append(
            exact.judge_target(
                self.asked["greedy"][0],
                self.cases,
                scorer=self.scorer,
                threshold=threshold,
                end_token_ids=self.end_token_ids,
                agreement=None if self.scorer.rounding is None else self._agreement("greedy"),
            )
        )
        return results

    def _side(
        self, check: str, reference: SideAnswers, other: SideAnswers, threshold: TieThreshold
    ) -> SideResult:
        seems_wrong = draft_counts.is_often_wrong_about_itself(other)
        return exact.judge(
            check,
            reference,
            other,
            self.cases,
            scorer=self.scorer,
            sampling=self.samplings[check],
            threshold=threshold,
            end_token_ids=self.end_token_ids,
            agreement=self._agreement(check) if seems_wrong else None,
        )

    def _agreement(self, check: str) -> Agreement:
        return exact.own_agreement(
            self.asked[check][0],
            self.cases[:_NUM_TEXTS],
            scorer=self.scorer,
            sampling=self.samplings[check],
            block_size=max(self.lengths) + 1,
            end_token_ids=self.end_token_ids,
        )
