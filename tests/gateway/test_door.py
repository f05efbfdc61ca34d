"""The door around an application that answers with what it was sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from specpipe.gateway.access_log import AccessLog
from specpipe.gateway.door import Door
from specpipe.gateway.keys import Keys
from specpipe.gateway.metrics import GatewayMetrics
from specpipe.machine.prometheus import parse_samples, total
from tests.gateway.test_keys import KEY, sha256

BEARER = [(b"authorization", f"Bearer {KEY}".encode())]


class Asked:
    """One request through a door, and what comes of it."""

    def __init__(
        self, door: Door, path: str, headers: Iterable[tuple[bytes, bytes]], blocks: list[bytes]
    ) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.blocks = [
            {"type": "http.request", "body": block, "more_body": i + 1 < len(blocks)}
            for i, block in enumerate(blocks)
        ]
        self.is_gone, self.has_begun = asyncio.Event(), asyncio.Event()
        scope = {
            "type": "http",
            "method": "POST" if blocks != [b""] else "GET",
            "path": path,
            "headers": list(headers),
            "client": ("192.0.2.7", 1234),
        }
        self.end = asyncio.create_task(door(scope, self.receive, self.send))  # type: ignore[arg-type]

    async def receive(self) -> dict[str, Any]:
        if self.blocks:
            return self.blocks.pop(0)
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]
            self.has_begun.set()

    def error(self) -> Any:
        return json.loads(self.body)["error"]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Echoes the body in two parts; between them it waits for the event of a path /wait."""
    if scope["path"] == "/fail":
        raise ZeroDivisionError
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"], "more_body": True})
    if scope["path"] == "/wait":
        await receive()
        return
    scope["state"]["count_tokens"](7, 5)
    said = f"{scope['state']['request_id']} {scope['state']['key_name']}".encode()
    await send({"type": "http.response.body", "body": said})


Use = Callable[[Door, Callable[..., Asked]], Awaitable[None]]


def with_door(use: Use, *, keys: Keys | None = None, **options: Any) -> GatewayMetrics:
    metrics = GatewayMetrics(lambda: {"grpc://a:1": True, "grpc://b:1": False})

    async def run() -> None:
        options.setdefault("max_body_bytes", 1000)
        door = Door(app, keys=keys or Keys(None, {}), metrics=metrics, **options)

        def ask(path: str = "/v1/completions", headers: Any = (), *blocks: bytes) -> Asked:
            return Asked(door, path, headers, list(blocks) or [b""])

        await use(door, ask)

    asyncio.run(run())
    return metrics


def keys_with(tmp_path: Path, **limits: int) -> Keys:
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"keys": [{"name": "ci", "sha256": sha256(KEY), **limits}]}))
    return Keys(path, {})


def test_a_request_is_passed_on_logged_and_counted() -> None:
    lines: list[str] = []

    async def use(door: Door, ask: Callable[..., Asked]) -> None:
        given = ask("/v1/completions", [(b"x-request-id", b"mine-1")], b"pro", b"mpt")
        drawn = ask("/v1/completions", [(b"x-request-id", b"no\nid")], b"prompt")
        await asyncio.gather(given.end, drawn.end)
        assert given.body == b"promptmine-1 "
        assert given.headers[b"x-request-id"] == b"mine-1"
        assert len(drawn.headers[b"x-request-id"]) == 32

    metrics = with_door(use, access_log=AccessLog(lines.append))
    line = json.loads(lines[0])
    del line["time"], line["seconds"], line["first_chunk_seconds"]
    assert line == {
        "request_id": "mine-1",
        "client": "192.0.2.7",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "body_bytes": 6,
        "num_chunks": 2,
        "prompt_tokens": 7,
        "completion_tokens": 5,
    }
    samples = parse_samples(metrics.page().decode())
    for name, labels, value in (
        ("specpipe_gateway_requests_total", {"path": "/v1/completions", "status": "200"}, 2),
        ("specpipe_gateway_tokens_total", {"kind": "prompt"}, 14),
        ("specpipe_gateway_tokens_total", {"kind": "completion"}, 10),
        ("specpipe_gateway_chunks_total", {}, 4),
        ("specpipe_gateway_first_chunk_seconds_count", {}, 2),
        ("specpipe_gateway_requests_in_flight", {}, 0),
        ("specpipe_gateway_server_is_asked", {"url": "grpc://b:1"}, 0),
    ):
        assert total(samples, name, **labels) == value, name


def test_the_log_has_a_prompt_only_when_asked() -> None:
    lines: list[str] = []

    async def use(door: Door, ask: Callable[..., Asked]) -> None:
        await ask("/v1/completions", (), b"a secret" + b"\xff" * 900).end

    with_door(use, access_log=AccessLog(lines.append))
    with_door(use, access_log=AccessLog(lines.append, has_prompts=True))
    assert ["a secret" in line for line in lines] == [False, True]


def test_without_a_key_nobody_comes_in(tmp_path: Path) -> None:
    async def use(door: Door, ask: Callable[..., Asked]) -> None:
        headers: list[Any] = [[], [(b"authorization", b"Bearer \xff" + KEY.encode())], BEARER]
        asked = [ask("/v1/completions", each, b"x") for each in headers]
        asked += [ask("/health"), ask("/metrics"), ask("/v1/models")]
        await asyncio.gather(*(each.end for each in asked))
        assert [each.status for each in asked] == [401, 401, 200, 200, 200, 401]
        missing, wrong, known, *_ = asked
        assert missing.error() == {
            "message": "no key was sent: expected `Authorization: Bearer KEY`",
            "type": "authentication_error",
            "param": None,
            "code": "invalid_api_key",
        }
        assert wrong.error()["message"] == "this key is not known here"
        assert known.body.endswith(b" ci")

    metrics = with_door(use, keys=keys_with(tmp_path))
    samples = parse_samples(metrics.page().decode())
    assert total(samples, "specpipe_gateway_refused_requests_total", reason="key") == 3


def test_what_a_key_may_not_is_refused(tmp_path: Path) -> None:
    keys = keys_with(tmp_path, requests_per_minute=4, max_concurrent_requests=1, max_body_bytes=10)

    async def use(door: Door, ask: Callable[..., Asked]) -> None:
        told = [*BEARER, (b"content-length", b"11")]
        large = ask("/v1/completions", told, b"")
        await large.end
        longer = ask("/v1/completions", BEARER, b"123456", b"123456")
        await longer.end
        assert (large.status, longer.status) == (413, 413)
        assert longer.error()["message"] == "the body is too large; it may have 10 bytes"
        waiting = ask("/wait", BEARER, b"x")
        await waiting.has_begun.wait()
        second = ask("/v1/completions", BEARER, b"x")
        await second.end
        assert (second.status, second.headers[b"retry-after"]) == (429, b"1")
        waiting.is_gone.set()
        await waiting.end
        await ask("/v1/completions", BEARER, b"x").end
        fifth = ask("/v1/completions", BEARER, b"x")
        await fifth.end
        assert fifth.status == 429
        assert 5 <= int(fifth.headers[b"retry-after"]) <= 15
        assert fifth.error()["code"] == "rate_limit_exceeded"

    metrics = with_door(use, keys=keys)
    samples = parse_samples(metrics.page().decode())
    assert total(samples, "specpipe_gateway_refused_requests_total", reason="size") == 2
    assert total(samples, "specpipe_gateway_refused_requests_total", reason="rate") == 2
    assert total(samples, "specpipe_gateway_gone_clients_total") == 1


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def use(door: Door, ask: Callable[..., Asked]) -> None:
        slow = ask("/v1/completions", (), b"12", b"34")
        del slow.blocks[1]
        await slow.end
        assert (slow.status, slow.headers[b"connection"]) == (408, b"close")

    async def go_away(door: Door, ask: Callable[..., Asked]) -> None:
        gone = ask("/v1/completions", (), b"12", b"34")
        del gone.blocks[1]
        gone.is_gone.set()
        await gone.end
        assert gone.status == 0

    with_door(use, body_time_s=0.2)
    with_door(go_away, body_time_s=600.0)


def test_a_door_that_is_closed_waits_for_those_inside() -> None:
    async def use(door: Door, ask: Callable[..., Asked]) -> None:
        inside = ask("/wait", (), b"x")
        await inside.has_begun.wait()
        assert await door.drain(0.05) == 1
        late, health = ask("/v1/completions", (), b"x"), ask("/health")
        await asyncio.gather(late.end, health.end)
        assert (late.status, health.status) == (503, 503)
        assert (late.headers[b"connection"], late.headers[b"retry-after"]) == (b"close", b"5")
        ending = asyncio.create_task(door.drain(20))
        inside.is_gone.set()
        assert await ending == 0

    with_door(use)


def test_a_failure_of_the_application_is_counted_and_raised() -> None:
    async def use(door: Door, ask: Callable[..., Asked]) -> None:
        with pytest.raises(ZeroDivisionError):
            await ask("/fail", (), b"x").end
        assert await door.drain(1) == 0

    metrics = with_door(use)
    samples = parse_samples(metrics.page().decode())
    assert total(samples, "specpipe_gateway_requests_total", status="500") == 1
