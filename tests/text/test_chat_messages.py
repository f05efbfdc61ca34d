"""Conversations as templates of public kinds render them, compared with transformers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from specpipe.errors import RequestError
from specpipe.text.chat_template import ChatTemplate
from tests.chat_templates import CONVERSATIONS, TEMPLATES

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@lru_cache(maxsize=1)  # each has a process
def template(kind: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[kind], file="x", special_tokens=TOKENS)


def render(kind: str, messages: list[dict[str, Any]]) -> str:
    return template(kind).render(messages)


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)


def theirs(reference: Any, kind: str, messages: list[dict[str, Any]]) -> str | None:
    """What transformers renders; None where the template refuses."""
    try:
        prompt: str = reference.apply_chat_template(
            messages, chat_template=TEMPLATES[kind], add_generation_prompt=True, tokenize=False
        )
    except Exception:
        return None
    return prompt


def ours(kind: str, messages: list[dict[str, Any]]) -> str | None:
    try:
        return render(kind, messages)
    except RequestError as exc:
        assert str(exc).startswith("messages: the chat template refuses them: ")
        return None


@pytest.mark.parametrize("kind", TEMPLATES)
def test_every_conversation_is_rendered_as_in_transformers(reference: Any, kind: str) -> None:
    prompts = {name: ours(kind, messages) for name, messages in CONVERSATIONS.items()}
    assert prompts == {
        name: theirs(reference, kind, messages) for name, messages in CONVERSATIONS.items()
    }
    assert prompts["one question"] is not None
    assert sum(prompt is not None for prompt in prompts.values()) >= 5


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
