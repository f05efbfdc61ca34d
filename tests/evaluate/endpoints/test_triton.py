from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from specpipe.errors import ServerError
from specpipe.evaluate.endpoints import takes_draft_length
from specpipe.evaluate.endpoints.base import Question, TimedAnswer, Usage, ask, record
from specpipe.evaluate.endpoints.openai import OpenAI
from specpipe.evaluate.endpoints.triton import Speculative, Triton
from specpipe.speculative.request import Sampling
from specpipe.triton.server.server import Server
from tests.waiting import PATIENCE_S

SEEDED = Sampling(temperature=0.7, seed=11, is_seeded=True)


@pytest.fixture
def triton(url: str) -> Iterator[Callable[[str], Triton]]:
    with contextlib.ExitStack() as stack:
        yield lambda model="ensemble": stack.enter_context(
            contextlib.closing(Triton(url, model=model))
        )


def test_a_streamed_answer_has_pieces_and_counts(triton: Callable[..., Triton]) -> None:
    answer = record(triton(), Question(text="alpha beta ", max_tokens=7))
    assert (answer.ending, answer.error) == ("complete", None)
    assert answer.text.startswith("alpha beta ")
    assert (answer.finish_reason, answer.num_output_tokens) == ("length", 7)
    usage = answer.usage
    assert usage is not None
    # Two tokens a step, one of them drafted and accepted, but for the last step's one.
    assert (usage.num_steps, usage.total_draft_tokens) == (4, 3)
    assert usage.total_accepted_draft_tokens == 3
    assert answer.token_ids is None


def test_settings_reach_the_server(triton: Callable[..., Triton]) -> None:
    question = Question(
        text="alpha beta ", max_tokens=5, num_draft_tokens=0, sampling=SEEDED, ignores_end=True
    )
    usage = record(triton(), question).usage
    assert usage is not None
    assert (usage.seed_used, usage.total_draft_tokens, usage.num_steps) == (11, 0, 5)
    stopped = Question(text="alpha beta ", max_tokens=9, stop_strings=("pha",))
    answer = record(triton(), stopped)
    assert (answer.text, answer.finish_reason) == ("al", "stop")


def test_a_conversation_is_the_servers_to_render(triton: Callable[..., Triton]) -> None:
    messages = ({"role": "user", "content": "hi"},)
    answer = record(triton(), Question(messages=messages, max_tokens=5))
    assert answer.ending == "failed"
    assert answer.error is not None
    assert answer.error.startswith("messages: this model has no chat template; send text_input ")


def test_many_ask_at_once(triton: Callable[..., Triton]) -> None:
    questions = [Question(text=f"word {i} ", max_tokens=4) for i in range(8)]
    answers = ask(triton(), questions, at_once=8)
    assert [answer.ending for answer in answers] == ["complete"] * 8
    assert len({answer.text for answer in answers}) == 8


def test_nvidias_pieces_have_their_own_counts(triton: Callable[..., Triton]) -> None:
    endpoint = triton("nvidias")
    assert endpoint.is_nvidias
    answer = record(endpoint, Question(text="x", max_tokens=4, ignores_end=True))
    assert [(piece.text, piece.num_tokens) for piece in answer.pieces] == [
        ("a", 1),
        ("bb", 2),
        ("c", 1),
    ]
    assert (answer.ending, answer.finish_reason, answer.num_output_tokens) == ("complete", None, 4)
    assert answer.usage == Usage(
        num_input_tokens=9, total_draft_tokens=6, total_accepted_draft_tokens=2
    )


def test_only_our_ensemble_takes_a_draft_length(triton: Callable[..., Triton]) -> None:
    assert takes_draft_length(triton())
    assert not takes_draft_length(triton("nvidias"))
    assert not takes_draft_length(OpenAI("openai+http://h:1", model="m"))


@pytest.mark.parametrize(
    ("question", "missing"),
    [
        (Question(text="x", max_tokens=4, num_draft_tokens=0), "num_draft_tokens"),
        (Question(text="x", max_tokens=4, sampling=SEEDED), "temperature"),
        (Question(messages=({"role": "user", "content": "hi"},), max_tokens=4), "messages"),
    ],
)
def test_what_a_model_does_not_declare_is_refused(
    triton: Callable[..., Triton], url: str, question: Question, missing: str
) -> None:
    answer = record(triton("nvidias"), question)
    assert (answer.ending, answer.error) == ("failed", f"{url}: nvidias has no input {missing}")


def test_a_model_that_cannot_stream_is_refused(triton: Callable[..., Triton]) -> None:
    answer = record(triton("plain"), Question(text="x", max_tokens=4))
    assert answer.error is not None
    assert answer.error.startswith("plain cannot stream: model_transaction_policy.decoupled is fal")


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("<refuse>", "the queue is full (0 requests)"),
        ("<fail 0>", "a target row is NaN"),
        ("<fail 2>", "the request failed: a target row is NaN"),
    ],
)
def test_a_failure_is_told_whenever_it_comes(
    triton: Callable[..., Triton], prompt: str, error: str
) -> None:
    answer = record(triton(), Question(text=prompt, max_tokens=9))
    assert (answer.ending, answer.error) == ("failed", error)


def test_an_unknown_model_is_told(triton: Callable[..., Triton], url: str) -> None:
    answer = record(triton("ensembel"), Question(text="x", max_tokens=4))
    assert answer.error is not None
    assert answer.error.startswith(f"{url} does not describe ensembel: ")


def test_ids_go_in_and_come_out_of_our_ensemble_only(triton: Callable[..., Triton]) -> None:
    question = Question(token_ids=(5, 6), max_tokens=4, returns_ids=True)
    assert record(triton(), question).token_ids == (5, 6, 5, 6)
    answer = record(triton("nvidias"), question)
    assert answer.error is not None
    assert answer.error.endswith(": nvidias has no input input_ids")


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_is_not_there_is_a_failure(scheme: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.closing(Triton(url, timeout_s=PATIENCE_S)) as endpoint:
            answer = record(endpoint, Question(text="x", max_tokens=4))
    assert answer.ending == "failed"
    assert answer.error is not None and answer.error.startswith(
        f"{url} does not describe ensemble:"
    )


def asked_for_ids(answer: TimedAnswer, prompt: tuple[int, ...], num_tokens: int) -> None:
    repeated = (prompt * num_tokens)[:num_tokens]
    assert (answer.ending, answer.error, answer.token_ids) == ("complete", None, repeated)
    assert [piece.num_tokens for piece in answer.pieces] == [2] * (num_tokens // 2) + [1]


def test_ids_go_in_and_come_out_of_the_pairs_model(echo_server: Server) -> None:
    prompt = (700, 701, 702)
    with contextlib.closing(
        Speculative(echo_server.http_url, secret=echo_server.secret)
    ) as endpoint:
        asked_for_ids(record(endpoint, Question(token_ids=prompt, max_tokens=7)), prompt, 7)
        text = record(endpoint, Question(text="x", max_tokens=1))
        assert text.error == "speculative takes token ids, no text and no messages"
    end = frozenset({702})
    with contextlib.closing(
        Speculative(echo_server.http_url, secret=echo_server.secret, end_token_ids=end)
    ) as endpoint:
        stopped = record(endpoint, Question(token_ids=prompt, max_tokens=7))
        assert (stopped.token_ids, stopped.finish_reason) == ((700, 701), "stop")
        ignored = record(endpoint, Question(token_ids=prompt, max_tokens=7, ignores_end=True))
        asked_for_ids(ignored, prompt, 7)


def test_ids_travel_over_http_only(echo_server: Server) -> None:
    with pytest.raises(ServerError, match="token ids travel over HTTP only"):
        Speculative(echo_server.grpc_url, secret=echo_server.secret)
