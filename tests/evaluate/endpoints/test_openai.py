from __future__ import annotations

import socket
from typing import Any

import pytest

from specpipe.errors import ServerError
from specpipe.evaluate.endpoints import open_endpoint
from specpipe.evaluate.endpoints.base import Question, TimedAnswer, Usage, record
from specpipe.evaluate.endpoints.openai import OpenAI
from specpipe.evaluate.endpoints.triton import Triton
from specpipe.speculative.request import Sampling
from tests.evaluate.endpoints.fake_openai import (
    CUT,
    DONE,
    RESET,
    Refusal,
    completion,
    delta,
    serving,
    summary,
    usage,
)
from tests.waiting import PATIENCE_S

QUESTION = Question(text="Hello", max_tokens=8)
TIME_TO_READ_S = 2.0  # a reset takes away what has not been read
MESSAGES = ({"role": "user", "content": "Hello"},)


def answered(events: Any, question: Question = QUESTION) -> TimedAnswer:
    """What a server's events come to."""
    with serving(lambda body: events) as server:
        return record(OpenAI(server.url, model="m"), question)


def test_a_completion_has_pieces_and_counts() -> None:
    answer = answered(
        [completion("one two"), completion(" three", finish_reason="length"), summary(4, 5), DONE]
    )
    assert (answer.ending, answer.error) == ("complete", None)
    assert (answer.text, answer.finish_reason) == ("one two three", "length")
    assert answer.usage == Usage(num_input_tokens=4, num_output_tokens=5)
    assert [piece.has_output for piece in answer.pieces] == [True, True, False]
    assert [piece.num_tokens for piece in answer.pieces] == [None, None, None]


def test_what_is_asked() -> None:
    with serving(lambda body: [completion("x", finish_reason="stop"), DONE]) as server:
        endpoint = OpenAI(server.url, model="m", api_key="k")
        record(endpoint, QUESTION)
        sampling = Sampling(temperature=0.7, top_k=5, seed=3, is_seeded=True)
        record(
            endpoint,
            Question(
                token_ids=(5, 6),
                max_tokens=2,
                sampling=sampling,
                stop_strings=("\n",),
                ignores_end=True,
            ),
        )
        record(endpoint, Question(messages=MESSAGES, max_tokens=1))
    paths, headers, bodies = zip(*server.asked, strict=True)
    assert paths == ("/v1/completions", "/v1/completions", "/v1/chat/completions")
    assert headers[0]["Authorization"] == "Bearer k"
    always = {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert bodies == (
        {**always, "prompt": "Hello", "max_tokens": 8, "temperature": 0.0},
        {
            **always,
            "prompt": [5, 6],
            "max_tokens": 2,
            "temperature": 0.7,
            "top_k": 5,
            "seed": 3,
            "stop": ["\n"],
            "ignore_eos": True,
        },
        {**always, "messages": [dict(MESSAGES[0])], "max_tokens": 1, "temperature": 0.0},
    )


def test_ids_and_log_probabilities_come_where_they_are_asked_for() -> None:
    likeliest = [{"token_id:8": -0.5, "token_id:9": -0.25}, {"token_id:2": -0.125}]
    events = [
        {
            "choices": [
                {
                    "text": "x",
                    "finish_reason": "stop",
                    "token_ids": [8, 2],
                    "prompt_token_ids": [5, 6],
                    "logprobs": {"top_logprobs": likeliest},
                }
            ]
        },
        DONE,
    ]
    with serving(lambda body: events) as server:
        question = Question(
            token_ids=(5, 6),
            max_tokens=8,
            sampling=Sampling(temperature=0.5, top_k=5),
            returns_ids=True,
            num_top_log_probs=2,
        )
        answer = record(OpenAI(server.url, model="m"), question)
    ((_, _, body),) = server.asked
    assert (body["return_token_ids"], body["return_tokens_as_token_ids"], body["logprobs"]) == (
        True,
        True,
        2,
    )
    # Else those of the checkpoint's generation_config.json, as vLLM reads it.
    assert (body["top_k"], body["top_p"], body["repetition_penalty"]) == (5, 1.0, 1.0)
    assert (answer.token_ids, answer.prompt_token_ids) == ((8, 2), (5, 6))
    assert answer.top_log_probs == (((9, -0.25), (8, -0.5)), ((2, -0.125),))


def test_a_server_that_refuses_to_send_ids_is_asked_without() -> None:
    def respond(body: dict[str, Any]) -> Any:
        if "return_token_ids" in body:
            return Refusal(400, "unknown key")
        return [completion("x", finish_reason="stop"), DONE]

    with serving(respond) as server:
        endpoint = OpenAI(server.url, model="m")
        for _ in range(2):
            question = Question(text="Hello", max_tokens=8, returns_ids=True)
            answer = record(endpoint, question)
            assert (answer.text, answer.token_ids, answer.error) == ("x", None, None)
    assert ["return_token_ids" in body for _, _, body in server.asked] == [True, True, False, False]


def test_log_probabilities_of_texts_are_of_no_use() -> None:
    chunk = completion("x", finish_reason="stop")
    chunk["choices"][0]["logprobs"] = {"top_logprobs": [{" the": -0.5}]}
    answer = answered([chunk, DONE], Question(text="x", max_tokens=1, num_top_log_probs=1))
    assert answer.error is not None
    assert answer.error.endswith(
        "log-probabilities name tokens by their text, and not by their ids"
    )


def test_a_conversation_counts_thoughts_and_skips_empty_deltas() -> None:
    answer = answered(
        [
            delta(role="assistant", content=""),
            delta(reasoning_content="Hm. "),
            delta(content=None),
            delta(content="Yes"),
            delta(finish_reason="stop"),
            summary(3, 4),
            DONE,
        ],
        Question(messages=MESSAGES, max_tokens=8),
    )
    assert (answer.ending, answer.text) == ("complete", "Hm. Yes")
    assert [piece.has_output for piece in answer.pieces] == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]


def test_counts_in_each_chunk_are_of_the_output_so_far() -> None:
    answer = answered(
        [
            completion("one", **usage(4, 1)),
            completion(" two three", **usage(4, 3)),
            completion("", **usage(4, 4)),  # a token without text of its own
            completion("!", finish_reason="stop", **usage(4, 5)),
            summary(4, 5),
            DONE,
        ]
    )
    assert [piece.num_tokens for piece in answer.pieces] == [1, 2, 1, 1, None]
    assert answer.num_output_tokens == 5


def test_a_count_with_the_last_chunk_alone_is_not_that_chunks() -> None:
    answer = answered(
        [completion("one"), completion(" two", finish_reason="stop", **usage(4, 2)), DONE]
    )
    assert [piece.num_tokens for piece in answer.pieces] == [None, None]
    assert answer.num_output_tokens == 2


def test_without_counts_the_number_of_tokens_is_unknown() -> None:
    answer = answered([completion("one"), completion(" two", finish_reason="stop"), DONE])
    assert (answer.ending, answer.num_output_tokens, answer.usage) == ("complete", None, None)


def test_acceptance_is_read_as_vllm_reports_it_per_request() -> None:
    """The shape of https://github.com/vllm-project/vllm/pull/48915."""
    drafting = {
        "acceptance_histogram": [1, 1, 0, 0, 1],
        "mean_acceptance_length": 2.67,
        "draft_acceptance_rate": 0.5,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 10,
        "num_spec_steps": 3,
        "num_spec_tokens": 4,
    }
    end = {**summary(4, 9), "metrics": {"speculative_decoding": drafting}}
    answer = answered([completion("x", finish_reason="stop"), end, DONE])
    assert answer.usage == Usage(
        num_input_tokens=4,
        num_output_tokens=9,
        num_steps=3,
        total_draft_tokens=10,
        total_accepted_draft_tokens=5,
        acceptance_histogram=(1, 1, 0, 0, 1),
    )


@pytest.mark.parametrize(
    ("events", "reason", "came"),
    [
        (["one", CUT], "the connection was closed before the end", "1 response"),
        (["one", TIME_TO_READ_S, RESET], "connection reset by peer", "1 response"),
        (["one", " two"], "no finish_reason and no [DONE]", "2 responses"),
        ([], "no finish_reason and no [DONE]", "0 responses"),
    ],
)
def test_a_stream_without_its_end_is_cut(events: list[Any], reason: str, came: str) -> None:
    texts = [event for event in events if event not in (CUT, RESET, TIME_TO_READ_S)]
    answer = answered([completion(event) if event in texts else event for event in events])
    assert (answer.ending, answer.text) == ("cut", "".join(texts))
    assert answer.error is not None and answer.error.endswith(
        f" broke off: {reason}, after {came} and without the end of the answer; ask again, or see "
        "the server's log"
    )


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([DONE], " ended without an answer"),
        ([summary(4, 0), DONE], " ended without an answer"),
        ([CUT], " does not answer: the connection was closed before the end"),
        (
            [completion("one", finish_reason="stop"), completion(" two")],
            " went on after its finish_reason",
        ),
    ],
)
def test_an_answer_that_ends_otherwise_is_a_failure(events: Any, error: str) -> None:
    answer = answered(events)
    assert answer.ending == "failed"
    assert answer.error is not None and answer.error.endswith(error)


@pytest.mark.parametrize("reason", ["stop", "tool_calls", "function_call", "content_filter"])
def test_openais_other_reasons_end_an_answer_as_a_stop_does(reason: str) -> None:
    answer = answered([completion("one", finish_reason=reason), DONE])
    assert (answer.ending, answer.finish_reason) == ("complete", "stop")


@pytest.mark.parametrize("ending", [CUT, completion("", finish_reason="stop")])
def test_what_comes_after_the_finish_reason_changes_nothing(ending: Any) -> None:
    answer = answered([completion("one", finish_reason="stop"), ending])
    assert (answer.ending, answer.text) == ("complete", "one")


def test_a_finish_reason_ends_a_stream_of_a_server_that_does_not_say_done() -> None:
    assert answered([completion("one", finish_reason="stop")]).ending == "complete"


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([completion("one"), {"error": {"message": "no memory"}}], ": the request failed: no mem"),
        ([completion("one"), {"error": "no memory"}, DONE], ": the request failed: no memory"),
        ([completion("one", finish_reason="abort"), DONE], ": the request failed: finish_reason a"),
        ([completion("one", finish_reason="tired"), DONE], ": the request failed: finish_reason t"),
        (["<html>"], " sent what is no chunk: '<html>'"),
        (["<" * 99], f" sent what is no chunk: '{'<' * 80}…'"),
        ([{"choices": [7]}], " sent what is no chunk: "),
        (Refusal(500, "boom"), " answers 500: boom"),
        (Refusal(404, '{"error": {"message": "no model m"}}'), " answers 404: no model m"),
        (Refusal(400, '{"error": "no such key"}'), " answers 400: no such key"),
    ],
)
def test_a_failure_is_told(events: Any, error: str) -> None:
    answer = answered(events)
    assert answer.ending == "failed"
    assert answer.error is not None and error in answer.error


def test_a_server_that_refuses_counts_in_each_chunk_is_asked_without() -> None:
    def answer(body: dict[str, Any]) -> Any:
        if "continuous_usage_stats" in body["stream_options"]:
            return Refusal(422, '{"error": {"message": "unknown key"}}')
        return [completion("x", finish_reason="stop"), summary(1, 1), DONE]

    with serving(answer) as server:
        endpoint = OpenAI(server.url, model="m")
        answers = [record(endpoint, QUESTION) for _ in range(2)]
    assert [found.ending for found in answers] == ["complete", "complete"]
    assert len(server.asked) == 3


def test_a_question_that_is_refused_is_not_asked_again_where_counts_were_taken() -> None:
    def answer(body: dict[str, Any]) -> Any:
        if body["prompt"] == "too long":
            return Refusal(400, '{"error": {"message": "too long"}}')
        return [completion("x", finish_reason="stop"), DONE]

    with serving(answer) as server:
        endpoint = OpenAI(server.url, model="m")
        questions = [QUESTION, Question(text="too long", max_tokens=1)]
        errors = [record(endpoint, question).error for question in questions]
    assert errors == [None, f"{server.url} answers 400: too long"]
    assert len(server.asked) == 2


def test_a_draft_length_is_the_servers_own() -> None:
    with serving(lambda body: [DONE]) as server:
        asked = Question(text="x", max_tokens=1, num_draft_tokens=0)
        answer = record(OpenAI(server.url, model="m"), asked)
    assert answer.error is not None
    assert answer.error.endswith("takes no num_draft_tokens: its draft length is its own")
    assert server.asked == []


def test_a_server_that_is_not_there_is_a_failure() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"openai+http://127.0.0.1:{listener.getsockname()[1]}"
        answer = record(OpenAI(url, model="m", timeout_s=PATIENCE_S), QUESTION)
    assert answer.ending == "failed"
    assert answer.error == f"{url} does not answer: connection refused"


def test_an_answer_that_nobody_wants_ends_its_connection() -> None:
    events = [completion("x")] + [0.02, completion("y")] * 500  # ten seconds
    with serving(lambda body: events) as server:
        stream = OpenAI(server.url, model="m").stream(QUESTION)
        assert next(stream).text == "x"
        stream.close()  # type: ignore[attr-defined]
    # leaving `serving` waits for no answer: the test would take ten seconds


@pytest.mark.parametrize("url", ["openai+http:", "openai+ftp://h", "http://h:1"])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ServerError, match="is not openai.http://HOST:PORT"):
        OpenAI(url, model="m")


def test_the_scheme_says_what_answers() -> None:
    openai = open_endpoint("openai+http://h:1", model="m")
    assert isinstance(openai, OpenAI)
    triton = open_endpoint("http://h:1")
    assert isinstance(triton, Triton)
    triton.close()
    with pytest.raises(ServerError, match="^openai.http://h:1 needs the name of a model: --model"):
        open_endpoint("openai+http://h:1")
    with pytest.raises(ServerError, match="^'ftp://h' is no endpoint: expected http://HOST:PORT"):
        open_endpoint("ftp://h")


def test_a_path_and_a_prefix_are_kept() -> None:
    with serving(lambda body: [completion("x", finish_reason="stop"), DONE]) as server:
        record(OpenAI(f"{server.url}/proxy/v1/", model="m"), QUESTION)
    assert server.asked[0][0] == "/proxy/v1/completions"
