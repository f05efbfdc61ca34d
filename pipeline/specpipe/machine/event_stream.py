"""Server-sent events, as Triton and OpenAI-compatible servers stream their answers.

The format: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

import codecs
import http.client
import io
import json
from collections.abc import Iterator
from typing import Any

from specpipe.errors import ServerError
from specpipe.machine.web import body_blocks

_MAX_EVENT_CHARS = 1 << 24  # far beyond any chunk of an answer: a guess


def parse_data(data: str | bytes) -> Any:
    """Parses JSON that a server sent; half a surrogate pair, which nothing can print, is none.

    Raises ValueError, and RecursionError for what is nested too deeply.
    """
    value = json.loads(data)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def read_events(response: http.client.HTTPResponse, server: str) -> Iterator[str]:
    """Yields the data of each event as soon as its empty line came; other fields are left out.

    What follows the last empty line is no event. Raises http.client.IncompleteRead where the body
    ends before its time, OSError where the connection breaks, and ServerError for an event that
    does not end.
    """
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8-sig")("replace"), translate=True
    )
    unfinished = ""
    data: list[str] = []
    num_chars = 0
    for received in body_blocks(response):
        *lines, unfinished = (unfinished + decoder.decode(received)).split("\n")
        for line in lines:
            if not line and data:
                yield "\n".join(data)
                data, num_chars = [], 0
            elif line.startswith("data:"):
                data.append(line.removeprefix("data:").removeprefix(" "))
                num_chars += len(line)
        if num_chars + len(unfinished) > _MAX_EVENT_CHARS:
            raise ServerError(f"{server} sends an event of more than {_MAX_EVENT_CHARS} characters")
