"""The application, on a socket, in front of an upstream that answers as it is told."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import uvicorn

from specpipe.config.limits import Limits
from specpipe.gateway.app import make_app
from specpipe.gateway.models import ServedModel
from specpipe.text import Tokenizer
from tests.gateway.fake_upstream import FakeUpstream
from tests.waiting import PATIENCE_S

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
MODEL = Path(__file__).parents[2] / "models" / "python-code" / "target"


@dataclass(frozen=True)
class Response:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The events of a stream, of which the last one must be the end."""
        *events, end = [
            line.removeprefix("data: ")
            for line in self.body.decode().split("\n\n")
            if line and not line.startswith(":")
        ]
        assert end == "[DONE]", self.body
        return [json.loads(event) for event in events]

    @property
    def error(self) -> dict[str, Any]:
        found = self.json()
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = found["error"]
        return error


@dataclass(frozen=True)
class Door:
    """A running application."""

    port: int
    upstream: FakeUpstream
    served: ServedModel

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def get(self, path: str, method: str = "GET") -> Response:
        return self._send(method, path, None)

    def post(self, path: str, body: Any, headers: Mapping[str, str] = NO_HEADERS) -> Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._send("POST", path, data, headers)

    def _send(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str] = NO_HEADERS
    ) -> Response:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, data, dict(headers))
            response = connection.getresponse()
            return Response(response.status, dict(response.headers), response.read())
        finally:
            connection.close()


def served_model(folder: Path = MODEL) -> ServedModel:
    tokenizer = Tokenizer.load(folder)
    limits = Limits().resolved(
        max_seq_len=1024,
        longest_token_bytes=tokenizer.longest_token_bytes,
        is_bytewise=tokenizer.is_bytewise,
    )
    return ServedModel(names=("python-code", "alias"), tokenizer=tokenizer, limits=limits)


@contextlib.contextmanager
def running(app: Any) -> Iterator[int]:
    """Serves an application on a free port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def session_door() -> Iterator[Door]:
    upstream, served = FakeUpstream(), served_model()
    with running(make_app(upstream, served, keep_alive_s=0.2)) as port:
        yield Door(port, upstream, served)


@pytest.fixture
def door(session_door: Door) -> Door:
    """The application, its upstream as new."""
    session_door.upstream.__init__()  # type: ignore[misc]
    return session_door
