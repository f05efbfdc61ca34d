"""What the counts of draft tokens say of a side, whatever its tokens are."""

from __future__ import annotations

from specpipe.evaluate.verification.asking import SideAnswers
from specpipe.evaluate.verification.block_shapes import Agreement, less_chance

MIN_OWN_ACCEPTANCE = 0.95
"""The least that a target accepts of itself: ties excepted, each of which ends a step, it is 1."""

MAX_WRONG_ACCEPTANCE = 0.05
"""The most that may be accepted of tokens that the target finds least likely. A guess."""


def is_often_wrong_about_itself(asked: SideAnswers) -> bool:
    """Returns whether a target that drafts for itself accepts too little for one that always agrees
    with itself.
    """
    rate = asked.acceptance_rate
    return asked.side.is_own_draft and rate is not None and rate < MIN_OWN_ACCEPTANCE


def least_own_acceptance(asked: SideAnswers, agreement: Agreement | None) -> float:
    """Returns what a target that drafts for itself accepts at least.

    The i-th draft token of a step is accepted where its choice, read one token at a time, is i
    times in a row the same as read in a block.
    """
    if agreement is None:
        return MIN_OWN_ACCEPTANCE
    assert asked.side.num_draft_tokens
    lengths = range(1, asked.side.num_draft_tokens + 1)
    rate = sum(agreement.least_rate**length for length in lengths) / len(lengths)
    return MIN_OWN_ACCEPTANCE * less_chance(rate, asked.num_draft_tokens / len(lengths))


def wrong_counts(asked: SideAnswers, agreement: Agreement | None) -> list[str]:
    """Returns what the counts of draft tokens say against a side, a sentence each."""
    side, rate = asked.side, asked.acceptance_rate
    if side.num_draft_tokens == 0:
        return ["the target alone drafted"] if asked.num_draft_tokens else []
    if rate is None:
        # As served, drafting may be off where it does not pay.
        if side.num_draft_tokens is None:
            return []
        return [f"nothing was drafted{_why(asked)}, so nothing is shown"]
    if side.is_own_draft and rate < (least := least_own_acceptance(asked, agreement)):
        return [
            f"the target accepts {rate:.2f} of its own draft tokens, less than {least:.2f}: what "
            "the draft has read is not the text"
        ]
    if side.is_wrong_draft and rate > MAX_WRONG_ACCEPTANCE:
        return [f"{rate:.2f} of draft tokens that are always wrong were accepted"]
    return []


def remarks(asked: SideAnswers, agreement: Agreement | None) -> list[str]:
    """Returns what a reader should know of the counts of a side that passed, a sentence each."""
    rate = asked.acceptance_rate
    if asked.side.is_own_draft and agreement is not None and rate is not None:
        least = least_own_acceptance(asked, agreement)
        return [
            f"the target accepts {rate:.2f} of its own draft tokens; down to {least:.2f} that is "
            "chance, since it chose the same token, one at a time or in blocks, in "
            f"{agreement.num_same} of {agreement.num_compared} positions"
        ]
    if asked.side.num_draft_tokens is None and asked.acceptance_rate is None:
        return [f"as served, nothing was drafted here{_why(asked)}"]
    return []


def _why(asked: SideAnswers) -> str:
    words = ", ".join(asked.draft_statuses)
    return f" (draft status: {words})" if words else ""
