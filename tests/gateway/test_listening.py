"""Where the door listens, and for whom."""

from __future__ import annotations

import pytest

from specpipe.errors import ServerError
from specpipe.gateway.listening import Listen, bind, check_open, parse_listen, url_of


@pytest.mark.parametrize(
    ("text", "listen"),
    [
        ("9000", Listen("127.0.0.1", 9000)),
        ("0.0.0.0:0", Listen("0.0.0.0", 0)),
        ("[::1]:80", Listen("::1", 80)),
        ("localhost:65535", Listen("127.0.0.1", 65535)),
    ],
)
def test_a_host_and_a_port(text: str, listen: Listen) -> None:
    assert parse_listen(text) == listen


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", " is not [HOST:]PORT, as in 8080 or 0.0.0.0:8080"),
        ("::1:80", "::1:80 is not [HOST:]PORT, as in 8080 or 0.0.0.0:8080"),
        ("65536", "65536 is not [HOST:]PORT, as in 8080 or 0.0.0.0:8080"),
        ("http://x:80", "http://x:80 is not [HOST:]PORT, as in 8080 or 0.0.0.0:8080"),
        ("192.0.2.1:80", "192.0.2.1 is no address of this machine: give one, or 127.0.0.1"),
        ("-.invalid:80", "-.invalid is no address of this machine: give one, or 127.0.0.1"),
    ],
)
def test_what_is_none_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ServerError) as refused:
        parse_listen(text)
    assert str(refused.value) == fault


@pytest.mark.parametrize(
    ("host", "has_keys", "allow_no_keys", "is_allowed"),
    [
        ("127.0.0.1", False, False, True),
        ("::1", False, False, True),
        ("0.0.0.0", False, False, False),
        ("::", False, False, False),
        ("192.0.2.1", True, False, True),
        ("192.0.2.1", False, True, True),
    ],
)
def test_others_need_keys_or_a_word(
    host: str, has_keys: bool, allow_no_keys: bool, is_allowed: bool
) -> None:
    try:
        check_open(Listen(host, 1), has_keys=has_keys, allow_no_keys=allow_no_keys)
    except ServerError:
        assert not is_allowed
    else:
        assert is_allowed


def test_a_taken_port_is_refused() -> None:
    with bind(parse_listen("0.0.0.0:0")) as first:
        port = first.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{port}"
        first.listen()
        with pytest.raises(ServerError, match=rf"^127.0.0.1:{port} cannot be listened on \(Addr"):
            bind(Listen("127.0.0.1", port))
