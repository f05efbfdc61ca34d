"""`messages` from strangers: a list of objects, or one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpipe.config.limits import Limits
from specpipe.errors import RequestError
from specpipe.triton.serving.messages import parse_messages

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


_TEXT = st.lists(
    st.sampled_from([*'[]{}",:\\', "\\ud800", "\\u0041", "role", "user", "1e999", "NaN", "é", "1"]),
    max_size=40,
).map("".join)


@given(
    st.one_of(
        _TEXT,
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        ).map(lambda value: json.dumps([{"role": "user", "content": value}])),
    )
)
def test_any_text_is_messages_or_a_refusal(text: str) -> None:
    try:
        parsed = parse_messages(text.encode(errors="replace"), LIMITS)
    except RequestError as exc:
        assert str(exc).startswith("messages") and len(str(exc)) < 300
        return
    assert all(isinstance(item["role"], str) for item in parsed)
    json.dumps(parsed, ensure_ascii=False).encode()
