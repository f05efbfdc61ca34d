"""Inputs of JSON from strangers: what they mean, or one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specpipe.config.limits import Limits, ServedLimits
from specpipe.errors import RequestError
from specpipe.triton.serving.messages import (
    ToolChoice,
    parse_messages,
    parse_template_kwargs,
    parse_tool_choice,
    parse_tools,
)

LIMITS = Limits(max_messages=4, max_json_values=40).resolved(
    max_seq_len=1024, longest_token_bytes=16, is_bytewise=True
)


def message(content: str) -> bytes:
    """`content` is JSON."""
    return f'[{{"role": "user", "content": {content}}}]'.encode()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            b"[" * 100_000,
            "messages is nested 100000 deep; it may be 32 (serving.limits.max_json_depth)",
        ),
        (
            b'{"a":' * 100_000,
            "messages is nested 100000 deep; it may be 32 (serving.limits.max_json_depth)",
        ),
        (
            message('"\\\\\\"' + "x" * 9 + '"' + "[" * 31),
            "messages is nested 33 deep; it may be 32 (serving.limits.max_json_depth)",
        ),
        (
            b"[" + b"{}," * 40 + b"{}]",
            "messages has 82 values; it may have 40 (serving.limits.max_json_values)",
        ),
        (
            json.dumps([{"role": "user"}] * 5).encode(),
            "messages has 5 messages; it may have 4 (serving.limits.max_messages)",
        ),
        (message("NaN"), "messages has NaN, which JSON does not have"),
        (message("-Infinity"), "messages has -Infinity, which JSON does not have"),
        (message("1e400"), "messages has the number 1e400, which is too large"),
        (
            message("1" * 300 + "e400"),
            f"messages has the number {'1' * 80}…, which is too large",
        ),
        (message("9" * 5000), "messages has a number of 5000 digits; it may have 300"),
        (
            b'[{"role": "user", "role": "system", "content": "a"}]',
            "messages has the key 'role' twice in one object",
        ),
        (
            message(f'{{"{"k" * 1000}": 1, "{"k" * 1000}": 2}}'),
            f"messages has the key '{'k' * 80}…' twice in one object",
        ),
        (message('"\\ud800"'), "messages has half a surrogate pair, \\ud800: send UTF-8"),
        (message('["\\udfff\\ud83d"]'), "messages has half a surrogate pair, \\udfff: send UTF-8"),
        (
            message('"\0"'),
            "messages is not JSON (Invalid control character at: line 1 column 31 (char 30)): "
            'expected a JSON array such as [{"role": "user", "content": "Hello"}]',
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else "",
)
def test_what_cannot_be_a_conversation_is_one_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages(data, LIMITS)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("content", "meant"),
    [
        ('"[[[[{{{{,,,,"', "[[[[{{{{,,,,"),
        ('"a \\"[\\" \\\\"', 'a "[" \\'),
        ('"\\ud83d\\ude00 \\u00e9"', "😀 é"),
        ('[{"type": "text", "text": "hi"}]', [{"type": "text", "text": "hi"}]),
        ('"a", "number": -1.5e3, "b": "c"', "a"),
    ],
)
def test_brackets_in_strings_and_escapes_count_for_nothing(content: str, meant: Any) -> None:
    (parsed,) = parse_messages(message(content), LIMITS)
    assert (parsed["role"], parsed["content"]) == ("user", meant)
    assert parsed.get("number", -1500.0) == -1500.0


_KEYS = st.text() | st.sampled_from(["name", "parameters", "type", "messages", "tools"])
_TEXT = st.lists(
    st.sampled_from([*'[]{}",:\\', "\\ud800", "\\u0041", "role", "user", "1e999", "NaN", "é", "1"]),
    max_size=40,
).map("".join)


@settings(suppress_health_check=[HealthCheck.too_slow])  # a first run makes tables of Unicode
@given(
    st.sampled_from(["messages", "tools", "tool_choice", "chat_template_kwargs"]),
    st.one_of(
        _TEXT,
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(_KEYS, inner),
        ).flatmap(
            lambda value: st.sampled_from(
                [
                    value,
                    [{"role": "user", "content": value}],
                    [{"type": "function", "function": value}],
                    {"type": "function", "function": value},
                    {"enable_thinking": value},
                ]
            ).map(json.dumps)
        ),
    ),
)
def test_any_text_is_what_an_input_takes_or_a_refusal(name: str, text: str) -> None:
    parser, _ = PARSERS[name]
    try:
        parsed = parser(text.encode(errors="replace"), LIMITS)
    except RequestError as exc:
        assert str(exc).startswith(name) and len(str(exc)) < 300
        return
    if name == "tool_choice":
        assert isinstance(parsed.name, str | None)
        return
    json.dumps(parsed, ensure_ascii=False).encode()
    if name == "messages":
        assert all(isinstance(item["role"], str) for item in parsed)
    if name == "tools":
        assert all(isinstance(item["function"]["name"], str) for item in parsed)


TOOL = '{"type": "function", "function": {"name": "f"}}'
PARSERS: dict[str, tuple[Callable[[bytes, ServedLimits], Any], str]] = {
    "messages": (parse_messages, 'a JSON array such as [{"role": "user", "content": "Hello"}]'),
    "tools": (parse_tools, f"a JSON array such as [{TOOL}]"),
    "tool_choice": (parse_tool_choice, f"none, auto, required, or JSON such as {TOOL}"),
    "chat_template_kwargs": (
        parse_template_kwargs,
        'a JSON object such as {"enable_thinking": false}',
    ),
}


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_no_json_of_one_meaning_is_refused_by_the_inputs_name(name: str) -> None:
    parser, expected = PARSERS[name]
    for data, fault in (
        (b"[" * 10**5, "is nested 100000 deep; it may be 32 (serving.limits.max_json_depth)"),
        (b"[" + b"0," * 41 + b"0]", "has 42 values; it may have 40 (serving.limits.max_json_valu"),
        (b'{"k": 1, "k": 2}', "has the key 'k' twice in one object"),
        (b'{"k": NaN}', "has NaN, which JSON does not have"),
        (b'{"k": 1e400}', "has the number 1e400, which is too large"),
        (b'{"k": %s}' % (b"9" * 5000), "has a number of 5000 digits; it may have 300"),
        (b'{"k": "\\ud800"}', "has half a surrogate pair, \\ud800: send UTF-8"),
        (b"x" * 10**5, "is not JSON (Expecting value: line 1 column 1 (char 0)): expected "),
        (b"7", "must be "),
    ):
        with pytest.raises(RequestError) as caught:
            parser(data, LIMITS)
        assert str(caught.value).startswith(f"{name} {fault}")
        assert str(caught.value).endswith("" if "expected" not in fault else expected)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("[5]", 'tools[0] must be an object of type "function"'),
        (f"[{TOOL}, {TOOL}]", "tools[1].function.name is f, as that of another tool"),
        (f"[{','.join([TOOL] * 3)}]", "tools has 3 entries; it may have 2 (serving.limits.max_too"),
    ],
)
def test_tools_that_cannot_be_called(data: str, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tools(data.encode(), LIMITS.model_copy(update={"max_tools": 2}))
    assert str(caught.value).startswith(sentence)


def test_the_choice_of_a_tool_by_a_word_or_by_name() -> None:
    choices = {word: parse_tool_choice(word.encode(), LIMITS) for word in ("none", "required")}
    assert choices == {"none": ToolChoice("none"), "required": ToolChoice("required")}
    assert parse_tool_choice(TOOL.encode(), LIMITS) == ToolChoice("required", "f")
    for data in ('"required"', '{"type": "function"}', TOOL.replace('"f"', "5"), "null", "Auto"):
        with pytest.raises(RequestError, match=r"^tool_choice (must be|is not JSON)"):
            parse_tool_choice(data.encode(), LIMITS)


@pytest.mark.parametrize(
    "key", ["messages", "tools", "add_generation_prompt", "continue_final_message"]
)
def test_no_variable_of_a_template_takes_an_inputs_place(key: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_template_kwargs(json.dumps({key: []}).encode(), LIMITS)
    assert str(caught.value) == (
        f"chat_template_kwargs has '{key}', which is an input: send it beside chat_template_kwargs"
    )
    with pytest.raises(RequestError, match="'chat_template': the template is the checkpoint's$"):
        parse_template_kwargs(b'{"chat_template": ""}', LIMITS)
    assert parse_template_kwargs(b'{"enable_thinking": false}', LIMITS) == {
        "enable_thinking": False
    }
