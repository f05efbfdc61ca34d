"""What the text of an answer must be, by any of the fields that say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from specpipe.gateway.errors import ApiError
from specpipe.gateway.parameters import Parameters
from specpipe.speculative.guide import Guide

_OBJECT = Guide(type="json_schema", text='{"type": "object"}')


def guide_inputs(body: Parameters) -> dict[str, str]:
    """Returns the ensemble's inputs of the one guide that a request has, none where it has none."""
    guides = dict(_guides(body))
    if len(guides) > 1:
        first, second, *_ = guides
        raise ApiError(f"{second} and {first} are both given: send one of them", param=second)
    return {
        name: value
        for guide in guides.values()
        for name, value in (
            ("guided_decoding_guide_type", guide.type),
            ("guided_decoding_guide", guide.text),
        )
    }


def guide_field(body: Parameters) -> str | None:
    """Returns the field of the request's guide."""
    return next((field for field, _ in _guides(body)), None)


def _guides(body: Parameters) -> Iterator[tuple[str, Guide]]:
    wanted = body.response_format
    if wanted is not None and wanted.type == "json_object":
        yield "response_format", _OBJECT
    elif wanted is not None and wanted.json_schema is not None:
        schema = wanted.json_schema.schema_
        yield "response_format", _OBJECT if schema is None else _schema(schema)
    outputs = body.structured_outputs
    if outputs is not None:
        if outputs.json_object:
            yield "structured_outputs.json_object", _OBJECT
        yield from _by_name(
            "structured_outputs.", outputs.json_, outputs.regex, outputs.choice, outputs.grammar
        )
    yield from _by_name(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )


def _by_name(
    prefix: str, schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[tuple[str, Guide]]:
    if schema is not None:
        yield f"{prefix}json", _schema(schema)
    if regex is not None:
        yield f"{prefix}regex", Guide(type="regex", text=regex)
    if choice is not None:
        text = json.dumps(choice, ensure_ascii=False)
        yield f"{prefix}choice", Guide(type="choice", text=text)
    if grammar is not None:
        # vLLM takes both in one field, too. Only GBNF defines a rule by `::=`.
        is_gbnf = "::=" in grammar
        yield f"{prefix}grammar", Guide(type="ebnf_grammar" if is_gbnf else "lark", text=grammar)


def _schema(schema: Any) -> Guide:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Guide(type="json_schema", text=text)
