"""What a guide may be, what is said of one that may not, and what a stranger's costs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpipe.checkpoints.limits import FileLimits
from specpipe.errors import RequestError
from specpipe.speculative.guide import Guide, GuideType, allowed_ids
from specpipe.text.guides.guides import Guides
from specpipe.text.tokenizer import Tokenizer
from tests import guided, toy_tokenizers
from tests.ascii_guides import ASCII, END, Ascii

CHAIN = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(900)}


def schema(**keys: Any) -> str:
    return json.dumps(keys)


def fault(kind: GuideType, text: str, guides: Guides = ASCII) -> str:
    with pytest.raises(RequestError) as refused:
        guides.check(Guide(type=kind, text=text))
    return str(refused.value)


@pytest.mark.parametrize("name", guided.GUIDES)
def test_guides_of_all_kinds_pass(name: str) -> None:
    ASCII.check(guided.GUIDES[name])


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (
            "json_schema",
            schema(properties={"a": {"type": "array", "items": {"contains": 3}}}),
            'properties.a.items: Unimplemented keys: ["contains"]',
        ),
        (
            "json_schema",
            schema(
                **{"$defs": {"x": {"anyOf": [{"type": "null"}, {"type": "strin"}]}}},
                items={"$ref": "#/$defs/x"},
            ),
            "$defs.x.anyOf[1]: Invalid type: strin",
        ),
        ("json_schema", schema(items={"$ref": "https://127.0.0.1:9/s"}), "items: Resource 'http"),
        ("json_schema", schema(**{"$ref": "#/$defs/none"}), "Pointer '/$defs/none' does not"),
        ("json_schema", schema(uniqueItems=True, **{"x-guidance": {"lenient": True}}), "Unimpl"),
        ("json_schema", "[1]", "a JSON schema is an object"),
        ("json_schema", "{", "it is not JSON: "),
        ("json_schema", '{"items":' * 900 + "{}" + "}" * 900, "it is nested too deeply"),
        ("regex", "(a+", 'at 1(8): invalid regex "(a+" (in regex): regex parse error: unclosed'),
        ("regex", "(?=a)b", 'at 1(8): invalid regex "(?=a)b" (in regex): regex parse error: look'),
        ("choice", "[]", "a choice is a JSON array of texts"),
        ("choice", '["a", 1]', "a choice is a JSON array of texts"),
        ("ebnf_grammar", "root ::= x", "Rule 'x' not found"),
        ("ebnf_grammar", "(" * 20000, "Expected name"),
        ("ebnf_grammar", "root ::= " + "(" * 20000, "it is nested too deeply"),
        ("lark", "start: foo", 'at 1(8): unknown name: "foo"'),
        ("lark", "\0", "1(1): lexer error"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_fault_of_a_guide_is_one_sentence_that_says_where(
    kind: GuideType, text: str, expected: str
) -> None:
    found = fault(kind, text)
    assert found.startswith(f"guided_decoding_guide: {expected}")
    assert len(found) < 350 and "\n" not in found


HOSTILE: list[tuple[GuideType, str]] = [
    ("json_schema", schema(**{"$defs": CHAIN | {"a900": {}}, "$ref": "#/$defs/a0"})),
    ("lark", "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(3000)) + "r3000: "),
    ("regex", "((((a{100}){100}){100}){100})"),
    ("json_schema", schema(type="string", minLength=10**9)),
    ("json_schema", schema(type="array", minItems=10**9)),
    ("json_schema", schema(**{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})),
    ("regex", "[ab]*a[ab]{60}" * 20),
    ("json_schema", schema(properties={"a\0b": {"const": "x\0y"}}, required=["a\0b"])),
    ("lark", 'start: s\ns: s s | "a" | \n'),
    ("regex", "\ud800"),
]


def test_hostile_guides_cost_little_whether_they_pass_or_not() -> None:
    """By what each is refused is llguidance's to say; the next finds a process that works."""
    guides = Guides(Ascii(), FileLimits(guide_seconds=1.0))
    start = time.process_time()
    faults = {}
    for kind, text in HOSTILE:
        try:
            guides.check(Guide(type=kind, text=text))
        except RequestError as exc:
            faults[text[:10]] = str(exc)
        guides.check(Guide(type="regex", text="ab"))
    assert all(f.startswith("guided_decoding_guide: ") for f in faults.values())
    assert max(map(len, faults.values())) < 350
    assert time.process_time() - start < 2.0  # the other process did the work


def test_a_guide_has_a_greatest_length_and_a_field_of_the_callers() -> None:
    guides = Guides(Ascii(), FileLimits(max_guide_bytes=5))
    guides.check(Guide(type="regex", text="abcé"))
    with pytest.raises(RequestError) as refused:
        guides.check(Guide(type="regex", text="abcéd"), field="tools")
    assert str(refused.value) == (
        "tools has 6 bytes, expected at most 5 (serving.limits.max_guide_bytes)"
    )


def test_compiling_takes_so_much_time_and_no_more() -> None:
    guides = Guides(Ascii(), FileLimits(guide_seconds=0.05))
    guides.check(Guide(type="regex", text="ab"))
    many = schema(properties={f"p{i}": {"type": "string"} for i in range(2000)})
    assert fault("json_schema", many, guides) == (
        "guided_decoding_guide: it takes longer than 0.05 s (serving.limits.guide_seconds)"
    )


def test_a_large_vocabulary_is_no_guide_that_takes_long() -> None:
    class Large(Ascii):
        def tokens(self) -> dict[int, str]:
            return dict.fromkeys(range(60_000), "")

        def token_bytes(self, token_id: int) -> bytes:
            return f"{token_id:x}".encode()

    Guides(Large(), FileLimits(guide_seconds=0.05)).check(Guide(type="regex", text="ab"))


def test_a_model_whose_tokens_have_no_bytes_of_their_own_follows_no_guide() -> None:
    class Unspelled(Ascii):
        spells_tokens = False

    guides = Guides(Unspelled(), FileLimits())
    expected = "guided_decoding_guide: the bytes of this model's tokens depend on other tokens"
    assert fault("json", "", guides) == expected
    with pytest.raises(RequestError):
        guides.compile(Guide(type="json"))


def test_a_mask_allows_no_special_token_and_no_id_of_another_model(tmp_path: Path) -> None:
    """In a vocabulary with the bytes of characters, two spellings of one text, and special ids."""
    folder = toy_tokenizers.write_tokenizer(tmp_path, toy_tokenizers.space_mark())
    tokenizer = Tokenizer.load(folder)
    guide = Guide(type="regex", text="(.|\n)*")
    matcher = tokenizer.guides.matcher(guide, end_token_ids=frozenset({2}), vocab_size=300)
    mask = matcher.mask([])
    assert mask is not None
    allowed = set(np.flatnonzero(allowed_ids(mask, 1000)))
    assert not allowed & {0, 1} and not any(i >= 300 for i in allowed)
    assert {2, 3 + ord("A"), 3 + 0xC3} <= allowed  # the end, a byte, the start of a character


def test_what_is_forced_has_the_tokens_that_the_tokenizer_gives_it() -> None:
    tokenizer = Tokenizer.load(Path(__file__).parents[3] / "models" / "python-code" / "target")
    text = 'return {"name": "é😀 and so on", "value": None}'
    guide = Guide(type="choice", text=json.dumps([text]))
    matcher = tokenizer.guides.matcher(
        guide, end_token_ids=tokenizer.end_token_ids, vocab_size=4096
    )
    assert matcher.forced(100) == tokenizer.encode_fragment(text)
    assert matcher.forced(3) == tokenizer.encode_fragment(text)[:3]


def test_a_matcher_comes_back_from_any_draft_tokens() -> None:
    """Masks are those of a matcher that was never anywhere else."""
    guide = guided.GUIDES["person"]
    matcher = ASCII.matcher(guide, end_token_ids=frozenset({END}), vocab_size=128)
    accepted = ""
    for letter in '{"name": "a", "age": 1, "tags": []}':
        fresh = ASCII.matcher(guide, end_token_ids=frozenset({END}), vocab_size=128)
        for before in accepted:
            fresh.accept(ord(before))
        for tried in ("zz", letter + '"', letter, ""):
            matcher.mask([ord(c) for c in tried])
        assert matcher.num_allowed([ord(letter), ord("\0")]) == 1
        found, expected = matcher.mask([]), fresh.mask([])
        assert found is not None and expected is not None
        assert found.tolist() == expected.tolist()
        assert not matcher.is_over
        matcher.accept(ord(letter))
        accepted += letter
    assert matcher.is_over and matcher.fault is None
