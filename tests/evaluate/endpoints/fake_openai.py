"""An OpenAI-compatible server whose answers a test writes, event by event, faults included."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.quiet import QuietServer

DONE = "[DONE]"


@dataclass(frozen=True)
class Refusal:
    """An answer that is no stream."""

    status: int
    body: str


CUT = "cut"  # ends the connection without the end of the stream
RESET = "reset"  # and with a TCP reset
Event = "dict[str, Any] | str | float"
"""A chunk, raw data of an event, a pause in seconds, or CUT, RESET."""

Answer = Callable[[dict[str, Any]], "Refusal | Sequence[Event]"]


def completion(text: str, *, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of `/v1/completions`."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], **more}


def delta(*, finish_reason: str | None = None, **parts: Any) -> dict[str, Any]:
    """A chunk of `/v1/chat/completions`."""
    return {"choices": [{"index": 0, "delta": parts, "finish_reason": finish_reason}]}


def usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, Any]:
    """The counts, as a chunk has them."""
    counts = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_completion_tokens}
    return {"usage": counts}


def summary(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, Any]:
    """The chunk that comes last, where it was asked for."""
    return {"choices": [], **usage(num_prompt_tokens, num_completion_tokens)}


@dataclass
class FakeServer:
    """What was asked, and where."""

    url: str
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    """Path, headers, body."""


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[FakeServer]:
    """Answers requests by `answer(body)` for the time of a `with` block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.asked.append((self.path, dict(self.headers), body))
            events = answer(body)
            if isinstance(events, Refusal):
                self.send_response(events.status)
                self.send_header("Content-Length", str(len(events.body.encode())))
                self.end_headers()
                self.wfile.write(events.body.encode())
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(OSError):
                self.send(events)

        def send(self, events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, float):
                    time.sleep(event)
                elif event in (CUT, RESET):
                    self.close_connection = True
                    if event == RESET:
                        linger = struct.pack("ii", 1, 0)
                        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        os.close(self.connection.detach())  # http.server closes in order first
                    return
                else:
                    data = event if isinstance(event, str) else json.dumps(event)
                    self.chunk(f"data: {data}\n\n".encode())
            self.chunk(b"")

        def chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def log_message(self, *_: object) -> None: ...

    server = QuietServer(("127.0.0.1", 0), Handler)
    fake = FakeServer(f"openai+http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
