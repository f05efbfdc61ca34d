"""Which draft lengths are asked for, and of which server."""

from __future__ import annotations

import pytest

from specpipe.errors import ConfigError, RequestError, ServerError
from specpipe.evaluate.endpoints.base import Piece
from specpipe.evaluate.verification.asking import Case
from specpipe.evaluate.verification.questions import (
    draft_lengths,
    fixed_lengths,
    sides_of_speculation,
    takes_draft_lengths,
)
from tests.evaluate.endpoints.scripted import Scripted


@pytest.mark.parametrize(
    ("wanted", "most", "lengths"),
    [((), 4, (1, 2, 4)), ((), 5, (1, 3, 5)), ((), 1, (1,)), ((8, 3, 8), 8, (3, 8))],
)
def test_one_half_and_all_unless_others_are_wanted(
    wanted: tuple[int, ...], most: int, lengths: tuple[int, ...]
) -> None:
    assert draft_lengths(wanted, most) == lengths


def test_without_draft_tokens_there_is_nothing_to_verify() -> None:
    with pytest.raises(ConfigError) as caught:
        draft_lengths((), 0)
    assert str(caught.value) == (
        "speculation.num_draft_tokens is 0: there is no speculation to verify"
    )


def test_a_pair_that_always_drafts_has_one_length() -> None:
    assert fixed_lengths((), 4) == fixed_lengths((4,), 4) == (4,)
    with pytest.raises(ConfigError) as caught:
        fixed_lengths((2, 4), 4)
    assert str(caught.value) == (
        "--num-draft-tokens 2,4: this pair drafts 4 tokens in every step; leave it out"
    )


def test_the_longest_is_asked_for_one_at_a_time_too() -> None:
    sides = sides_of_speculation((1, 4), 8)
    assert [(side.name, side.num_draft_tokens, side.at_once) for side in sides] == [
        ("K = 4, 1 at once", 4, 1),
        ("K = 1, 8 at once", 1, 8),
        ("K = 4, 8 at once", 4, 8),
    ]


@pytest.mark.parametrize(
    ("event", "takes"),
    [
        (Piece(token_ids=(5,), num_tokens=1, finish_reason="length"), True),
        (RequestError("num_draft_tokens is 0: it drafts 4 tokens in every step"), False),
        (ServerError("out of memory"), True),
    ],
)
def test_a_server_that_refuses_to_leave_the_draft_out_is_told_from_one_that_fails(
    event: Piece | Exception, takes: bool
) -> None:
    server = Scripted(lambda question: [(0.1, event)])
    case = Case(name="p", token_ids=(4, 5), max_tokens=17)
    assert takes_draft_lengths(server, case) is takes
    assert [(q.num_draft_tokens, q.max_tokens) for q in server.asked] == [(0, 1)]
