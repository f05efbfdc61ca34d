"""How many tokens the draft is to propose to whom, and the forwards in which it does.

B requests that draft in a step, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specpipe.runtimes.pair.costs import CostTable, timed
from specpipe.runtimes.pair.engine import Engine, SequenceId
from specpipe.runtimes.pair.sampler import Drafted, Sampler
from specpipe.speculative.adaptive import MIN_GAIN


@dataclass(eq=False)
class Proposal:
    """Draft tokens that the draft is to give a request in this step, beside those that its guide
    forces.
    """

    sequence: SequenceId
    drafted: Drafted
    num_draft_tokens: int
    unread: list[int]
    """What the draft reads to give the next of them."""


def draft_in_steps(
    proposals: Sequence[Proposal], engine: Engine, sampler: Sampler, costs: CostTable | None
) -> None:
    """Runs up to K forwards, each over the proposals that lack a token.

    costs  learn from those that read one token each; None: nothing does
    """
    while proposals:
        batch = [(p.sequence, p.unread) for p in proposals]
        is_plain = all(len(p.unread) == 1 for p in proposals)
        with timed(costs, "draft", len(batch) if is_plain else None):
            logits = engine.forward(batch, [1] * len(batch))
            has_token = sampler.draft(logits, [p.drafted for p in proposals])
        still_drafting = []
        for proposal, is_drafted in zip(proposals, has_token, strict=True):
            token_ids = proposal.drafted.token_ids
            if not is_drafted:
                _note_failed(proposal)
                continue
            proposal.unread = [token_ids[-1], *proposal.drafted.add_forced()]
            is_wanted = proposal.drafted.num_drawn < proposal.num_draft_tokens
            if is_wanted and proposal.drafted.state.drafts.has_room_behind(len(token_ids)):
                still_drafting.append(proposal)
        proposals = still_drafting


def draft_in_pass(
    proposals: Sequence[Proposal],
    engine: Engine,
    sampler: Sampler,
    costs: CostTable | None,
    *,
    mask_token_id: int,
) -> None:
    """Runs one forward over all proposals: what each has not read, and a mask for each draft token
    but the last.

    The rows of the last K positions score the draft tokens, in turn. What is cached of masks is
    forgotten at once, so that no token sees it.
    """
    if not proposals:
        return
    lengths = [_num_rows(proposal) for proposal in proposals]
    batch = [
        (p.sequence, [*p.unread, *[mask_token_id] * (length - 1)])
        for p, length in zip(proposals, lengths, strict=True)
    ]
    # A round leaves a token more than were accepted unread; more is that of a text.
    is_plain = all(len(p.unread) <= n + 1 for p, n in zip(proposals, lengths, strict=True))
    num_tokens = sum(len(token_ids) for _, token_ids in batch)
    with timed(costs, "draft", num_tokens if is_plain else None):
        logits = engine.forward(batch, lengths)
        for (sequence, _), length in zip(batch, lengths, strict=True):
            engine.truncate(sequence, engine.length(sequence) - (length - 1))
        sampler.draft_in_pass(logits, [p.drafted for p in proposals], lengths)
    for proposal in proposals:
        _note_failed(proposal)


def _num_rows(proposal: Proposal) -> int:
    """Returns the draft tokens of a proposal that the request has use and room for."""
    drafts, num_forced = proposal.drafted.state.drafts, len(proposal.drafted.token_ids)
    return sum(drafts.has_room_behind(num_forced + n) for n in range(proposal.num_draft_tokens))


def _note_failed(proposal: Proposal) -> None:
    if not proposal.drafted.token_ids:
        proposal.drafted.state.drafts.skip("draft_failed")


def worthwhile(
    proposals: Sequence[Proposal], copied: Sequence[Drafted], costs: CostTable, batch_size: int
) -> list[Proposal]:
    """Returns proposals cut to the draft length at which the batch emits most in a given time, and
    cuts what was copied likewise.

    Each request proposes what would pay if all did as it does. But a draft step for a few of them
    costs nearly what it costs for all, and those that do not draft wait for it. Those that name
    their draft length are not stopped.
    """
    num_plain = batch_size - len(proposals) - len(copied)
    expected_of = [
        draft.state.drafts.expected_tokens(
            is_copied=draft.is_copied, is_predicted=draft.is_predicted
        )
        for draft in (*(p.drafted for p in proposals), *copied)
    ]

    def rate(cap: int) -> float:
        lengths = [_capped(p.drafted, p.num_draft_tokens, cap) for p in proposals]
        copied_lengths = [_capped(d, len(d.token_ids), cap) for d in copied]
        expected = sum(
            by_length[length]
            for by_length, length in zip(expected_of, (*lengths, *copied_lengths), strict=True)
        )
        seconds = costs.step_seconds([*lengths, *[0] * num_plain], copied_lengths)
        return (num_plain + expected) / seconds

    longest = max(
        (*(p.num_draft_tokens for p in proposals), *(len(d.token_ids) for d in copied)), default=0
    )
    rates = [rate(cap) for cap in range(longest + 1)]
    best = rates.index(max(rates))
    cap = best if rates[best] >= MIN_GAIN * rates[0] else 0
    worthwhile = []
    for proposal in proposals:
        proposal.num_draft_tokens = _capped(proposal.drafted, proposal.num_draft_tokens, cap)
        if proposal.num_draft_tokens:
            worthwhile.append(proposal)
        else:
            proposal.drafted.state.drafts.skip("does_not_pay")
    for draft in copied:
        del draft.token_ids[_capped(draft, len(draft.token_ids), cap) :]
    return worthwhile


def _capped(draft: Drafted, length: int, cap: int) -> int:
    return length if draft.state.drafts.names_draft_length else min(length, cap)
