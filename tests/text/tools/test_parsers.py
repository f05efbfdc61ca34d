"""What becomes of an answer's text: calls where it has some, content where it only looks so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe.text.tools.contract import ToolDialect
from specpipe.text.tools.hermes import HermesDialect
from specpipe.text.tools.llama import LlamaDialect
from specpipe.text.tools.mistral import MistralDialect
from tests.tool_calls import TOOLS, read

HERMES, LLAMA, MISTRAL = HermesDialect({}), LlamaDialect({}), MistralDialect({})
DIALECTS = (HERMES, LLAMA, MISTRAL)

W, T = "weather", "world.time"
HOSTILE = (
    r'{"city": "}{\"]</tool_call>[TOOL_CALLS]<|eot_id|>\u00e9\ud83d", "n": [-1.5E+3, {"a": null}]}'
)


def hermes(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


CALLS: list[tuple[ToolDialect, str, str, list[tuple[str, str]]]] = [
    # As the models learned it.
    (HERMES, hermes(call(W, HOSTILE)), "", [(W, HOSTILE)]),
    (
        HERMES,
        f"So.\n{hermes(call(W, '{}'))}\n{hermes(call(T, '{}'))}\n",
        "So.",
        [(W, "{}"), (T, "{}")],
    ),
    (LLAMA, call(W, HOSTILE, "parameters"), "", [(W, HOSTILE)]),
    (MISTRAL, f"[TOOL_CALLS] [{call(W, HOSTILE)}]", "", [(W, HOSTILE)]),
    (MISTRAL, f"[TOOL_CALLS][{call(W, '{}')}, {call(T, '{}')}]", "", [(W, "{}"), (T, "{}")]),
    (MISTRAL, f"So.[TOOL_CALLS]{W}[ARGS]{HOSTILE}", "So.", [(W, HOSTILE)]),
    (
        MISTRAL,
        f"[TOOL_CALLS]{W}[ARGS]{{}}[TOOL_CALLS]{T}[CALL_ID]a2c4e6g8i[ARGS]{{}}",
        "",
        [(W, "{}"), (T, "{}")],
    ),
    # As they write it, too.
    (HERMES, hermes('{"arguments": {"days": 1}, "name": "weather"}'), "", [(W, '{"days": 1}')]),
    (HERMES, hermes('{"name": "world.time"}'), "", [(T, "{}")]),
    (HERMES, hermes('{"name": "world.time", "arguments": null}'), "", [(T, "{}")]),
    (
        HERMES,
        hermes(r'{"name": "weather", "arguments": "{\"city\": \"\\u00e9\"}"}'),
        "",
        [(W, r'{"city": "\u00e9"}')],
    ),
    (
        HERMES,
        hermes('{"name": "weather", "arguments": {"city": "a\nb"}}'),
        "",
        [(W, r'{"city": "a\nb"}')],
    ),
    (HERMES, hermes(r'{"n\u0061me": "we\u0061ther", "arguments": {}}'), "", [(W, "{}")]),
    (HERMES, f"<tool_call>{call(W, '{}')} and more", " and more", [(W, "{}")]),
    (LLAMA, f"<|python_tag|>{call(W, '{}')}; {call(T, '{}')}", "", [(W, "{}"), (T, "{}")]),
    (
        LLAMA,
        '{"type": "function", "name": "weather", "parameters": {"days": 1}}',
        "",
        [(W, '{"days": 1}')],
    ),
    (LLAMA, f"\n{call(W, '{}')}\n{call(T, '{}')}\n", "", [(W, "{}"), (T, "{}")]),
    (MISTRAL, f'[TOOL_CALLS] [{call(W, "{}")[:-1]}, "id": "a2c4e6g8i"}}]', "", [(W, "{}")]),
    (MISTRAL, f'[TOOL_CALLS]{W}{{"days": 1}}', "", [(W, '{"days": 1}')]),
    # Cut by max_tokens, or broken, once it was a call for certain.
    (
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Kö',
        "",
        [(W, '{"city": "Kö')],
    ),
    (HERMES, f"<tool_call>{call(W, '{}')[:-1]}\n</tool_call>", "", [(W, "{}")]),
    (HERMES, hermes(call(W, "{'city'}")), "'city'}}\n</tool_call>", [(W, "{")]),
    (HERMES, hermes(call(W, '{"a": 1}}')), "}\n</tool_call>", [(W, '{"a": 1}')]),
    (LLAMA, f'{call(W, "{}")}; {{"name": ', '; {"name": ', [(W, "{}")]),
    (
        MISTRAL,
        f"[TOOL_CALLS][{call(W, '{}')}, {call('other', '{}')}]",
        f", {call('other', '{}')}]",
        [(W, "{}")],
    ),
]

CONTENT: list[tuple[ToolDialect, str]] = [
    *(
        (dialect, text)
        for dialect in DIALECTS
        for text in ("", " \n", "Hi <b> [x] {y}\n", "[1, {}]")
    ),
    (HERMES, "a <tool_call> b"),
    (HERMES, hermes(call("other", "{}"))),
    (HERMES, hermes(call(W, "[1]"))),
    (HERMES, hermes(call(W, r'"\"text\""'))),
    (HERMES, hermes(call(W, r'"{\"a\": NaN}"'))),
    (HERMES, hermes(r'{"name": "weather", "arguments": "{\"city\": \"\ud83d\"}"}')),
    (HERMES, hermes('{"name": 7, "arguments": {}}')),
    (HERMES, hermes('{"name": "weather", "name": "weather", "arguments": {}}')),
    (HERMES, hermes('{"arguments": {"days": 1}, "name": "other"}')),
    (HERMES, hermes("weather: {}")),
    (HERMES, 'So.\n<tool_call>\n{"name": "weather", "argu'),
    (HERMES, "<tool_ca"),
    (LLAMA, '{"name": "weather", "age": 3}'),
    (LLAMA, f"So: {call(W, '{}', 'parameters')}"),
    (LLAMA, "<|python_tag|>print(1)"),
    (LLAMA, '{"na'),
    (MISTRAL, "[TOOL_CALLS]other[ARGS]{}"),
    (MISTRAL, "[TOOL_CALLS]weather"),
    (MISTRAL, "[TOOL_CALLS][]"),
    (MISTRAL, f"[TOOL_CALLS][{call('other', '{}')}]"),
]


@pytest.mark.parametrize(("dialect", "text", "content", "calls"), CALLS)
def test_calls_are_told_from_content(
    dialect: ToolDialect, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(dialect.parser(TOOLS), [text]) == ("", content, calls)
    assert read(dialect.parser(TOOLS), text) == ("", content, calls)


@pytest.mark.parametrize(("dialect", "text"), CONTENT)
def test_what_cannot_be_a_call_stays_content(dialect: ToolDialect, text: str) -> None:
    assert read(dialect.parser(TOOLS), [text]) == ("", text, [])
    assert read(dialect.parser(TOOLS), text) == ("", text, [])


@pytest.mark.parametrize(("dialect", "text", "content", "calls"), CALLS)
def test_without_tools_all_is_content(
    dialect: ToolDialect, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(dialect.parser([]), text) == ("", text, [])


def test_arguments_come_as_they_are_written() -> None:
    parser = HERMES.parser(TOOLS)
    parser.feed('<tool_call>\n{"name": "weather", "arguments": ')
    pieces = ('{"city', '": "K', 'öln"', "}", "}", "\n</tool_call>")
    came = [parser.feed(piece).tool_calls for piece in pieces]
    assert [[(call.name, call.arguments) for call in calls] for calls in came] == [
        [("weather", '{"city')], [("", '": "K')], [("", 'öln"')], [("", "}")], [], []
    ]  # fmt: skip


def test_content_is_not_held_back_longer_than_a_mark() -> None:
    parser = MISTRAL.parser(TOOLS)
    assert [parser.feed(piece).content for piece in ("Hi [TOOL", "_BOX] ", "x")] == [
        "Hi", " [TOOL_BOX]", " x"
    ]  # fmt: skip


def test_white_space_without_end_is_passed_on() -> None:
    text = "So." + " " * 300 + hermes(call(W, "{}"))
    for pieces in ([text], text, [text[:100], text[100:]]):
        assert read(HERMES.parser(TOOLS), pieces) == ("", "So." + " " * 44, [(W, "{}")])


def test_calls_after_the_first_are_left_out_where_they_may_not_be_parallel() -> None:
    text = f"{hermes(call(W, '{}'))}\n{hermes(call(T, '{}'))} End."
    parser = HERMES.parser(TOOLS, is_parallel=False)
    assert read(parser, text) == ("", " End.", [(W, "{}")])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), JSON, max_size=3)
WRITTEN = st.builds(
    lambda value, indent, is_ascii: json.dumps(value, indent=indent, ensure_ascii=is_ascii),
    ARGUMENTS,
    st.none() | st.integers(0, 2),
    st.booleans(),
)


def cuts(data: Any, text: str) -> list[str]:
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]


@settings(max_examples=60, deadline=None)
@given(WRITTEN, st.sampled_from([W, T]), st.text(max_size=12), st.data())
def test_any_arguments_come_through_any_split(
    arguments: str, name: str, before: str, data: Any
) -> None:
    before = before.replace("{", "").rstrip()
    for dialect, text in (
        (HERMES, before + hermes(call(name, arguments))),
        (LLAMA, f"{before}<|python_tag|>{call(name, arguments, 'parameters')}"),
        (MISTRAL, f"{before}[TOOL_CALLS] [{call(name, arguments)}]"),
        (MISTRAL, f"{before}[TOOL_CALLS]{name}[ARGS]{arguments}"),
    ):
        expected = ("", before, [(name, arguments)])
        assert read(dialect.parser(TOOLS), cuts(data, text)) == expected


SHREDS = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "[",
            "]",
            "{",
            "}",
            '"',
            "\\",
            ":",
            ",",
            ";",
            " ",
            "\n",
            "name",
            "arguments",
            '"name": "weather"',
            '{"name": "weather", ',
            '"arguments": {',
            '"parameters": {',
            "weather",
            "world.time",
            "1",
            "-",
            "tru",
            "null",
            '{"a": "',
            "é",
            "abc",
        ]
    )
    | st.text(max_size=2),
    max_size=14,
).map("".join)


@settings(max_examples=250, deadline=None)
@given(SHREDS, st.sampled_from(DIALECTS), st.data())
def test_any_text_survives_any_split(text: str, dialect: ToolDialect, data: Any) -> None:
    whole = read(dialect.parser(TOOLS), [text])
    assert read(dialect.parser(TOOLS), cuts(data, text)) == whole
    _, content, calls = whole
    if not calls:
        assert content == text
    for name, arguments in calls:
        assert name in (W, T) and arguments.startswith("{")
    assert is_left_of(content, text)


def is_left_of(content: str, text: str) -> bool:
    """Whether content is the text with something left out."""
    characters = iter(text)
    return all(character in characters for character in content)
