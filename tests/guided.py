"""Guides that have an end, and what an answer by each must be."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema

from specpipe.speculative.guide import Guide
from specpipe.text.guides.grammar import compiled
from specpipe.text.guides.vocabulary import SPECIAL, make_tokenizer

_BYTES = make_tokenizer([*(bytes([byte]) for byte in range(256)), SPECIAL + b"<end>"])
"""Tokens that are bytes: what a text is does not depend on how a model spells it."""


def _schema(**schema: Any) -> Guide:
    return Guide(type="json_schema", text=json.dumps(schema))


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def _array(items: dict[str, Any], most: int, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_AGE = {"type": "integer", "minimum": 0, "maximum": 150}

GUIDES = {
    "person": _schema(**_object(name=_text(12), age=_AGE, tags=_array(_text(6), 3))),
    "function": _schema(
        **_object(
            name={"enum": ["add", "subtract", "multiply"]},
            arguments=_object(a=_AGE, b=_AGE, is_exact={"type": "boolean"}),
        )
    ),
    "references": _schema(
        **{"$defs": {"point": _object(x=_AGE, y=_AGE)}},
        **_object(path=_array({"$ref": "#/$defs/point"}, 3, least=2)),
    ),
    "choice of objects": _schema(
        anyOf=[_object(error=_text(20)), _object(result={"type": ["integer", "null"]} | _AGE)]
    ),
    "formats": _schema(
        **_object(
            day={"type": "string", "format": "date"},
            key={"type": "string", "pattern": "^[a-f0-9]{8}$"},
            note={"const": 'é "quoted"\n😀'},
        )
    ),
    "optional": _schema(
        type="object",
        properties={"a": _text(4), "b": _AGE, "c": {"type": "null"}},
        required=["b"],
        additionalProperties=False,
    ),
    "regex": Guide(type="regex", text=r"[A-Z][a-z]{2,8}(, [a-z]{1,6}){1,3}\."),
    "gbnf": Guide(
        type="ebnf_grammar",
        text='root ::= sum "=" number\nsum ::= number ("+" number)?\nnumber ::= [0-9] [0-9]?\n',
    ),
    "choice": Guide(type="choice", text=json.dumps(["yes", "no", "it depends", "yesterday é"])),
    "lark": Guide(
        type="lark",
        text=f"start: /[a-z]{{1,8}}/ {json.dumps('(')} %json "
        f"{json.dumps(_array(_AGE, 3) | {'x-guidance': {'whitespace_flexible': False}})}"
        f" {json.dumps(')')}\n",
    ),
}

_FULL = {
    "regex": r"[A-Z][a-z]{2,8}(, [a-z]{1,6}){1,3}\.",
    "gbnf": r"\d\d?(\+\d\d?)?=\d\d?",
    "choice": r"yes|no|it depends|yesterday é",
    "lark": r"[a-z]{1,8}\((\[(\d+(,\d+){0,2})?\])\)",
}


def many() -> dict[str, Guide]:
    """Returns a hundred: combinations of what the ten are made of."""
    guides = dict(GUIDES)
    parts = [_text(5), _AGE, {"type": "boolean"}, {"enum": ["x", "yy", 3, None]}, {"type": "null"}]
    for i, first in enumerate(parts):
        for j, second in enumerate(parts):
            guides[f"object {i} {j}"] = _schema(**_object(first=first, second=second))
            guides[f"array {i} {j}"] = _schema(**_array({"anyOf": [first, second]}, 3, least=1))
            guides[f"nested {i} {j}"] = _schema(
                **_object(outer=_object(inner=first), items=_array(second, 2))
            )
    for most in range(1, 16):
        guides[f"regex {most}"] = Guide(type="regex", text=f"(ab|c[0-9]){{1,{most}}};")
    return guides


def check(name: str, guide: Guide, text: str, *, is_ended: bool) -> None:
    """Asserts that an answer is what its guide says, or begins so where it was cut."""
    if not is_ended:
        matcher = compiled(guide, _BYTES)
        data = text.removesuffix("\N{REPLACEMENT CHARACTER}").encode()
        assert matcher.validate_tokens(list(data)) == len(data), (name, text)
    elif guide.type == "json_schema":
        jsonschema.validate(
            json.loads(text), json.loads(guide.text), format_checker=jsonschema.FormatChecker()
        )
    else:
        assert re.fullmatch(_FULL.get(name, guide.text), text), (name, text)
