"""Pieces of Lark grammars, as llguidance reads them (its docs/syntax.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from specpipe.speculative.guide import Guide

_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it, and chat templates with it, which models learned from."""


def grammar(**rules: str | Iterable[str]) -> str:
    """Returns the rules as a grammar, `start` being the first; several bodies are alternatives."""
    assert next(iter(rules)) == "start"
    return "".join(
        f"{name}: {body if isinstance(body, str) else ' | '.join(body)}\n"
        for name, body in rules.items()
    )


def after(prefix: str, rules: str, text: str) -> str:
    """Returns the grammar of what `prefix` allows, by `rules`, and then the grammar `text`."""
    return f"start: {prefix} answer\n{rules}answer: {text.removeprefix('start: ')}"


def of_guide(guide: Guide) -> str:
    """Returns a guide that can be followed as a grammar."""
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if guide.type in ("json", "json_schema"):
        answer = json_value(json.loads(guide.text or "{}"))
    elif guide.type == "regex":
        answer = f"/{regex_to_lark(guide.text)}/"
    elif guide.type == "choice":
        answer = " | ".join(map(literal, json.loads(guide.text)))
    else:
        inner = gbnf_to_lark(guide.text) if guide.type == "ebnf_grammar" else guide.text
        answer = f"%lark {{\n{inner}\n}}"
    return grammar(start="guided", guided=answer)


def literal(text: str) -> str:
    """Returns a text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def token(token_ids: Mapping[str, int], text: str) -> str:
    """Returns a mark: the token that stands for it, or else its text."""
    return f"<[{token_ids[text]}]>" if text in token_ids else literal(text)


def json_value(schema: Mapping[str, Any]) -> str:
    """Returns a value of a JSON schema, which may have definitions of its own."""
    return f"%json {json.dumps({'x-guidance': _FORM, **schema})}"


def call_object(name: str, arguments: str, schema: Mapping[str, Any]) -> str:
    """Returns a call as an object with the name of a function and, by that key, its arguments."""
    return f'{literal(f"""{{"name": "{name}", "{arguments}": """)} {json_value(schema)} "}}"'
