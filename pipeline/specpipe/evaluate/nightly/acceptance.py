"""Acceptance of a run and of the one it is compared with: over all, by position, by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specpipe.evaluate.nightly.intervals import Counts, Estimate, rate, ratio
from specpipe.evaluate.nightly.record import Accepted, PromptAccepted

CONFIDENCE = 0.95
ALL = "all prompts"


@dataclass(frozen=True, kw_only=True)
class AcceptanceFigure:
    """A rate, that of the run before, and their ratio; None where it cannot be told.

    what  `all prompts`, `position 2`, `kind chat`
    """

    what: str
    now: Estimate
    before: Estimate | None = None
    ratio: Estimate | None = None

    @property
    def is_total(self) -> bool:
        return self.what == ALL


def acceptance_figures(now: Accepted, before: Accepted | None) -> list[AcceptanceFigure]:
    """Returns the figures of a run, the one over all prompts first.

    Its interval holds 95 %. Those by position and kind hold 95 % together (Bonferroni): of many of
    them one would stand out by chance. `before` is of the same prompts at the same draft length.
    """
    if before is None or len(before.prompts) != len(now.prompts):
        before = None
    parts = [*_positions(now), *_kinds(now)]
    figures = []
    for number, (what, pick) in enumerate([(ALL, _totals), *parts]):
        confidence = CONFIDENCE if number == 0 else 1.0 - (1.0 - CONFIDENCE) / len(parts)
        counts = _picked(now, pick)
        estimate = rate(counts, confidence)
        if estimate is None:
            continue
        if before is None:
            figures.append(AcceptanceFigure(what=what, now=estimate))
            continue
        counts_before = _picked(before, pick)
        figures.append(
            AcceptanceFigure(
                what=what,
                now=estimate,
                before=rate(counts_before, confidence),
                ratio=ratio(counts, counts_before, confidence),
            )
        )
    return figures


Pick = Callable[[PromptAccepted], tuple[int, int]]


def _totals(prompt: PromptAccepted) -> tuple[int, int]:
    return prompt.num_accepted_tokens, prompt.num_draft_tokens


def _positions(accepted: Accepted) -> Iterator[tuple[str, Pick]]:
    """Yields the positions of a step, each judged only where all before it were accepted."""
    for index in range(max((len(p.judged_at) for p in accepted.prompts), default=0)):

        def pick(prompt: PromptAccepted, index: int = index) -> tuple[int, int]:
            if len(prompt.judged_at) <= index:
                return 0, 0
            return prompt.accepted_at[index], prompt.judged_at[index]

        yield f"position {index + 1}", pick


def _kinds(accepted: Accepted) -> Iterator[tuple[str, Pick]]:
    """Yields the kinds of the prompts, where there is more than one."""
    kinds = list(dict.fromkeys(prompt.kind for prompt in accepted.prompts))
    for kind in kinds if len(kinds) > 1 else ():

        def pick(prompt: PromptAccepted, kind: str = kind) -> tuple[int, int]:
            return _totals(prompt) if prompt.kind == kind else (0, 0)

        yield f"kind {kind}", pick


def _picked(accepted: Accepted, pick: Pick) -> Counts:
    return [pick(prompt) for prompt in accepted.prompts]
