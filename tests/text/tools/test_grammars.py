"""What a grammar lets a model write, its parser reads: by llguidance, with a real tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from specpipe.speculative.guide import Guide
from specpipe.text.tokenizer import Tokenizer
from specpipe.text.tools.message_format import MessageFormat
from tests.chat_templates import TEMPLATES
from tests.tool_calls import (
    HERMES,
    MISTRAL_NAMED,
    MISTRAL_WITH_IDS,
    QWEN_3,
    TIME,
    TOOLS,
    WEATHER,
    read,
)
from tests.toy_tokenizers import write_tokenizer

MODEL = Path(__file__).parents[3] / "models" / "python-code" / "target"
SPECIAL = ("<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
END = 0  # <|endoftext|>

FORMATS = {
    "hermes": HERMES,
    "qwen 3": QWEN_3,
    "llama 3": TEMPLATES["llama_3_tools"],
    "mistral": TEMPLATES["mistral_tools"],
    "mistral, named": MISTRAL_NAMED,
    "mistral, ids": MISTRAL_WITH_IDS,
    "magistral": MISTRAL_NAMED + "{# [/THINK] #}",
}


class Model:
    """A tokenizer whose marks are tokens, or are not, and llguidance on it."""

    def __init__(self, folder: Path, *, has_tokens: bool) -> None:
        self.backend = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        if has_tokens:
            self.backend.add_special_tokens(list(SPECIAL))
            self.backend.add_tokens(
                [tokenizers.AddedToken(text, special=False, normalized=False) for text in ADDED]
            )
        self.folder = folder
        write_tokenizer(folder, self.backend, eos_token="<|endoftext|>")
        tokenizer = Tokenizer.load(folder)
        # What llguidance asks of a tokenizer.
        self.eos_token_id, self.bos_token_id = END, None
        self.tokens = [tokenizer.token_bytes(i) for i in range(self.backend.get_vocab_size())]
        self.special_token_ids = [*tokenizer.special_token_ids]
        self.llguidance = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: bytes) -> list[int]:
        return self.encode(text.decode())

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.backend.decode(token_ids, skip_special_tokens=False))

    def format(self, template: str) -> MessageFormat:
        write_tokenizer(self.folder, self.backend, chat_template=template)
        return MessageFormat.of(Tokenizer.load(self.folder))

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.llguidance, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.get_error(), (matcher.get_error(), grammar)
        return matcher

    def takes(self, grammar: str, text: str) -> bool:
        matcher, token_ids = self.matcher(grammar), self.encode(text)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def sample(self, grammar: str, chance: random.Random, most: int) -> list[int]:
        """Returns random tokens that the grammar allows, until it can take no more."""
        matcher, token_ids = self.matcher(grammar), []
        while not matcher.is_stopped() and len(token_ids) < most:
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            (allowed,) = np.nonzero(np.unpackbits(bits, bitorder="little"))
            if matcher.is_accepting() and chance.random() < 0.5:
                break
            token_id = int(chance.choice(allowed))
            assert matcher.consume_token(token_id), matcher.get_error()
            token_ids.append(token_id)
        return token_ids


@pytest.fixture(scope="module", params=["tokens", "texts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), has_tokens=request.param == "tokens")


def written(name: str, calls: Sequence[tuple[str, str]]) -> str:
    """The calls as this format's template writes them."""
    if name in ("hermes", "qwen 3"):
        return "\n".join(
            f'<tool_call>\n{{"name": "{function}", "arguments": {arguments}}}\n</tool_call>'
            for function, arguments in calls
        )
    if name == "llama 3":
        ((function, arguments),) = calls
        return f'{{"name": "{function}", "parameters": {arguments}}}'
    if name == "mistral":
        objects = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    middle = "[CALL_ID]a2c4e6g8i[ARGS]" if name == "mistral, ids" else "[ARGS]"
    return "".join(f"[TOOL_CALLS]{name}{middle}{arguments}" for name, arguments in calls)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_model_writes_is_let_through(name: str, model: Model) -> None:
    found = model.format(FORMATS[name])
    one = [("weather", '{"city": "Köln", "days": 3, "unit": "°C", "tags": ["a", "b"]}')]
    two = [*one, ("world.time", "{}")]
    assert model.takes(found.grammar(TOOLS, is_parallel=False), written(name, one))
    assert model.takes(found.grammar([TIME], is_parallel=False), written(name, two[1:]))
    assert not model.takes(found.grammar([WEATHER], is_parallel=True), written(name, two[1:]))
    assert not model.takes(found.grammar(TOOLS, is_parallel=True), "Hi.")
    if name == "mistral":
        text = written(name, one).replace("] [", "][", 1)
        assert model.takes(found.grammar(TOOLS, is_parallel=False), text)
    if name != "llama 3":
        assert model.takes(found.grammar(TOOLS, is_parallel=True), written(name, two))
        assert not model.takes(found.grammar(TOOLS, is_parallel=False), written(name, two))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_parallel", [False, True])
def test_what_is_let_through_is_read_as_calls(name: str, is_parallel: bool, model: Model) -> None:
    found, chance = model.format(FORMATS[name]), random.Random(name)
    grammar = found.grammar(TOOLS, is_parallel=is_parallel)
    if found.reasoning is not None:  # thoughts are any text: here there are none
        grammar = found.dialect.grammar(TOOLS, is_parallel=is_parallel)
    for _ in range(4):
        token_ids = model.sample(grammar, chance, 400)
        text = model.decode(token_ids)
        reasoning, content, calls = read(found.parser(TOOLS), text)
        assert (reasoning, content) == ("", "") and len(calls) >= 1, text
        assert is_parallel or len(calls) == 1
        for function, arguments in calls:
            check(function, arguments)


def check(function: str, arguments: str) -> None:
    value: Any = json.loads(arguments)
    if function == "weather":
        jsonschema.validate(value, WEATHER["function"]["parameters"])
    else:
        assert (function, value) == ("world.time", {})


@pytest.mark.parametrize("name", ["qwen 3", "magistral"])
@pytest.mark.parametrize("is_open", [False, True])
def test_thoughts_may_come_before_a_call(name: str, is_open: bool, model: Model) -> None:
    found = model.format(FORMATS[name])
    assert found.reasoning is not None
    grammar = found.grammar(TOOLS, is_parallel=False, is_reasoning=is_open)
    call = written(name, [("world.time", "{}")])
    opening, closing = found.reasoning.opening, found.reasoning.closing
    text = f"{'' if is_open else opening}\nHm: {call[:9]} ...\n{closing}\n\n{call}"
    assert model.takes(grammar, text)
    assert model.takes(grammar, call) is not is_open
    assert not model.takes(grammar, f"{text}\n")
    read_as = read(found.parser(TOOLS, is_reasoning=is_open), text)
    assert read_as == (f"Hm: {call[:9]} ...", "", [("world.time", "{}")])


GUIDES = [
    (Guide(type="json"), '[1, {"a": null}]', "[1, }"),
    (Guide(type="json_schema", text='{"enum": ["é", 2]}'), '"é"', '"x"'),
    (Guide(type="regex", text=r"a/[b-d]+\d"), "a/bd7", "a/b"),
    (Guide(type="choice", text=r'["a \"b\"", "\u00e9\n", "😀"]'), "é\n", "c"),
    (Guide(type="ebnf_grammar", text='root ::= "a" (root | [0-9])'), "aa1", "aa"),
    (Guide(type="lark", text='start: "a" (start | NUMBER)\nNUMBER: /[0-9]/'), "aa1", "aa"),
]


@pytest.mark.parametrize(("guide", "good", "bad"), GUIDES)
def test_a_guide_holds_after_the_thoughts_that_a_prompt_opens(
    guide: Guide, good: str, bad: str, model: Model
) -> None:
    found = model.format(QWEN_3)
    assert found.after_thoughts(guide, "<|im_start|>assistant\n") == guide
    held = found.after_thoughts(guide, "<|im_start|>assistant\n<think>\n")
    assert held.type == "lark"
    assert model.takes(held.text, f"Hm: {good} or {bad}\n</think>\n\n{good}")
    assert not model.takes(held.text, f"Hm.\n</think>\n\n{bad}")
    assert not model.takes(held.text, good)
