"""One real Triton, asked as the door asks it: answers, refusals, ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from specpipe.errors import NoAnswer, RequestError, ServerError
from specpipe.gateway.triton_upstream import CompletionRate, TritonUpstream
from specpipe.gateway.upstream import Busy
from specpipe.machine.prometheus import parse_samples, total
from specpipe.triton.client import Client, Completion
from specpipe.triton.secret import Signer
from specpipe.triton.server.server import Server
from tests.triton.asking import CANCELLED, metrics, settled_metrics

PROMPT = "def add(a, b):\n    return a + b\n"


async def ask(upstream: TritonUpstream, **inputs: Any) -> list[Completion]:
    inputs = {"max_tokens": 24, "seed": 7, "stream": True, **inputs}
    async with contextlib.aclosing(upstream.answer(inputs)) as chunks:
        return [chunk async for chunk in chunks]


def asked(url: str, *requests: Mapping[str, Any]) -> list[Any]:
    """What becomes of requests, one after the other, over one connection."""

    async def run() -> list[Any]:
        upstream = TritonUpstream(url)
        ends: list[Any] = []
        for inputs in requests:
            try:
                ends.append(await ask(upstream, **inputs))
            except Exception as exc:
                ends.append(exc)
        await upstream.close()
        return ends

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_that_of_the_client(echo_server: Server, stream: bool) -> None:
    inputs = {"text_input": PROMPT, "return_log_probs": True, "stop_words": ["zzz", "yyy"]}
    (chunks,) = asked(echo_server.grpc_url, {**inputs, "stream": stream})
    with Client(echo_server.grpc_url) as client:
        settings = {**inputs, "max_tokens": 24, "seed": 7}
        expected = list(client.stream(**settings)) if stream else [client.generate(**settings)]
    assert chunks == expected


def test_a_request_that_fails_says_whose_fault_it_is(echo_server: Server) -> None:
    refused, busy, failed, late, again = asked(
        echo_server.grpc_url,
        {"text_input": PROMPT, "top_p": 2.0},
        {"text_input": "<refuse>"},
        {"text_input": "<fail 2> a b c d e f"},
        {"text_input": "<late>"},
        {"text_input": PROMPT, "max_tokens": 2},
    )
    assert type(refused) is RequestError
    assert isinstance(busy, Busy)
    assert str(busy) == "the queue is full (0 requests)"
    assert busy.retry_after_s == 1.0
    # Another server would not be asked for it: its time is over.
    assert (type(late), str(late)) == (
        ServerError,
        "the request waited 2.0 s without being started",
    )
    assert type(failed) is ServerError
    assert str(failed) == "the request failed: a target row is NaN"
    assert [chunk.finish_reason for chunk in again] == ["length"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_nobody_waits_for_ends_at_once(
    echo_server: Server, wait_until: Callable[..., bool], stream: bool
) -> None:
    """Where it streams, closing the stream would do."""
    before = settled_metrics(echo_server)[CANCELLED]

    async def run() -> None:
        signer = Signer(echo_server.secret if not stream else None)
        upstream = TritonUpstream(echo_server.grpc_url, signer=signer)
        asked = asyncio.create_task(
            ask(
                upstream,
                text_input="<slow> a b",
                max_tokens=1000,
                num_draft_tokens=0,
                stream=stream,
            )
        )
        assert await asyncio.to_thread(wait_until, lambda: in_flight(echo_server) == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert await asyncio.to_thread(
            wait_until, lambda: metrics(echo_server, CANCELLED)[CANCELLED] == before + 1
        )
        assert upstream.num_running == 0
        await upstream.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def in_flight(server: Server) -> float | None:
    return total(parse_samples(server.read_metrics() or ""), "specpipe_requests_in_flight")


def test_nobody_there_is_no_answer() -> None:
    (failure,) = asked("grpc://127.0.0.1:9", {"text_input": PROMPT})
    assert isinstance(failure, NoAnswer)
    assert str(failure) == "grpc://127.0.0.1:9 does not answer: connection refused"


@pytest.mark.parametrize(
    ("seconds", "num_ended", "refusal", "retry_after_s"),
    [
        (30.0, 9, "the queue is full: 12 requests wait (serving.max_queue_size), 8 run", 36.0),
        (300.0, 299, "the queue is full: 12 requests wait (serving.max_queue_size), 8 run", 12.0),
        (30.0, 0, "the queue is full: 128 requests wait (serving.max_queue_size), 8 run", 60.0),
        (30.0, 299, "the queue is full: 1 requests wait (serving.max_queue_size), 8 run", 1.0),
    ],
)
def test_a_full_queue_tells_when_it_will_be_empty(
    seconds: float, num_ended: int, refusal: str, retry_after_s: float
) -> None:
    now = 0.0
    rate = CompletionRate(lambda: now)
    for i in range(num_ended):
        now = seconds * (i + 1) / num_ended
        rate.count()
    now = seconds
    assert rate.retry_after_s(refusal) == pytest.approx(retry_after_s, abs=0.3)
