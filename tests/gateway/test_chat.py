"""`/v1/chat/completions` in front of an upstream that answers as it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specpipe.triton.client.completion import Completion
from tests.gateway.conftest import Door
from tests.gateway.fake_upstream import USAGE, pieces, statistics

PATH = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "Hi"}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
DEFAULTS = {"stream": False, "max_tokens": 1024, "temperature": 1.0}


def ask(door: Door, **body: Any) -> dict[str, Any]:
    """Sends a question; returns the inputs that the upstream was asked with."""
    response = door.post(PATH, {"messages": [QUESTION], **body})
    assert response.status == 200, response.body
    return door.upstream.asked[-1]


def test_an_answer_has_openai_s_form(door: Door) -> None:
    response = door.post(PATH, {"messages": [QUESTION], "store": False, "metadata": {"a": "b"}})
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    del body["created"]
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert body == {
        "object": "chat.completion",
        "model": "python-code",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
    }
    (inputs,) = door.upstream.asked
    assert json.loads(inputs.pop("messages")) == [QUESTION]
    assert inputs == DEFAULTS


def test_a_conversation_reaches_the_template_as_templates_take_it(door: Door) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    cut = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {**QUESTION, "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call, cut]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    sent = json.loads(ask(door, messages=messages)["messages"])
    assert sent == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {**QUESTION, "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {**call, "function": {"name": "f", "arguments": {"a": [1]}}},
                cut,
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]


def test_what_a_template_is_given(door: Door) -> None:
    inputs = ask(
        door,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        reasoning_effort="none",
        chat_template_kwargs={"enable_thinking": True, "x": [1]},
        add_generation_prompt=False,
        continue_final_message=True,
    )
    found = {name: inputs[name] for name in inputs if name not in (*DEFAULTS, "messages")}
    for name in ("tools", "tool_choice", "chat_template_kwargs"):
        found[name] = json.loads(found[name])
    found.pop("skip_special_tokens", None)
    assert found == {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        # What is said outright counts more than what follows from the effort.
        "chat_template_kwargs": {"reasoning_effort": "none", "enable_thinking": True, "x": [1]},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def test_tokens_of_an_answer_and_its_bounds(door: Door) -> None:
    assert ask(door, max_completion_tokens=7)["max_tokens"] == 7
    assert ask(door, max_tokens=6, max_completion_tokens=6)["max_tokens"] == 6
    response = door.post(
        PATH, {"messages": [QUESTION], "max_tokens": 6, "max_completion_tokens": 7}
    )
    assert (response.status, response.error["param"]) == (400, "max_tokens")


def test_a_prediction_is_one_text(door: Door) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ask(door, prediction={"type": "content", "content": parts})["prediction"] == "ab"
    door.upstream.reply = lambda inputs: [
        Completion(
            text="x",
            finish_reason="stop",
            statistics=statistics(
                3,
                9,
                accepted_prediction_tokens=5,
                rejected_prediction_tokens=2,
                num_cached_input_tokens=2,
            ),
        )
    ]
    body = {"messages": [QUESTION], "prediction": {"type": "content", "content": "ab"}}
    usage = door.post(PATH, body).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 2,
    }


def test_log_probs_have_bytes(door: Door) -> None:
    door.upstream.reply = lambda inputs: [
        Completion(
            text="é",
            finish_reason="stop",
            statistics=statistics(3, 2),
            token_ids=(129, 104),
            log_probs=(-0.5, -1.0),
            top_log_probs=(((129, -0.5), (222, -1.5)), ((104, -1.0), (222, -3.0))),
        )
    ]
    body = {"messages": [QUESTION], "logprobs": True, "top_logprobs": 1}
    (choice,) = door.post(PATH, body).json()["choices"]
    first = {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3]}
    second = {"token": "bytes:\\xa9", "logprob": -1.0, "bytes": [0xA9]}
    assert choice["logprobs"] == {
        "content": [{**first, "top_logprobs": [first]}, {**second, "top_logprobs": [second]}],
        "refusal": None,
    }
    asked = {n: v for n, v in door.upstream.asked[0].items() if n not in (*DEFAULTS, "messages")}
    assert asked == {"return_log_probs": True, "num_top_log_probs": 1, "return_token_ids": True}


def test_a_stream_begins_with_the_role(door: Door) -> None:
    door.upstream.reply = pieces("a", "", "b", reason="length")
    body = {"messages": [QUESTION], "stream": True, "return_token_ids": True}
    events = door.post(PATH, body).events()
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "a"},
        {},  # has a token
        {"content": "b"},
    ]
    assert [choice["token_ids"] for choice in choices] == [[100], [101], [102]]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "x"}},
            },
            "tool_choice",
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"},
            "guided_regex",
        ),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"use_beam_search": 0}, "use_beam_search"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias.9999999999"),
    ],
)
def test_a_refusal_names_the_field(door: Door, body: dict[str, Any], param: str) -> None:
    response = door.post(PATH, {"messages": [QUESTION], **body})
    assert (response.status, response.error["param"]) == (400, param)
    assert response.error["type"] == "invalid_request_error"
    assert door.upstream.asked == []


def test_what_asks_for_nothing_passes(door: Door) -> None:
    ask(
        door,
        audio=None,
        modalities=["text"],
        functions=[],
        function_call="none",
        use_beam_search=False,
        length_penalty=1.0,
        n=1,
        best_of=1,
        include_stop_str_in_output=False,
        tools=[],
        logprobs=False,
        top_logprobs=0,
        response_format={"type": "text"},
    )
    assert set(door.upstream.asked[0]) == {*DEFAULTS, "messages"}
