"""The functions that a request offers as tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specpipe.errors import RequestError, show

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""OpenAI's letters and more of them, as servers of MCP put some between their name and a tool's."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """What a model may call: a name, and a JSON schema that is an object's."""

    name: str
    parameters: Mapping[str, Any]


def functions_of(tools: Sequence[Mapping[str, Any]]) -> tuple[Function, ...]:
    """Returns the functions of OpenAI's `tools`; RequestError names what is at fault.

    A function without parameters takes none; a schema without a type is that of an object.
    """
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise RequestError(f'{where} must be an object of type "function"')
        described = tool.get("function")
        if not isinstance(described, Mapping):
            raise RequestError(f"{where}.function must be an object with a name")
        name = described.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(
                f"{where}.function.name is {show(name)}; it must be 1 to 128 letters, digits or "
                "any of _ . : / -"
            )
        if name in functions:
            raise RequestError(f"{where}.function.name is {show(name)}, as that of another tool")
        parameters = _object_schema(described.get("parameters"), f"{where}.function.parameters")
        functions[name] = Function(name=name, parameters=parameters)
    return tuple(functions.values())


def _object_schema(schema: Any, where: str) -> Mapping[str, Any]:
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise RequestError(f"{where} must be the JSON schema of an object")
    return {"type": "object", **schema}
