"""Validation errors as sentences; what a setting takes is read from the JSON Schema."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

from specpipe import errors
from specpipe.config.faults import without_effect

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

KeyPath = tuple[str | int, ...]
Schema = Mapping[str, Any]

_shortened = reprlib.Repr()
_shortened.maxlevel = 2
_RULE = "rule_across_settings"
_UNION = "engine"
"""The section that is one of several models, by its `runtime`."""


def broken_rule(key: str, value: Any, expected: str) -> PydanticCustomError:
    """Returns the error of a rule over several settings, to be raised by a validator.

    `key` names the setting, with dots, that the message points at.
    """
    keys = tuple(int(part) if part.isdigit() else part for part in key.split("."))
    context = {"keys": keys, "value": value, "expected": expected}
    return PydanticCustomError(_RULE, "expected {expected}", context)


def key_path(error: ErrorDetails) -> KeyPath:
    """Returns the setting that an error is about."""
    if error["type"] == _RULE:
        return tuple(error["ctx"]["keys"])
    section, below = error["loc"][:1], error["loc"][1:]
    return section + (below[1:] if section == (_UNION,) else below)  # after the model's name


def explain(error: ErrorDetails, schema: Schema) -> str:
    """Writes an error as: key path, value, what was expected; or the key that was meant."""
    keys = key_path(error)
    name = _dotted(keys)
    if error["type"] == _RULE:
        context = error["ctx"]
        return f"{name} is {show(context['value'])}: expected {context['expected']}"
    known, value = _schema_at(keys, schema), error["input"]
    if error["type"] == "missing":
        return f"{name} is missing: expected {_expected(known)}"
    if error["type"] != "extra_forbidden":
        return f"{name} is {show(value)}: expected {_expected(known)}"
    if not known:
        return f"{name} is not a setting: {_nearest(keys, schema)}"
    others = without_effect(name, value, f"engine.runtime '{error['loc'][1]}'")
    return f"{name} is {show(value)}: expected {others.expected}"


def show(value: Any) -> str:
    """Writes a value as the YAML has it, shortened."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return _shortened.repr(value)
    except ValueError:  # Python writes out no whole number of more than 4300 digits
        return "a number of thousands of digits"


def _nearest(keys: KeyPath, schema: Schema) -> str:
    """Names the setting that was probably meant, or lists those of the section."""
    *section, mistyped = keys
    here = list(_schema_at(section, schema).get("properties", {}))
    everywhere = list(_all_keys((), schema))
    same_name = _named(str(mistyped), everywhere)
    close_here = difflib.get_close_matches(str(mistyped), here, n=1)
    close_names = difflib.get_close_matches(
        str(mistyped), [str(key[-1]) for key in everywhere], n=1
    )
    if len(same_name) == 1:
        return f"did you mean {_dotted(same_name[0])}?"
    if close_here:
        return f"did you mean {_dotted((*section, close_here[0]))}?"
    if close_names:
        return f"did you mean {_dotted(min(_named(close_names[0], everywhere), key=len))}?"
    return f"expected one of {', '.join(here)}"


def _named(name: str, keys: Sequence[KeyPath]) -> list[KeyPath]:
    return [key for key in keys if key[-1] == name]


def _all_keys(section: KeyPath, schema: Schema) -> Iterator[KeyPath]:
    for name in _schema_at(section, schema).get("properties", {}):
        yield (*section, name)
        yield from _all_keys((*section, name), schema)


def _schema_at(keys: Sequence[str | int], schema: Schema) -> Schema:
    definitions = schema["$defs"]
    for key in keys:
        if isinstance(key, int):
            schema = schema.get("items", {})
        else:
            schema = schema.get("properties", {}).get(key, {})
        if "anyOf" in schema:  # a section that may be left out
            schema = next((choice for choice in schema["anyOf"] if "$ref" in choice), schema)
        if "oneOf" in schema:  # models of one section: all that any of them knows
            properties: dict[str, Any] = {}
            for choice in schema["oneOf"]:
                properties |= _resolved(choice, definitions)["properties"]
            schema = {"type": "object", "properties": properties}
        schema = _resolved(schema, definitions)
    return schema


def _resolved(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    return definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _expected(schema: Schema) -> str:
    """Describes what a setting takes, from its JSON Schema."""
    if "anyOf" in schema:
        return " or ".join(_expected(choice) for choice in schema["anyOf"])
    if "const" in schema:
        return f"'{schema['const']}'"
    if "enum" in schema:
        return "one of " + ", ".join(f"'{choice}'" for choice in schema["enum"])
    match schema.get("type"):
        case "object":
            keys = schema.get("required") or list(schema["properties"])
            return f"a mapping with {', '.join(keys)}"
        case "array":
            items = schema["items"]
            if "$ref" in items:
                return "a list of mappings"
            if "enum" in items:
                return f"a list of {' or '.join(repr(choice) for choice in items['enum'])}"
            kinds = {"integer": "whole numbers", "string": "texts"}
            return f"a list of {kinds[items['type']]}{_range(items)}"
        case "integer":
            return f"a whole number{_range(schema)}"
        case "number":
            return f"a number{_range(schema)}"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case _:
            hint = schema.get("description", "").removesuffix(".")
            return f"text ({hint[0].lower()}{hint[1:]})" if hint else "text"


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    if "exclusiveMinimum" not in schema:
        return ""
    below = f" and below {schema['exclusiveMaximum']}" if "exclusiveMaximum" in schema else ""
    return f" above {schema['exclusiveMinimum']}{below}"


def _dotted(keys: KeyPath) -> str:
    return ".".join(errors.show(key) for key in keys)
