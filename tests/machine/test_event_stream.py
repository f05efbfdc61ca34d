from __future__ import annotations

import http.client
import io
from typing import Any, cast

import pytest

from specpipe.errors import ServerError
from specpipe.machine import event_stream
from specpipe.machine.event_stream import read_events


def response(head: bytes, body: bytes) -> http.client.HTTPResponse:
    class Connection:
        def makefile(self, *_: object) -> io.BytesIO:
            return io.BytesIO(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + body)

    found = http.client.HTTPResponse(cast("Any", Connection()))
    found.begin()
    return found


def in_chunks(body: bytes, size: int) -> http.client.HTTPResponse:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])
    return response(b"Transfer-Encoding: chunked\r\n", chunks)


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_may_have_comments_names_and_several_lines(line_end: str, size: int) -> None:
    lines = [
        "\ufeff: ping",
        "event: x",
        "id: 7",
        "data: {é",
        "data:}",
        "",
        ": keep-alive",
        "",
        "data",
        "data:  two spaces",
        "",
        ": end",
        "",
    ]
    body = line_end.join(lines).encode()
    assert list(read_events(in_chunks(body, size), "x")) == ["{é\n}", " two spaces"]


@pytest.mark.parametrize("rest", [b"data: half", b"data: a line\n", b"da"])
def test_what_has_no_empty_line_after_it_is_no_event(rest: bytes) -> None:
    assert list(read_events(in_chunks(b"data: one\n\n" + rest, 99), "x")) == ["one"]


CHUNK = b"b\r\ndata: one\n\n\r\n"


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Transfer-Encoding: chunked\r\n", CHUNK),
        (b"Transfer-Encoding: chunked\r\n", CHUNK + b"20"),
        (b"Transfer-Encoding: chunked\r\n", CHUNK + b"20\r\ndata: tw"),
        (b"Transfer-Encoding: chunked\r\n", CHUNK[:-2]),
        (b"Content-Length: 99\r\n", b"data: one\n\n"),
    ],
)
def test_a_body_that_ends_before_its_time_is_told(head: bytes, body: bytes) -> None:
    events = read_events(response(head, body), "x")
    assert next(events) == "one"
    with pytest.raises(http.client.IncompleteRead):
        next(events)


@pytest.mark.parametrize("body", [b"data: " + b"x" * 60, b"data: 123\n" * 6])
def test_an_event_without_end_is_refused(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "_MAX_EVENT_CHARS", 50)
    short = b"data: " + b"y" * 40 + b"\n\n"
    events = read_events(in_chunks(short * 2 + body, 7), "http://x:1")
    assert [next(events), next(events)] == ["y" * 40] * 2
    with pytest.raises(ServerError, match="^http://x:1 sends an event of more than 50 characters$"):
        next(events)
