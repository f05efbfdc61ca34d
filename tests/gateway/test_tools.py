"""Calls and thoughts in the answers of a chat, by the format of the model's template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from specpipe.gateway.app import make_app
from tests.gateway.conftest import MODEL, Door, running, served_model
from tests.gateway.fake_upstream import FakeUpstream, pieces
from tests.tool_calls import R1, TOOLS

PATH = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "How warm is it?"}]}
ANSWER = (
    "Look",
    " it up.\n</thi",
    "nk>\n\nOne mo",
    'ment.\n<tool_call>\n{"name": "wea',
    'ther", "arguments": {"city": "Bonn", ',
    '"days": 1}}\n</tool_call>\n<tool_call>\n',
    '{"name": "world.time", "arguments": {}}\n</tool_call>',
)
WEATHER = {"name": "weather", "arguments": '{"city": "Bonn", "days": 1}'}
TIME = {"name": "world.time", "arguments": "{}"}


@pytest.fixture(scope="module")
def thinking_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A model whose template opens its thoughts, and writes calls as Hermes does."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(R1)
    upstream, served = FakeUpstream(), served_model(folder)
    with running(make_app(upstream, served)) as port:
        yield Door(port, upstream, served)


def names_and_arguments(calls: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    assert {call["type"] for call in calls} == {"function"}
    assert len({call["id"] for call in calls}) == len(calls)
    return [call["function"] for call in calls]


def test_a_message_of_thoughts_words_and_calls(thinking_door: Door) -> None:
    thinking_door.upstream.reply = pieces(*ANSWER)
    body = {**QUESTION, "tools": TOOLS}
    (choice,) = thinking_door.post(PATH, body).json()["choices"]
    message = choice["message"]
    assert names_and_arguments(message.pop("tool_calls")) == [WEATHER, TIME]
    assert message == {
        "role": "assistant",
        "content": "One moment.",
        "reasoning_content": "Look it up.",
        "refusal": None,
    }
    assert choice["finish_reason"] == "tool_calls"
    inputs = thinking_door.upstream.asked[-1]
    assert json.loads(inputs["tools"]) == TOOLS


def test_its_deltas_come_to_the_same(thinking_door: Door) -> None:
    thinking_door.upstream.reply = pieces(*ANSWER)
    body = {**QUESTION, "tools": TOOLS, "stream": True, "n": 2}
    events = thinking_door.post(PATH, body).events()
    for index in (0, 1):
        choices = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        deltas = [choice["delta"] for choice in choices]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content") or "" for delta in deltas) == "One moment."
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Look it up."
        calls: dict[int, dict[str, Any]] = {}
        for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
            if piece["index"] not in calls:
                calls[piece["index"]] = piece
            else:
                assert set(piece) == {"index", "function"}
                function = calls[piece["index"]]["function"]
                function["arguments"] += piece["function"]["arguments"]
        assert names_and_arguments([calls[0], calls[1]]) == [WEATHER, TIME]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("body", "content", "calls", "reasoning"),
    [
        ({"parallel_tool_calls": False}, "One moment.", [WEATHER], "Look it up."),
        ({"tool_choice": "none"}, "".join(ANSWER).partition("</think>\n\n")[2], [], "Look it up."),
        ({"include_reasoning": False}, "One moment.", [WEATHER, TIME], None),
        ({"skip_special_tokens": False}, "".join(ANSWER), [], None),
    ],
)
def test_what_of_it_is_asked_for(
    thinking_door: Door,
    body: dict[str, Any],
    content: str,
    calls: list[Any],
    reasoning: str | None,
) -> None:
    thinking_door.upstream.reply = pieces(*ANSWER)
    response = thinking_door.post(PATH, {**QUESTION, "tools": TOOLS, **body})
    (choice,) = response.json()["choices"]
    message = choice["message"]
    assert message["content"] == content
    assert message.get("reasoning_content") == reasoning
    assert [call["function"] for call in message.get("tool_calls", ())] == calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


def test_thoughts_that_the_template_shuts_are_none(thinking_door: Door) -> None:
    thinking_door.upstream.reply = pieces("21 degrees")
    for effort, content, reasoning in (
        (None, "", "21 degrees"),
        ("none", "21 degrees", None),
        (None, "", "21 degrees"),
    ):
        response = thinking_door.post(PATH, {**QUESTION, "reasoning_effort": effort})
        message = response.json()["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content")) == (content, reasoning)


def test_a_call_that_was_cut_is_there_as_far_as_it_came(thinking_door: Door) -> None:
    thinking_door.upstream.reply = pieces(*ANSWER[:5], reason="length")
    (choice,) = thinking_door.post(PATH, {**QUESTION, "tools": TOOLS}).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bonn", '}
    assert choice["finish_reason"] == "length"


def test_the_tokens_of_a_conversation_are_those_of_its_template(thinking_door: Door) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [*QUESTION["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    body = {"messages": messages, "tools": TOOLS, "add_generation_prompt": False}
    found = thinking_door.post("/tokenize", body).json()
    text = (
        "<|im_start|>user\nHow warm is it?<|im_end|>\n<|im_start|>assistant\n\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call><|im_end|>\n'
    )
    assert thinking_door.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"] == text
