"""Signatures of what goes between the models."""

from __future__ import annotations

import pytest

from specpipe.errors import RequestError
from specpipe.triton.secret import VARIABLE, Signer, secret_of_start

SIGNER = Signer("a secret")


@pytest.mark.parametrize(
    ("signature", "purpose", "parts"),
    [
        (b"", "request", (b"ab", b"c")),
        ("ü".encode(), "request", (b"ab", b"c")),
        (Signer("another").sign("request", b"ab", b"c").encode(), "request", (b"ab", b"c")),
        (SIGNER.sign("cancel", b"ab", b"c").encode(), "request", (b"ab", b"c")),
        (SIGNER.sign("request", b"a", b"bc").encode(), "request", (b"ab", b"c")),
    ],
    ids=["none", "no signature", "of another start", "for another purpose", "of other parts"],
)
def test_only_the_signature_of_just_this_counts(
    signature: bytes, purpose: str, parts: tuple[bytes, ...]
) -> None:
    with pytest.raises(RequestError) as caught:
        SIGNER.check(signature, purpose, *parts)
    assert str(caught.value) == (
        "speculative takes requests from the ensemble only: ask 'ensemble'"
    )
    SIGNER.check(SIGNER.sign(purpose, *parts).encode(), purpose, *parts)


def test_a_server_started_by_hand_has_no_secret_and_checks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    Signer.from_environment().check(b"", "request", b"x")
    monkeypatch.setenv(VARIABLE, "a secret")
    with pytest.raises(RequestError):
        Signer.from_environment().check(b"", "request", b"x")


def test_each_start_has_a_secret_of_its_own_unless_the_environment_names_one() -> None:
    assert len({secret_of_start({}) for _ in range(3)}) == 3
    assert secret_of_start({VARIABLE: "mine"}) == "mine"
