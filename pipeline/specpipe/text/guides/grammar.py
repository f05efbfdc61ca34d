"""A guide as a grammar that llguidance compiles, and what is wrong with one that it does not.

JSON comes on one line with ", " and ": ", as `json.dumps` writes it: so it has an end, models know
it, and the text between values needs no draft. The object `x-guidance` of a schema may say
otherwise (llguidance's docs/json_schema.md).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from specpipe.speculative.guide import Guide

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LIMITS = LLParserLimits(
    # Of a mask, half of llguidance's own or less: a step waits for it, and so do its neighbours.
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    # Of a grammar: 50,000 states take some 100 MB.
    initial_lexer_fuel=300_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)

_JSON_FORM: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_SCHEMAS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not")
TOO_DEEP = "it is nested too deeply"
_SEARCH_S = 0.5  # of the processor, for where in a schema a fault is


class GuideFault(Exception):
    """Why a guide cannot be followed."""


def compiled(guide: Guide, tokenizer: LLTokenizer) -> LLMatcher:
    """Returns a matcher at the start of the text; raises GuideFault."""
    matcher = LLMatcher(tokenizer, grammar_of(guide), limits=LIMITS, log_level=0)
    if matcher.is_error():
        raise GuideFault(reason_of(matcher))
    return matcher


def grammar_of(guide: Guide) -> str:
    """Returns the grammar of a guide, which may still not compile."""
    try:
        if guide.type == "json":
            return _json_schema({})
        if guide.type == "json_schema":
            return _json_schema(_object(guide.text))
        if guide.type == "choice":
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in _texts(guide.text))
            return LLMatcher.grammar_from_lark(f"start: {texts}")
        if guide.type == "regex":
            return LLMatcher.grammar_from_regex(guide.text)
        lark = gbnf_to_lark(guide.text) if guide.type == "ebnf_grammar" else guide.text
        return LLMatcher.grammar_from_lark(lark)
    except RecursionError:
        raise GuideFault(TOO_DEEP) from None
    except GuideFault:
        raise
    except Exception as exc:  # gbnf_to_lark raises no narrower ones
        raise GuideFault(_one_line(str(exc))) from exc


def reason_of(matcher: LLMatcher) -> str:
    """Returns what a matcher that is in error says of it."""
    return _one_line(matcher.get_error())


def find_path(schema_text: str, reason: str, tokenizer: LLTokenizer) -> str:
    """Returns the path of the deepest part of a schema that fails for this reason by itself."""
    try:
        root = {} if reason == TOO_DEEP else _object(schema_text)
    except GuideFault:
        return ""
    shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    end = time.process_time() + _SEARCH_S
    path, schema, is_deeper = "", root, True
    while is_deeper:
        is_deeper = False
        for step, part in _parts(schema):
            if time.process_time() > end:
                return path.lstrip(".")
            if _reason({**shared, **part}, tokenizer) == reason:
                path, schema, is_deeper = f"{path}{step}", part, True
                break
    return path.lstrip(".")


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the schemas right inside one, with how their paths go on."""
    found: list[tuple[str, Any]] = [
        *((f".{key}.{name}", part) for key in _SCHEMAS for name, part in _items(schema, key)),
        *((f".{key}[{i}]", part) for key in _LISTS for i, part in enumerate(_list(schema, key))),
        *((f".{key}", schema.get(key)) for key in _SINGLE),
    ]
    return ((step, part) for step, part in found if isinstance(part, dict))


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _items(schema: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    value = schema.get(key)
    return list(value.items()) if isinstance(value, dict) else []


def _reason(schema: dict[str, Any], tokenizer: LLTokenizer) -> str | None:
    try:
        compiled(Guide(type="json_schema", text=json.dumps(schema)), tokenizer)
    except GuideFault as exc:
        return str(exc)
    return None


def _json_schema(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema, ensure_ascii=False),
        defaults=_JSON_FORM,
        # An unknown keyword is an error: what it says would not hold.
        overrides={"lenient": False},
    )


def _object(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as exc:
        raise GuideFault(f"it is not JSON: {exc}") from exc
    if not isinstance(schema, dict):
        raise GuideFault("a JSON schema is an object")
    return schema


def _texts(text: str) -> list[str]:
    expected = "a choice is a JSON array of texts"
    try:
        texts = json.loads(text)
    except ValueError as exc:
        raise GuideFault(f"{expected}: {exc}") from exc
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise GuideFault(expected)
    return texts


def _one_line(message: str) -> str:
    """Returns the first line of a message, and the last part of one by Rust's regex library."""
    if "recursion limit exceeded" in message:
        return TOO_DEEP
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    errors = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *errors])
