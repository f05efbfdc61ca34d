"""What each step of an answer drafted and accepted, as far as its pieces tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from specpipe.evaluate.endpoints.base import TimedAnswer

Steps = Mapping[tuple[int, int], int]
"""Number of steps by draft tokens that were judged and those of them accepted."""


@dataclass(frozen=True, kw_only=True)
class DraftedAnswer:
    """One prompt's answer with a draft length of its own.

    steps  None where the pieces do not tell them apart
    """

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    steps: Steps | None = None


def drafted_answer(answer: TimedAnswer, num_draft_tokens: int | None) -> DraftedAnswer:
    """Returns what was drafted for an answer that was asked for with K draft tokens.

    A piece has what one step let out: the accepted draft tokens and the target's own. Where text is
    held back (a character in parts), or a server sends otherwise, the steps are not known.
    """
    usage = answer.usage
    if usage is None:
        return DraftedAnswer()
    drafted, accepted = usage.total_draft_tokens or 0, usage.total_accepted_draft_tokens or 0
    steps = None
    if num_draft_tokens and usage.num_steps == len(answer.pieces):
        sizes = [piece.num_tokens or 0 for piece in answer.pieces]
        is_cut = answer.finish_reason == "length"
        num_tokens = sum(sizes) if is_cut else answer.question.max_tokens
        steps = _steps(sizes, num_tokens, num_draft_tokens, drafted, accepted)
    return DraftedAnswer(num_draft_tokens=drafted, num_accepted_tokens=accepted, steps=steps)


def _steps(
    sizes: list[int], num_left: int, num_draft_tokens: int, drafted: int, accepted: int
) -> Steps | None:
    """Returns the steps by their tokens; None where they do not add up to what was reported.

    A step drafts no more than the answer may still take besides the target's own token. What the
    last one judged, an end token among it, is what the others leave of the totals.
    """
    *sizes, last_size = sizes
    steps: Counter[tuple[int, int]] = Counter()
    for size in sizes:
        step = min(num_draft_tokens, num_left - 1), size - 1
        if not 0 <= step[1] <= step[0]:
            return None
        steps[step] += 1
        num_left -= size
        drafted, accepted = drafted - step[0], accepted - step[1]
    if not (0 <= accepted <= drafted <= num_draft_tokens and abs(accepted - last_size) <= 1):
        return None
    steps[drafted, accepted] += 1
    return steps
