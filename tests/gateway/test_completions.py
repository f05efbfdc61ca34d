"""`/v1/completions` in front of an upstream that answers as it is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from specpipe.errors import NoAnswer, RequestError
from specpipe.gateway.upstream import Busy
from specpipe.triton.client.completion import Completion
from tests.gateway.conftest import Door
from tests.gateway.fake_upstream import USAGE, Step, pieces, statistics

PATH = "/v1/completions"
DEFAULTS = {"stream": False, "max_tokens": 1024, "temperature": 1.0}


def scored(inputs: Mapping[str, Any]) -> Iterable[Step]:
    """Two tokens, one of them half of a character, after a prompt of two."""
    yield Completion(
        text="def read(é",
        finish_reason="length",
        statistics=statistics(2, 2),
        token_ids=(222, 129),
        log_probs=(-0.5, float("-inf")),
        top_log_probs=(((222, -0.5), (1377, -1.5)), ((104, -0.25), (1377, -2.0))),
        prompt_log_probs=(-1.0,),
        prompt_top_log_probs=(((1377, -1.0), (104, -2.5)),),
    )


def test_an_answer_has_openai_s_form(door: Door) -> None:
    response = door.post(PATH, {"model": "alias", "prompt": "def f", "user": "someone"})
    assert response.status == 200
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    choice = {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    assert body == {
        "object": "text_completion",
        "model": "alias",
        "choices": [choice],
        "usage": USAGE,
    }
    assert door.upstream.asked == [{**DEFAULTS, "text_input": "def f"}]
    assert door.upstream.sticky_keys == ["someone"]


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ({"temperature": 0, "max_tokens": 5}, {"temperature": 0, "max_tokens": 5}),
        ({"top_p": 0}, {"top_k": 1, "top_p": 1.0}),
        ({"top_k": -1, "min_p": 0.1}, {"top_k": 0, "min_p": 0.1}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"stop": "\n"}, {"stop_words": ["\n"]}),
        ({"stop": []}, {}),
        (
            {"logit_bias": {"7": -100, "9": 1.5}},
            {"logit_bias_ids": [7, 9], "logit_bias_values": [-100, 1.5]},
        ),
        ({"echo": True, "stream": True}, {"exclude_input_in_output": False, "stream": True}),
        ({"max_tokens": 0}, {"max_tokens": 0, "return_prompt_log_probs": True}),
        (
            {"guided_choice": ["a", "ä"]},
            {"guided_decoding_guide_type": "choice", "guided_decoding_guide": '["a", "ä"]'},
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            {
                "guided_decoding_guide_type": "ebnf_grammar",
                "guided_decoding_guide": 'root ::= "a"',
            },
        ),
        (
            {"response_format": {"type": "json_object"}},
            {
                "guided_decoding_guide_type": "json_schema",
                "guided_decoding_guide": '{"type": "object"}',
            },
        ),
        (
            {"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -2},
            {"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -2},
        ),
        (
            {
                "min_tokens": 2,
                "bad_words": ["x"],
                "stop_token_ids": [3],
                "ignore_eos": True,
                "skip_special_tokens": False,
                "priority": -1,
                "num_draft_tokens": 0,
                "timeout_s": 5,
                "cache_salt": "tenant",
            },
            {
                "min_tokens": 2,
                "bad_words": ["x"],
                "stop_token_ids": [3],
                "ignore_eos": True,
                "skip_special_tokens": False,
                "priority": -1,
                "num_draft_tokens": 0,
                "timeout_s": 5,
                "cache_salt": "tenant",
            },
        ),
    ],
)
def test_a_body_as_inputs(door: Door, body: dict[str, Any], inputs: dict[str, Any]) -> None:
    assert door.post(PATH, {"prompt": "x", **body}).status == 200
    assert door.upstream.asked == [{**DEFAULTS, "text_input": "x", **inputs}]


def test_each_prompt_has_n_answers_of_seeds_in_a_row(door: Door) -> None:
    response = door.post(PATH, {"prompt": [[5, 6], [7]], "n": 2, "seed": 2**64 - 1})
    found = response.json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    asked = [(inputs["input_ids"], inputs["seed"]) for inputs in door.upstream.asked]
    assert asked == [([5, 6], 2**64 - 1), ([5, 6], 0), ([7], 2**64 - 1), ([7], 0)]
    # Each prompt counts once.
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (6, 8)


def test_log_probs_of_prompt_and_answer(door: Door) -> None:
    door.upstream.reply = scored
    body = {"prompt": "hello", "echo": True, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 2}
    (choice,) = door.post(PATH, {**body, "return_token_ids": True}).json()["choices"]
    (inputs,) = door.upstream.asked
    assert inputs["input_ids"] == [1377, 324]
    assert {name: inputs[name] for name in inputs if "return" in name or "num" in name} == {
        "return_token_ids": True,
        "return_log_probs": True,
        "num_top_log_probs": 2,
        "return_prompt_log_probs": True,
    }
    assert choice["logprobs"] == {
        "tokens": ["hel", "lo", " ", "bytes:\\xc3"],
        "token_logprobs": [None, -1.0, -0.5, -9999.0],
        "top_logprobs": [
            None,
            {"hel": -1.0, "bytes:\\xa9": -2.5, "lo": -1.0},
            {" ": -0.5, "hel": -1.5},
            {"bytes:\\xa9": -0.25, "hel": -2.0, "bytes:\\xc3": -9999.0},
        ],
        "text_offset": [0, 3, 5, 6],
    }
    assert choice["prompt_logprobs"] == [
        None,
        {
            "1377": {"logprob": -1.0, "rank": 1, "decoded_token": "hel"},
            "324": {"logprob": -1.0, "rank": None, "decoded_token": "lo"},
        },
    ]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([222, 129], [1377, 324])


def test_tokens_by_their_ids(door: Door) -> None:
    door.upstream.reply = scored
    body = {"prompt": [1377, 324], "logprobs": 0, "return_tokens_as_token_ids": True}
    (choice,) = door.post(PATH, body).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:222", "token_id:129"]


def test_a_stream_has_an_event_a_chunk_and_its_usage_last(door: Door) -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    response = door.post(PATH, body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, last = response.events()
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ("Hel", None),
        ("lo", "stop"),
    ]
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert (last["choices"], last["usage"]) == ([], USAGE)
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


def test_usage_in_every_event(door: Door) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", "stream": True, "stream_options": options}
    usages = [event["usage"] for event in door.post(PATH, body).events()]
    # The gateway has encoded the prompt itself: two tokens, until the server says otherwise.
    counts = [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages]
    assert counts == [(2, 1), (3, 2), (3, 2)]


def test_answers_of_one_stream_are_told_apart(door: Door) -> None:
    def reply(inputs: Mapping[str, Any]) -> Iterable[Step]:
        text = f"{inputs['text_input']}{inputs['seed']}"
        return pieces(*text)(inputs)

    door.upstream.reply = reply
    texts = {0: "", 1: "", 2: "", 3: ""}
    body = {"prompt": ["ab", "cd"], "n": 2, "seed": 4, "stream": True}
    for event in door.post(PATH, body).events():
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "ab4", 1: "ab5", 2: "cd4", 3: "cd5"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "error"),
    [
        (
            RequestError("text_input has 9 bytes; at most 8 are taken"),
            400,
            ("prompt has 9 bytes; at most 8 are taken", "prompt", "invalid_request_error"),
        ),
        (RequestError("no room"), 400, ("no room", None, "invalid_request_error")),
        (Busy("4 wait", retry_after_s=2.1), 429, ("4 wait", None, "rate_limit_error")),
        (
            NoAnswer("grpc://x:1", "refused"),
            503,
            ("grpc://x:1 does not answer: refused", None, "server_error"),
        ),
        (
            KeyError("secret"),
            500,
            ("the request failed inside the server, whose log says how", None, "server_error"),
        ),
    ],
)
def test_a_failure_before_the_first_chunk_has_its_status(
    door: Door, failure: Exception, status: int, error: tuple[Any, ...], stream: bool
) -> None:
    door.upstream.reply = lambda inputs: [failure]
    response = door.post(PATH, {"prompt": "x", "stream": stream})
    found = response.error
    assert response.status == status
    assert (found["message"], found["param"], found["type"]) == error
    assert response.headers.get("retry-after") == {429: "3", 503: "5"}.get(status)


def test_a_failure_of_one_answer_ends_the_others(door: Door) -> None:
    def reply(inputs: Mapping[str, Any]) -> Iterable[Step]:
        if inputs["text_input"] == "bad":
            return [0.05, RequestError("no")]
        return [60.0]

    door.upstream.reply = reply
    assert door.post(PATH, {"prompt": ["good", "bad", "good"]}).status == 400
    assert door.upstream.num_closed == 2
