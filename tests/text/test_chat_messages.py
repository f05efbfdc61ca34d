"""Conversations as templates of public kinds render them, compared with transformers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from specpipe.errors import RequestError
from specpipe.text.chat_arguments import ChatArguments
from specpipe.text.chat_template import ChatTemplate
from tests.chat_templates import CONVERSATIONS, TEMPLATES

DEFAULTS = ChatArguments()
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Das Wetter <heute> & morgen",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 7}},
            "required": ["city"],
        },
    },
}
SHOWS_ALL = (
    "{{ bos_token }}{{ tools | tojson }}{{ documents | tojson }}{{ enable_thinking | default(0) }}"
    "{{ messages | tojson }}{{ add_generation_prompt | tojson }}{# content #}"
)
KINDS = {**TEMPLATES, "shows all": SHOWS_ALL}
ARGUMENTS = (
    DEFAULTS,
    ChatArguments(tools=[WEATHER]),
    ChatArguments(add_generation_prompt=False),
    ChatArguments(continue_final_message=True),
    ChatArguments(continue_final_message=True, add_generation_prompt=False, tools=[WEATHER]),
    ChatArguments(variables={"enable_thinking": False, "bos_token": "<x>", "documents": [{}]}),
)
CASES = {
    **CONVERSATIONS,
    "an answer that has begun": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Es ist \n"},
    ],
    "an answer that begins with nothing": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
    ],
}

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@lru_cache(maxsize=1)  # each has a process
def template(kind: str) -> ChatTemplate:
    return ChatTemplate(KINDS[kind], file="x", special_tokens=TOKENS)


def render(kind: str, messages: list[dict[str, Any]], arguments: ChatArguments = DEFAULTS) -> str:
    return template(kind).render(messages, arguments)


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)


def theirs(
    reference: Any,
    kind: str,
    messages: list[dict[str, Any]],
    arguments: ChatArguments = DEFAULTS,
) -> str | None:
    """What transformers renders; None where the template, or transformers, refuses."""
    begins, continues = arguments.add_generation_prompt, arguments.continue_final_message
    try:
        prompt: str = reference.apply_chat_template(
            messages,
            tools=list(arguments.tools) or None,
            chat_template=KINDS[kind],
            add_generation_prompt=not continues if begins is None else begins,
            continue_final_message=continues,
            tokenize=False,
            **arguments.variables,
        )
    except Exception:
        return None
    return prompt


def ours(
    kind: str, messages: list[dict[str, Any]], arguments: ChatArguments = DEFAULTS
) -> str | None:
    try:
        return render(kind, messages, arguments)
    except RequestError as exc:
        assert str(exc).startswith(
            ("messages: the chat template refuses them: ", "continue_final_message is true, but ")
        )
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_every_conversation_is_rendered_as_in_transformers(reference: Any, kind: str) -> None:
    for arguments in ARGUMENTS:
        prompts = {name: ours(kind, messages, arguments) for name, messages in CASES.items()}
        assert prompts == {
            name: theirs(reference, kind, messages, arguments) for name, messages in CASES.items()
        }
        if arguments == DEFAULTS:
            assert prompts["one question"] is not None
            assert sum(prompt is not None for prompt in prompts.values()) >= 5


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        ("So it is", "user:hi\nassistant:So it is"),
        ("So it is ", "user:hi\nassistant:So it is"),  # the template trims
        (" THE_ANSWER_GOES_ON_HERE", "user:hi\nassistant:THE_ANSWER_GOES_ON_HERE"),
    ],
)
def test_an_answer_goes_on_where_its_beginning_ends(content: str, prompt: str) -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}\n{% endfor %}"
    made = ChatTemplate(source, file="x", special_tokens=TOKENS)
    goes_on = ChatArguments(continue_final_message=True)
    for written in (content, parts(content)):
        begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": written}]
        assert made.render(begun, goes_on) == prompt


@pytest.mark.parametrize(
    ("source", "last", "sentence"),
    [
        ("{{ messages[0].content }}", {}, "but the last message has no content"),
        ("{{ messages[0].content }}", {"content": None}, "but the last message has no content"),
        ("{{ messages[0].role }}", {"content": "a"}, "but the chat template reads no content"),
        (
            "{{ messages[0].content }}",
            {"content": "a"},
            "but the chat template does not write the last message as it is",
        ),
        (
            "{{ messages[1].content | upper }}",
            {"content": "a"},
            "but the chat template does not write the last message as it is",
        ),
    ],
)
def test_a_message_that_cannot_be_continued(
    source: str, last: dict[str, Any], sentence: str
) -> None:
    made = ChatTemplate(source, file="x", special_tokens=TOKENS)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", **last}]
    with pytest.raises(RequestError) as error:
        made.render(messages, ChatArguments(continue_final_message=True))
    assert str(error.value) == f"continue_final_message is true, {sentence}"


def test_variables_take_the_place_of_nothing_that_has_an_argument() -> None:
    made = ChatTemplate(SHOWS_ALL, file="x", special_tokens=TOKENS)
    stolen = {"messages": [], "tools": [1], "add_generation_prompt": False, "self": 1, "context": 2}
    messages = [{"role": "user", "content": "hi"}]
    assert made.render(messages, ChatArguments(variables=stolen)) == (
        '<s>nullnull0[{"role": "user", "content": "hi"}]true'
    )


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_parts_are_one_text_where_a_template_wants_a_text(reference: Any, kind: str) -> None:
    in_parts = [{"role": "user", "content": parts("Wie warm", "ist es?")}]
    joined = [{"role": "user", "content": "Wie warm\nist es?"}]
    takes_parts = kind in ("gemma_parts", "items")
    assert render(kind, in_parts) == theirs(reference, kind, in_parts if takes_parts else joined)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}


def test_parts_beside_texts_and_calls() -> None:
    messages = [
        {"role": "system", "content": parts("Be brief.")},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": parts("One", "moment"), "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": parts("21")},
    ]
    assert render("qwen_2_tools", messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\nOne\nmoment\n<tool_call>\n{"name": "f", "arguments": {}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n21\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "written",
    ["m.role + ': ' + m.content", "m.role, ': ', m.content if m.content is string else ''"],
)
@pytest.mark.parametrize("text", [" ", "use", "user"])
def test_a_part_that_says_nothing_new_is_not_lost(written: str, text: str) -> None:
    """Nor is the rest of the conversation."""
    source = f"{{% for m in messages %}}{{{{ [{written}] | join }}}}\n{{% endfor %}}"
    made = ChatTemplate(source, file="x", special_tokens={})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user"}]
    expected = f"system: Be brief.\nuser: {text}\n"
    assert made.render([messages[0], {**messages[1], "content": parts(text)}]) == expected


def test_no_parts_at_all_are_no_text() -> None:
    assert render("alpaca", [{"role": "user", "content": []}]) == (
        "### Instruction:\n\n\n### Response:"
    )


def test_what_a_template_refuses_is_said_once_in_its_words() -> None:
    messages = [{"role": "system", "content": parts("x")}]
    with pytest.raises(RequestError) as error:
        render("gemma", messages)
    assert str(error.value) == (
        "messages: the chat template refuses them: System role not supported"
    )
