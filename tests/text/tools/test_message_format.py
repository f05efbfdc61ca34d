"""Which dialect a checkpoint has, what its own template writes, and what is shown of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe.errors import RequestError
from specpipe.text.chat_arguments import ChatArguments
from specpipe.text.tokenizer import Tokenizer
from specpipe.text.tools.functions import functions_of
from specpipe.text.tools.message_format import MessageFormat, dialect_of
from tests.chat_templates import TEMPLATES
from tests.tool_calls import HERMES, MISTRAL_NAMED, MISTRAL_WITH_IDS, QWEN_3, R1, TOOLS, read
from tests.toy_tokenizers import byte_level, write_tokenizer

SPECIAL = ("<s>", "</s>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")
THOUGHTS = ("<think>", "</think>", "[THINK]", "[/THINK]")

DIALECTS = {
    "llama_3_tools": "llama3",
    "mistral_tools": "mistral",
    "qwen_2_tools": "hermes",
    "HERMES": "hermes",
    "QWEN_3": "hermes",
    "R1": "hermes",
    "MISTRAL_NAMED": "mistral",
    "MISTRAL_WITH_IDS": "mistral",
}
SOURCES = {**TEMPLATES, "HERMES": HERMES, "QWEN_3": QWEN_3, "R1": R1,
           "MISTRAL_NAMED": MISTRAL_NAMED, "MISTRAL_WITH_IDS": MISTRAL_WITH_IDS}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


def load(folder: Path, template: str | None) -> Tokenizer:
    backend = byte_level()
    backend.add_special_tokens([*SPECIAL, *THOUGHTS[2:]])
    write_tokenizer(folder, backend, bos_token="<s>", eos_token="</s>", chat_template=template)
    return Tokenizer.load(folder)


@pytest.mark.parametrize("name", SOURCES)
def test_dialect_is_told_by_the_chat_template(name: str, folder: Path) -> None:
    dialect = dialect_of(load(folder, SOURCES[name]))
    assert (dialect and dialect.name) == DIALECTS.get(name)


def test_dialect_is_told_by_an_escaped_template_too(folder: Path) -> None:
    template = r"""{{ "<tool_call>{\"name\": \"" + call.name }}"""
    dialect = dialect_of(load(folder, template))
    assert dialect is not None and dialect.name == "hermes"


def test_dialect_may_be_named(folder: Path) -> None:
    dialect = dialect_of(load(folder, TEMPLATES["chatml"]), "mistral")
    assert dialect is not None and dialect.name == "mistral"
    # Its tokenizer has what the newer form is written with.
    assert "[" not in dialect.grammar(TOOLS, is_parallel=False).partition("\n")[0].strip("<[]>")


def test_ids_are_what_templates_take(folder: Path) -> None:
    made = []
    for name in ("mistral_tools", "qwen_2_tools"):
        dialect = dialect_of(load(folder, TEMPLATES[name]))
        assert dialect is not None
        made.append([dialect.new_call_id() for _ in range(100)])
    mistral, other = made
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in mistral)
    assert all(call_id.startswith("call_") for call_id in other)
    assert len({*mistral, *other}) == 200


@pytest.mark.parametrize("name", DIALECTS)
def test_what_the_template_writes_is_read_back(name: str, folder: Path) -> None:
    tokenizer = load(folder, SOURCES[name])
    assert tokenizer.chat_template is not None
    arguments = {"city": "Köln </tool_call> <é>", "days": [1, -2.5], "wind": None}
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    calls = [{**call, "id": f"call0000{n}"} for n in range(1 if name == "llama_3_tools" else 2)]
    question = {"role": "user", "content": "How warm is it?"}
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    prompt, whole = (
        tokenizer.chat_template.render(messages) for messages in ([question], [question, answer])
    )
    written = whole.removeprefix(prompt.removesuffix("<think>\n"))
    for end in ("<|im_end|>", "<|eot|>", "</s>"):
        written = written.partition(end)[0]
    found = MessageFormat.of(tokenizer)
    _, content, read_calls = read(found.parser(TOOLS), written)
    assert content == ""
    as_json = '{"city": "Köln </tool_call> <é>", "days": [1, -2.5], "wind": null}'
    assert read_calls == [("weather", as_json)] * len(calls)


@pytest.mark.parametrize(
    ("name", "is_needed"),
    [("qwen_2_tools", False), ("QWEN_3", False), ("mistral_tools", True), ("llama_3_tools", True),
     ("chatml", False)],
)  # fmt: skip
def test_special_tokens_are_needed_where_they_are_marks(
    name: str, is_needed: bool, folder: Path
) -> None:
    assert MessageFormat.of(load(folder, SOURCES[name])).needs_special_tokens is is_needed


def test_a_dialect_that_is_not_known_has_no_grammar(folder: Path) -> None:
    found = MessageFormat.of(load(folder, None))
    assert read(found.parser(TOOLS), ["<tool_call>"]) == ("", "<tool_call>", [])
    with pytest.raises(RequestError, match="how this model writes calls is not known"):
        found.grammar(TOOLS, is_parallel=True)


CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
ANSWERS: list[tuple[str, bool, tuple[str, str, list[tuple[str, str]]]]] = [
    ("<think>\nHm.\n</think>\n\n21 °C", False, ("Hm.", "21 °C", [])),
    ("\n<think>Hm.</think>21 °C\n", False, ("Hm.", "21 °C\n", [])),
    ("<think>\n\n</think>\n\n21 °C", False, ("", "21 °C", [])),
    ("Hm.\n\nHm.\n</think>\n\n21 °C", True, ("Hm.\n\nHm.", "21 °C", [])),
    ("<think>Hm.</think>21 °C", True, ("Hm.", "21 °C", [])),
    ("Hm. </thin", True, ("Hm. </thin", "", [])),
    ("Hm.\n", True, ("Hm.", "", [])),
    ("\n <thin", True, ("<thin", "", [])),
    ("<thi", False, ("", "<thi", [])),
    ("21 <think>°C</think>", False, ("", "21 <think>°C</think>", [])),
    ("21 °C", False, ("", "21 °C", [])),
    ("", True, ("", "", [])),
    (f"<think>{CALL}</think>{CALL}", False, (CALL, "", [("weather", "{}")])),
    (f"Hm.\n</think>\n\nSo:\n{CALL}<|im_end|>", True, ("Hm.", "So:", [("weather", "{}")])),
]


@pytest.mark.parametrize(("text", "is_open", "message"), ANSWERS)
def test_thoughts_are_told_from_the_answer(
    text: str, is_open: bool, message: Any, folder: Path
) -> None:
    found = MessageFormat.of(load(folder, QWEN_3))
    assert read(found.parser(TOOLS, is_reasoning=is_open), [text]) == message
    assert read(found.parser(TOOLS, is_reasoning=is_open), text) == message


def test_thoughts_of_mistral(folder: Path) -> None:
    found = MessageFormat.of(load(folder, MISTRAL_NAMED + "{# [/THINK] #}"))
    text = "[THINK]Hm.[/THINK]So.[TOOL_CALLS]weather[ARGS]{}</s>"
    assert read(found.parser(TOOLS), text) == ("Hm.", "So.", [("weather", "{}")])


@pytest.mark.parametrize(
    ("name", "variables", "is_open"),
    [("R1", {}, True), ("R1", {"enable_thinking": False}, False), ("QWEN_3", {}, False),
     ("qwen_2_tools", {}, False)],
)  # fmt: skip
def test_a_prompt_that_opens_thoughts_is_known(
    name: str, variables: dict[str, Any], is_open: bool, folder: Path
) -> None:
    tokenizer = load(folder, SOURCES[name])
    assert tokenizer.chat_template is not None
    question = [{"role": "user", "content": "Hi <think>"}]
    prompt = tokenizer.chat_template.render(question, ChatArguments(variables=variables))
    assert MessageFormat.of(tokenizer).is_reasoning_after(prompt) is is_open


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([*SPECIAL, *THOUGHTS, "<", "[", "|", "Hm", " "]), max_size=8).map(
        "".join
    ),
    st.sampled_from([QWEN_3, MISTRAL_NAMED, TEMPLATES["llama_3_tools"]]),
    st.data(),
)
def test_special_tokens_are_left_out_by_any_split(
    folder: Path, text: str, template: str, data: Any
) -> None:
    found = _formats(folder, template)
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]
    reasoning, content, calls = read(found.parser(TOOLS), pieces)
    assert (reasoning, content, calls) == read(found.parser(TOOLS), [text])
    shown = reasoning + content
    for token in found.special.pattern.findall(text):
        text = text.replace(token, "")
    marks = ("<think>", "</think>")
    if not any(mark in text for mark in marks):
        assert shown.split() == text.split()


def _formats(folder: Path, template: str, cache: dict[str, MessageFormat] = {}) -> MessageFormat:  # noqa: B006
    if template not in cache:
        cache[template] = MessageFormat.of(load(folder, template))
    return cache[template]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"type": "code"}], 'tools[0] must be an object of type "function"'),
        ([{"type": "function"}], "tools[0].function must be an object with a name"),
        ([{"function": {"name": "a b"}}], "tools[0].function.name is a b; it must be 1 to 128"),
        ([{"function": {"name": "a"}}] * 2, "tools[1].function.name is a, as that of another"),
        ([{"function": {"name": "a", "parameters": {"type": "string"}}}],
         "tools[0].function.parameters must be the JSON schema of an object"),
    ],
)  # fmt: skip
def test_tools_that_are_none_are_refused(tools: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        functions_of(tools)
    assert str(error.value).startswith(message)
