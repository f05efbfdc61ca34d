"""Streams that wait, fail on the way, or lose their client."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable

import pytest

from specpipe.errors import RequestError, ServerError
from specpipe.triton.client.completion import Completion
from tests.gateway.conftest import Door
from tests.gateway.fake_upstream import pieces, statistics

LAST = Completion(text="b", finish_reason="stop", statistics=statistics(1, 2))


def raw_request(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def test_a_client_that_waits_hears_something(door: Door) -> None:
    door.upstream.reply = lambda inputs: [1.0, Completion(text="a"), LAST]  # five times as long
    response = door.post("/v1/completions", {"prompt": "x", "stream": True})
    assert re.match(rb"(: waiting\n\n){2,9}data: {", response.body)
    assert [event["choices"][0]["text"] for event in response.events()] == ["a", "b"]


def test_a_refusal_after_that_is_an_event(door: Door) -> None:
    door.upstream.reply = lambda inputs: [1.0, RequestError("messages: no")]
    response = door.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}
    )
    (event,) = response.events()
    assert (response.status, event["error"]["param"]) == (200, "messages")


def test_a_failure_on_the_way_is_an_event(door: Door) -> None:
    door.upstream.reply = lambda inputs: [Completion(text="a"), ServerError("broke off")]
    response = door.post("/v1/completions", {"prompt": "x", "stream": True})
    first, failed = response.events()
    assert first["choices"][0]["text"] == "a"
    assert failed == {
        "error": {"message": "broke off", "type": "server_error", "param": None, "code": None}
    }


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_ends_its_answers(
    door: Door, wait_until: Callable[..., bool], n: int, stream: bool
) -> None:
    door.upstream.reply = lambda inputs: [Completion(text="a"), 600.0] if stream else [600.0]
    with socket.create_connection(("127.0.0.1", door.port)) as connection:
        connection.sendall(
            raw_request("/v1/completions", {"prompt": "x", "stream": stream, "n": n})
        )
        if stream:
            connection.recv(1)
        assert wait_until(lambda: len(door.upstream.asked) == n)
        assert door.upstream.num_closed == 0
    assert wait_until(lambda: door.upstream.num_closed == n)


def test_a_client_that_reads_slowly_holds_up_its_own_answer(
    door: Door, wait_until: Callable[..., bool]
) -> None:
    taken = 0

    def reply(inputs: object) -> object:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield Completion(text="x" * 100_000)
        yield LAST

    door.upstream.reply = reply  # type: ignore[assignment]
    with socket.create_connection(("127.0.0.1", door.port)) as connection:
        connection.sendall(raw_request("/v1/completions", {"prompt": "x", "stream": True}))
        connection.recv(1)
        before = -1
        while before != taken:
            before = taken
            wait_until(lambda: False, seconds=0.2)
        assert taken < 500  # of 100 MB not the half is held in memory
        door.upstream.reply = pieces("ok")
        assert door.post("/v1/completions", {"prompt": "y"}).status == 200
    assert wait_until(lambda: door.upstream.num_closed == 1)
