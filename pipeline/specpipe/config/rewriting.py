"""Changes values in the text of a YAML; every other line, comments too, stays as it is.

Why not ruamel.yaml: it writes every line anew, with one indentation, one space after each colon
and nothing for `null`; and a comment belongs to the value before it, at one of five places, so it
is lost with a list that is replaced, and stands above a key that is added (0.19.1).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import yaml

from specpipe.config.document import parse_yaml
from specpipe.errors import ConfigError

_LINE_END = re.compile("\r\n|[\n\r\x85\u2028\u2029]|$")  # as PyYAML counts lines

_Change = tuple[int, int, str]
"""From where to where the text is replaced, and by what."""


def rewritten(text: str, data: dict[str, Any], *, origin: str) -> str:
    """Returns the text of a YAML so changed that it holds `data`.

    A new key comes after the last of its section, a value in place of the earlier one; a section
    that is written in braces is written in lines where it changes. Raises ConfigError where a text
    cannot be changed by its lines.
    """
    document = parse_yaml(text, origin=origin)
    if document.root is None or not _has_lines(document.root):
        raise _unchangeable(origin)
    newline = "\r\n" if "\r\n" in text else "\n"
    if not text.endswith("\n"):
        text += newline
    changed = text
    for start, end, replacement in sorted(_changes(text, document.root, document.data, data))[::-1]:
        changed = changed[:start] + replacement.replace("\n", newline) + changed[end:]
    with contextlib.suppress(ConfigError):
        if parse_yaml(changed, origin=origin).data == data:
            return changed
    raise _unchangeable(origin)  # an alias, or a key from `<<`


def to_lines(values: dict[str, Any], indent: int = 0) -> str:
    """Returns values as the YAML of a pair has them: a line each, and lists of short mappings."""
    lines = yaml.dump(
        values,
        Dumper=_Dumper,
        default_flow_style=None,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),
    )
    return "".join(" " * indent + line for line in lines.splitlines(keepends=True))


class _Dumper(yaml.SafeDumper):
    """Lists stand two columns to the right of their key, and what two keys share stands twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def serialize(self, node: Any) -> None:
        node.flow_style = False
        super().serialize(node)

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _changes(
    text: str, node: yaml.Node, before: dict[str, Any], after: dict[str, Any]
) -> Iterator[_Change]:
    indent = node.value[-1][0].start_mark.column
    for key, value in node.value:
        name = key.value
        line = key.start_mark.index - key.start_mark.column
        if name not in after:
            yield line, _end_of_line(text, value), ""
        elif repr(after[name]) == repr(before[name]):  # 1 is not True
            continue
        elif isinstance(before[name], dict) and _has_lines(value) and _is_section(after[name]):
            yield from _changes(text, value, before[name], after[name])
        elif isinstance(after[name], (dict, list)) or not _is_short(value):
            replacement = to_lines({name: after[name]}, indent)
            yield line, _end_of_line(text, value), replacement
        else:
            scalar = to_lines({"x": after[name]}).removeprefix("x: ").removesuffix("\n")
            yield value.start_mark.index, value.end_mark.index, scalar
    if added := {name: value for name, value in after.items() if name not in before}:
        end = _end_of_line(text, node)
        yield end, end, to_lines(added, indent)


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _has_lines(node: yaml.Node) -> bool:
    return isinstance(node, yaml.CollectionNode) and not node.flow_style and bool(node.value)


def _is_short(node: yaml.Node) -> bool:
    """Returns whether a value is text behind its key: no list or mapping, no block, not nothing."""
    is_empty = node.start_mark.index == node.end_mark.index
    return isinstance(node, yaml.ScalarNode) and node.style not in ("|", ">") and not is_empty


def _end_of_line(text: str, node: yaml.Node) -> int:
    """Returns where the last line of a value ends; a block's own end is after the comments behind
    it.
    """
    while _has_lines(node):
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    match = _LINE_END.search(text, len(text[: node.end_mark.index].rstrip()))
    assert match is not None
    return match.end()


def _unchangeable(origin: str) -> ConfigError:
    return ConfigError(f"{origin} cannot be changed by its lines")
