"""Whole sides against each other, over table models."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from specpipe.evaluate.endpoints.base import Piece, Question, TimedAnswer, Usage  # noqa: E402
from specpipe.evaluate.verification.asking import Case, SideAnswers, VerifySide, ask_side  # noqa: E402
from specpipe.evaluate.verification.block_shapes import Agreement  # noqa: E402
from specpipe.evaluate.verification.draft_counts import least_own_acceptance  # noqa: E402
from specpipe.evaluate.verification.draft_steps import DraftedAnswer, drafted_answer  # noqa: E402
from specpipe.evaluate.verification.exact import SideResult, judge, judge_target, own_agreement  # noqa: E402
from specpipe.evaluate.verification.verdict import Stream, TieThreshold  # noqa: E402
from specpipe.speculative.request import GREEDY, Sampling  # noqa: E402
from tests.evaluate.verification.table import RememberingModel, TableScorer, endpoint  # noqa: E402
from tests.speculative.table import (  # noqa: E402
    TableModel,
    half_rule,
    target_rule,
    wrong_rule,
)

CASES = [Case(name=f"p{i}", token_ids=(4, 5 + i), max_tokens=17) for i in range(3)]
ALONE = VerifySide(name="target alone", kind="reference", num_draft_tokens=0, at_once=1)
K3 = VerifySide(name="K = 3, 2 at once", kind="speculation", num_draft_tokens=3, at_once=2)
THRESHOLD = TieThreshold(dtype="float32")
SEEDED = Sampling(temperature=0.8, seed=3, is_seeded=True)


def judged(reference: SideAnswers, asked: SideAnswers, sampling: Sampling = GREEDY) -> SideResult:
    return judge(
        "greedy",
        reference,
        asked,
        CASES,
        scorer=TableScorer(TableModel(target_rule)),
        sampling=sampling,
        threshold=THRESHOLD,
        end_token_ids=frozenset(),
    )


def test_a_sound_pair_is_identical_and_its_counts_are_right() -> None:
    """Case A6 with a draft that is right at even lengths, for each of three prompts of 2 tokens.

    Every step accepts one draft token and emits two: 7 steps of 3 draft tokens, one of 2 (3 tokens
    are left), and one of none.
    """
    with endpoint(TableModel(target_rule), TableModel(half_rule)) as pair:
        reference, asked = (ask_side(pair, CASES, side, GREEDY) for side in (ALONE, K3))
    result = judged(reference, asked)
    assert (result.verdict, result.num_identical) == ("identical", 3)
    assert (result.ties, result.faults, result.notes, result.reason) == ((), (), (), None)
    assert (reference.num_tokens, reference.num_draft_tokens) == (51, 0)
    assert result.num_tokens == 51
    assert (result.num_draft_tokens, result.num_accepted_tokens) == (3 * 23, 3 * 8)
    one = DraftedAnswer(
        num_draft_tokens=23, num_accepted_tokens=8, steps={(3, 1): 7, (2, 1): 1, (0, 0): 1}
    )
    assert result.drafted == (one,) * 3


def test_a_sound_pair_is_identical_with_a_seed() -> None:
    with endpoint(RememberingModel(1, blend=0.5), RememberingModel(2, blend=0.5)) as pair:
        reference, asked = (ask_side(pair, CASES, side, SEEDED) for side in (ALONE, K3))
    result = judged(reference, asked, SEEDED)
    assert (result.verdict, result.num_identical) == ("identical", 3)
    assert 0 < result.num_accepted_tokens < result.num_draft_tokens


def test_every_prompt_has_a_seed_of_its_own_and_the_same_on_each_side() -> None:
    flat = TableModel(lambda context: 4)
    with endpoint(flat, flat) as pair:
        first, again = (ask_side(pair, [CASES[0]] * 3, ALONE, SEEDED) for _ in range(2))
    assert first == again
    assert len({stream.token_ids for stream in first.streams}) == 3


def test_the_own_draft_and_the_wrong_draft_accept_what_they_must() -> None:
    """17 tokens with K = 3 (case A6): own drafts 12 and accepts 12, wrong accepts 0."""
    own = dataclasses.replace(K3, is_own_draft=True)
    wrong = dataclasses.replace(K3, is_wrong_draft=True)
    target = TableModel(target_rule)
    with endpoint(target, target) as pair:
        reference, asked_own = (ask_side(pair, CASES, side, GREEDY) for side in (ALONE, own))
    with endpoint(target, TableModel(wrong_rule)) as pair:
        asked_wrong = ask_side(pair, CASES, wrong, GREEDY)
    assert (asked_own.num_draft_tokens, asked_own.num_accepted_tokens) == (36, 36)
    assert asked_wrong.num_accepted_tokens == 0
    assert judged(reference, asked_own).verdict == "identical"
    assert judged(reference, asked_wrong).verdict == "identical"


def counted(
    side: VerifySide, drafted: int, accepted: int, *, draft_statuses: tuple[str, ...] = ()
) -> SideResult:
    streams = tuple(Stream((9, 9), "length") for _ in CASES)
    return judged(
        SideAnswers(side=ALONE, streams=streams),
        SideAnswers(
            side=side,
            streams=streams,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            draft_statuses=draft_statuses,
        ),
    )


@pytest.mark.parametrize(
    ("changes", "drafted", "accepted", "reason"),
    [
        ({}, 0, 0, "nothing was drafted, so nothing is shown"),
        ({"num_draft_tokens": 0}, 4, 1, "the target alone drafted"),
        (
            {"is_own_draft": True}, 100, 80,
            "the target accepts 0.80 of its own draft tokens, less than 0.95: what the draft has "
            "read is not the text",
        ),
        (
            {"is_wrong_draft": True}, 100, 10,
            "0.10 of draft tokens that are always wrong were accepted",
        ),
    ],
)  # fmt: skip
def test_counts_that_cannot_be_are_a_fault_though_all_tokens_are_equal(
    changes: dict[str, object], drafted: int, accepted: int, reason: str
) -> None:
    result = counted(dataclasses.replace(K3, **changes), drafted, accepted)  # type: ignore[arg-type]
    assert (result.verdict, result.num_identical, result.reason) == ("fault", 3, reason)


def test_a_target_that_does_not_always_agree_with_itself_may_accept_less() -> None:
    """It chooses the same in 80 of 100 positions, 0.658 at least. With K = 1 and 100 steps, 0.508
    is the least from which chance makes that: 0.508 + 3 * sqrt(0.508 * 0.492 / 100) = 0.658. 0.95
    of 0.508 are 0.482.
    """
    side = dataclasses.replace(K3, num_draft_tokens=1, is_own_draft=True)

    def judged_at(accepted: int) -> SideResult:
        streams = tuple(Stream((9, 9), "length") for _ in CASES)
        return judge(
            "greedy",
            SideAnswers(side=ALONE, streams=streams),
            SideAnswers(
                side=side, streams=streams, num_draft_tokens=100, num_accepted_tokens=accepted
            ),
            CASES,
            scorer=TableScorer(TableModel(target_rule)),
            sampling=GREEDY,
            threshold=THRESHOLD,
            end_token_ids=frozenset(),
            agreement=Agreement(80, 100),
        )

    assert judged_at(48).reason == (
        "the target accepts 0.48 of its own draft tokens, less than 0.48: what the draft has read "
        "is not the text"
    )
    right = judged_at(49)
    assert (right.verdict, right.notes) == (
        "identical",
        (
            "the target accepts 0.49 of its own draft tokens; down to 0.48 that is chance, since "
            "it chose the same token, one at a time or in blocks, in 80 of 100 positions",
        ),
    )


def test_a_long_block_is_accepted_where_all_its_choices_agree() -> None:
    """K = 3, no chance left: (0.5 + 0.25 + 0.125) / 3 = 0.2917, times 0.95."""
    asked = SideAnswers(side=K3, streams=(), num_draft_tokens=3 * 10**12)
    agreement = Agreement(5 * 10**11, 10**12)
    assert least_own_acceptance(asked, agreement) == pytest.approx(0.95 * 0.875 / 3, abs=1e-4)
    assert least_own_acceptance(asked, None) == 0.95


def test_agreement_is_that_of_the_choices_of_a_request_seeds_included() -> None:
    """In blocks half of the rows are of another rule; with a flat target the seed decides all."""
    reference = SideAnswers(side=ALONE, streams=tuple(Stream((9,) * 6, "length") for _ in CASES))

    def found(scorer: TableScorer, sampling: Sampling) -> Agreement:
        return own_agreement(
            reference,
            CASES[:2],
            scorer=scorer,
            sampling=sampling,
            block_size=4,
            end_token_ids=frozenset(),
        )

    scorer = TableScorer(TableModel(target_rule), in_blocks=TableModel(half_rule))
    assert found(scorer, GREEDY) == Agreement(num_same=8, num_compared=14)
    almost_flat = dataclasses.replace(SEEDED, temperature=1e6)
    assert found(scorer, almost_flat) == Agreement(num_same=14, num_compared=14)


def test_as_served_may_draft_nothing() -> None:
    as_served = dataclasses.replace(K3, num_draft_tokens=None)
    result = counted(as_served, 0, 0, draft_statuses=("does_not_pay", "too_short"))
    assert result.verdict == "identical"
    assert result.notes == (
        "as served, nothing was drafted here (draft status: does_not_pay, too_short)",
    )
    assert counted(as_served, 0, 0).notes == ("as served, nothing was drafted here",)


def changed(asked: SideAnswers, index: int, stream: Stream) -> SideAnswers:
    streams = list(asked.streams)
    streams[index] = stream
    return dataclasses.replace(asked, streams=tuple(streams), num_draft_tokens=9)


def test_a_wrong_token_is_a_fault_of_its_prompt() -> None:
    with endpoint(TableModel(target_rule), TableModel(target_rule)) as pair:
        reference = ask_side(pair, CASES, ALONE, GREEDY)
    ids = list(reference.streams[1].token_ids)
    right, ids[6] = ids[6], 103
    result = judged(
        reference, changed(dataclasses.replace(reference, side=K3), 1, Stream(tuple(ids), "length"))
    )
    assert (result.verdict, result.num_identical) == ("fault", 2)
    (fault,) = result.faults
    assert fault.case == "p1"
    assert result.reason is not None
    assert result.reason.startswith(f"prompt p1: position 6: 103 instead of {right}, margin 1 = ")
    assert result.to_json()["faults"][0] == {
        "prompt": "p1",
        "reason": fault.comparison.reason,
        "position": 6,
        "expected_id": right,
        "found_id": 103,
        "margin": 1.0,
        "in_ulps": 2.0**23,
        "threshold": pytest.approx(2.0**-23),
    }


class NearTie(TableModel):
    """The token 5 is always as good as the rule's, but for the last place."""

    def logits(self, token_ids: object, num_rows: int) -> np.ndarray:
        rows = super().logits(token_ids, num_rows)  # type: ignore[arg-type]
        rows[:, 5] = 1.0 - 2.0**-24
        return rows


def test_the_target_alone_is_compared_with_its_checkpoint() -> None:
    with endpoint(TableModel(target_rule), TableModel(target_rule)) as pair:
        reference = ask_side(pair, CASES, ALONE, GREEDY)

    def against(model: TableModel) -> SideResult:
        return judge_target(
            reference,
            CASES,
            scorer=TableScorer(model),
            threshold=THRESHOLD,
            end_token_ids=frozenset({2}),
        )

    assert against(TableModel(target_rule)).verdict == "identical"
    other = against(TableModel(half_rule))
    assert other.verdict == "fault"
    assert other.reason is not None and other.reason.startswith("prompt p0: position ")
    assert against(NearTie(target_rule)).verdict == "identical"


def test_a_checkpoint_that_seldom_chooses_what_is_served_is_another_one() -> None:
    """A threshold of 16 hides every margin here. The other rule is right at even lengths, 27 of 51.

    One that agrees with itself in 980 of 1000 positions does so in 0.962 at least, so it must
    choose 1 - 4 * 0.038 = 0.847, and in 51 tokens 0.646: 0.646 + 3 * sqrt(0.646 * 0.354 / 51).
    """
    with endpoint(TableModel(target_rule), TableModel(target_rule)) as pair:
        reference = ask_side(pair, CASES, ALONE, GREEDY)

    def against(model: TableModel, agreement: Agreement | None) -> SideResult:
        return judge_target(
            reference,
            CASES,
            scorer=TableScorer(model),
            threshold=TieThreshold(dtype="float32", block_difference=2.0),
            end_token_ids=frozenset(),
            agreement=agreement,
        )

    assert against(TableModel(half_rule), None).verdict == "tie"
    other = against(TableModel(half_rule), Agreement(980, 1000))
    assert (other.verdict, other.reason) == (
        "fault",
        "the checkpoint chooses 0.53 of the tokens that were served, less than 0.65; whatever the "
        "block shape it chooses the same 0.98",
    )
    assert against(TableModel(target_rule), Agreement(980, 1000)).verdict == "identical"


def test_a_server_that_goes_on_where_its_checkpoint_ends_is_at_fault() -> None:
    ends = TableModel(lambda context: 2)
    reference = SideAnswers(side=ALONE, streams=tuple(Stream((9, 9), "length") for _ in CASES))
    early = SideAnswers(side=ALONE, streams=tuple(Stream((), "stop") for _ in CASES))

    def against(asked: SideAnswers) -> SideResult:
        return judge_target(
            asked,
            CASES,
            scorer=TableScorer(ends),
            threshold=THRESHOLD,
            end_token_ids=frozenset({2}),
        )

    assert against(reference).verdict == "fault"
    assert against(early).verdict == "identical"


@pytest.mark.parametrize(
    "sizes, drafted, accepted, reason, num_steps, steps",
    [
        # 10 tokens may come: the last step had one left, and drafted nothing.
        (
            (4, 1, 3, 1, 1),
            10,
            5,
            "length",
            5,
            {(3, 3): 1, (3, 0): 1, (3, 2): 1, (1, 0): 1, (0, 0): 1},
        ),
        # An end token: as the third draft token that was accepted, and as the target's own.
        ((2, 2), 6, 4, "stop", 2, {(3, 1): 1, (3, 3): 1}),
        ((2, 2), 6, 3, "stop", 2, {(3, 1): 1, (3, 2): 1}),
        # Half of a character was held back, and came with the next step.
        ((2, 4), 6, 3, "stop", 3, None),
        # A step said to have drafted more than it can have, and none at all.
        ((2, 2), 9, 3, "stop", 2, None),
        ((0, 2), 3, 1, "stop", 2, None),
    ],
)
def test_steps_are_known_where_they_add_up(
    sizes: tuple[int, ...],
    drafted: int,
    accepted: int,
    reason: Any,
    num_steps: int,
    steps: dict[tuple[int, int], int] | None,
) -> None:
    usage = Usage(
        num_steps=num_steps, total_draft_tokens=drafted, total_accepted_draft_tokens=accepted
    )
    pieces = [Piece(num_tokens=size) for size in sizes]
    pieces[-1] = dataclasses.replace(pieces[-1], finish_reason=reason, usage=usage)
    answer = TimedAnswer(
        question=Question(token_ids=(4,), max_tokens=10, num_draft_tokens=3),
        started_s=0.0,
        ended_s=1.0,
        pieces=tuple(pieces),
        arrivals_s=(0.5,) * len(pieces),
    )
    assert drafted_answer(answer, 3) == DraftedAnswer(
        num_draft_tokens=drafted, num_accepted_tokens=accepted, steps=steps
    )
