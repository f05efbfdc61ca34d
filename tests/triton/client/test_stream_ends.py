"""Every way in which an answer may end wrongly, over each protocol.

The client has its usual limit of ten minutes: what is noticed late runs into the test's.
"""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from specpipe.cli.group import main
from specpipe.errors import CutStream, RequestError, ServerError, SpecpipeError
from specpipe.evaluate.endpoints.base import Question, record
from specpipe.evaluate.endpoints.triton import Triton
from specpipe.triton.client import Client
from specpipe.triton.client.grpc_transport import last_cause
from tests.triton.fake_triton import CLOSE, CUT, RESET, SILENCE, Script, event, failure, serving
from tests.waiting import PATIENCE_S

A, B = {"text_output": "a"}, {"text_output": "b"}
LAST = {"text_output": "c", "finish_reason": "length"}
AT_ONCE_S = PATIENCE_S

CLOSED = {
    "http": "the connection was closed before the end",
    "grpc": "the stream was closed before the end",
}
BROKEN = {"http": CLOSED["http"], "grpc": "socket closed"}
LEFT_OFF = "and without the end of the answer; ask again, or see the server's log"


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < AT_ONCE_S


def ask(protocol: str, script: Script, **options: Any) -> tuple[list[str], Exception | None, str]:
    """The chunks of a stream, what it ended with, and the server's URL."""
    timeout_s = options.pop("timeout_s", 600.0)
    texts: list[str] = []
    num_responses = sum(isinstance(item, dict) for item in script)
    has_read = threading.Event()
    with (
        serving(protocol, script, has_read=has_read, **options) as url,
        Client(url, timeout_s=timeout_s) as client,
    ):
        try:
            for chunk in client.stream("x"):
                texts.append(chunk.text)
                if len(texts) == num_responses:
                    has_read.set()
        except SpecpipeError as exc:
            return texts, exc, url
    return texts, None, url


def test_a_stream_with_its_end_is_whole(protocol: str) -> None:
    assert ask(protocol, [A, B, LAST])[:2] == (["a", "b", "c"], None)


@pytest.mark.parametrize("ending", [CUT, RESET, CLOSE])
def test_a_connection_that_breaks_after_the_last_response_breaks_nothing(
    protocol: str, ending: str
) -> None:
    assert ask(protocol, [A, LAST, ending])[:2] == (["a", "c"], None)


@pytest.mark.parametrize("ending", [CLOSE, CUT, RESET, None])
@pytest.mark.parametrize("has_finish_reason", [True, False])
def test_a_stream_without_its_end_is_cut(
    protocol: str, ending: str | None, has_finish_reason: bool
) -> None:
    """A model without finish_reason, as NVIDIA's, has the protocol's own end alone."""
    script = [A, B, *([ending] if ending else [])]
    outputs = ("text_output", *(["finish_reason"] if has_finish_reason else []))
    texts, error, url = ask(protocol, script, outputs=outputs)
    assert texts == ["a", "b"]
    # HTTP knows one orderly end.
    is_ended = ending is None or (ending == CLOSE and protocol == "http")
    if is_ended and not has_finish_reason:
        assert error is None
        return
    assert isinstance(error, CutStream)
    reasons = {
        CLOSE: CLOSED[protocol],
        CUT: BROKEN[protocol],
        RESET: "connection reset by peer" if protocol == "http" else BROKEN[protocol],
    }
    reason = "the last one has no finish_reason" if is_ended else reasons[str(ending)]
    assert str(error) == f"{url} broke off: {reason}, after 2 responses {LEFT_OFF}"


def test_a_server_that_falls_silent_is_cut_after_its_time(protocol: str) -> None:
    texts, error, url = ask(protocol, [A, SILENCE], timeout_s=2.0)
    assert (texts, type(error)) == (["a"], CutStream)
    reason = "timed out after 2 s"
    assert str(error) == f"{url} broke off: {reason}, after 1 response {LEFT_OFF}"


@pytest.mark.parametrize(
    ("script", "texts", "kind", "message"),
    [
        ([], [], ServerError, "{url}: ensemble ended without a response"),
        ([CLOSE], [], ServerError, None),
        ([CUT], [], ServerError, None),
        ([failure("too long")], [], RequestError, "too long"),
        ([A, failure("no memory")], ["a"], ServerError, "the request failed: no memory"),
        (
            [A, {"finish_reason": "error", "error": "NaN"}],
            ["a"],
            ServerError,
            "the request failed: NaN",
        ),
        (
            [A, {"finish_reason": "cancelled"}],
            ["a"],
            CutStream,
            "{url} broke off: the server cancelled the request, after 2 responses " + LEFT_OFF,
        ),
        (
            [A, {"finish_reason": "tired\n" * 99}],
            ["a"],
            ServerError,
            "{url}: ensemble ended with finish_reason '" + "tired\\n" * 11 + "tir…', which "
            "this version of specpipe does not know",
        ),
        (
            [A, LAST, LAST],
            ["a", "c"],
            ServerError,
            "{url}: ensemble went on after its last response",
        ),
        (
            [A, LAST, B],
            ["a", "c"],
            ServerError,
            "{url}: ensemble went on after its last response",
        ),
    ],
)
def test_an_answer_that_ends_otherwise_is_a_failure(
    protocol: str, script: Script, texts: list[str], kind: type[Exception], message: str | None
) -> None:
    came, error, url = ask(protocol, script)
    assert came == texts
    assert isinstance(error, kind)
    if message is None:
        reason = CLOSED[protocol] if script == [CLOSE] else BROKEN[protocol]
        no_answer = f"{{url}} does not answer: {reason}"
        is_ended = script == [CLOSE] and protocol == "http"
        message = "{url}: ensemble ended without a response" if is_ended else no_answer
    assert str(error) == message.format(url=url)


@pytest.mark.parametrize("data", ["<html>", '{"text_output": "b', "[1]"])
def test_an_event_that_is_no_response_is_a_failure(data: str) -> None:
    texts, error, url = ask("http", [A, data.encode()])
    assert (texts, type(error)) == (["a"], ServerError)
    assert str(error) == f"{url} sent what is no response of Triton: '{data}'"


def test_an_event_of_brackets_is_a_failure() -> None:
    gc.collect()
    gc.disable()  # finalizers of what other tests left would fail at the depth of the last one
    try:
        _, error, url = ask("http", [b"[" * 100_000])
    finally:
        gc.enable()
    assert str(error) == f"{url} sent what is no response of Triton: '{'[' * 80}…'"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (event(A), "broke off: the last one has no finish_reason, after 1 response " + LEFT_OFF),
        (event(A)[:40], f"sent what is no response of Triton: {event(A)[:40].decode()!r}"),
        (b"", "sent what is no response of Triton: ''"),
    ],
)
def test_a_whole_answer_without_its_end_is_a_failure(body: bytes, message: str) -> None:
    with serving("http", [body]) as url, Client(url) as client:
        with pytest.raises(ServerError) as caught:
            client.generate("x")
        assert str(caught.value) == f"{url} {message}"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "the connection was closed before the end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "the connection was closed before "),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "what it sends is no HTTP"),
    ],
)
def test_what_is_no_answer_is_said_in_words(answer: bytes, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        with Client(url) as client, pytest.raises(ServerError) as caught:
            client.generate("x")
        thread.join()
    assert str(caught.value).startswith(f"{url} does not answer: {reason}")


def test_a_server_that_is_not_there_is_said_in_words(protocol: str) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"{protocol}://127.0.0.1:{bound.getsockname()[1]}"
        with Client(url) as client, pytest.raises(ServerError) as caught:
            client.generate("x")
    assert str(caught.value) == f"{url} does not answer: connection refused"


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to "
            "connect to remote host: Connection refused",
            "connection refused",
        ),
        ("Stream removed (recvmsg:Connection reset by peer (104))", "connection reset by peer"),
        ("Stream removed (Socket closed)", "socket closed"),
        ("the queue is full (0 requests)", "the queue is full (0 requests)"),
    ],
)
def test_what_grpc_says_is_cut_to_what_the_system_says(message: str, cause: str) -> None:
    """The first three were seen of grpcio 1.85."""
    assert last_cause(message) == cause


def test_the_endpoint_has_the_pieces_of_a_cut_answer(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = frozenset({"text_input", "max_tokens", "num_draft_tokens"})
    monkeypatch.setattr("specpipe.evaluate.endpoints.triton._declared_inputs", lambda *_: declared)
    with serving(protocol, [A, B, CUT]) as url:
        endpoint = Triton(url)
        answer = record(endpoint, Question(text="x", max_tokens=4))
        endpoint.close()
    assert (answer.text, answer.ending) == ("ab", "cut")
    assert answer.error is not None and answer.error.startswith(f"{url} broke off: ")


def test_generate_keeps_the_text_of_a_cut_stream_on_a_line_of_its_own(protocol: str) -> None:
    with serving(protocol, [A, B, CUT]) as url:
        words = ["generate", "x", "--stream", "--url", url]
        result = CliRunner().invoke(main, words)
        as_json = CliRunner().invoke(main, [*words, "--json"])
    broke_off = f"{url} broke off: {BROKEN[protocol]}, after 2 responses {LEFT_OFF}"
    assert (result.exit_code, result.stdout) == (1, "ab\n")
    assert result.stderr == f"Error: {broke_off}\n"
    assert (as_json.exit_code, as_json.stdout) == (1, '{"text": "a"}\n{"text": "b"}\n')
    assert as_json.stderr == f"Error: {broke_off}\n"


def test_generate_without_any_text_prints_the_error_alone(protocol: str) -> None:
    with serving(protocol, [failure("too long")]) as url:
        result = CliRunner().invoke(main, ["generate", "x", "--stream", "--url", url])
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "Error: too long\n")
