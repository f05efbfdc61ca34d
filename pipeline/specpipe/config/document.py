"""YAML that remembers where every value stands, for messages that name file and line.

PyYAML's safe loader resolves the scalars; the tree is built here, since the library's own
constructor keeps the last of two equal keys and forgets the lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specpipe.errors import ConfigError, show, to_sentence
from specpipe.machine.signals import deferred

_LARGEST_NUMBER = 1 << 64  # so that whatever computes with one can also write it out
_MAX_DEPTH = 50  # a configuration needs three
_MAX_BYTES = 1 << 18  # a configuration has a few thousand; PyYAML takes seconds for these
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Document:
    """One YAML document: plain Python values, and the nodes that they were read from."""

    data: Any
    root: yaml.Node | None

    def line(self, keys: Sequence[str | int]) -> int:
        """Returns the line of the key (or list item) at a path, or of the last part that exists."""
        node = self.root
        line = 1
        for key in keys:
            if isinstance(node, yaml.MappingNode):
                found = next((kv for kv in node.value if kv[0].value == key), None)
                if found is None:
                    break
                line, node = found[0].start_mark.line + 1, found[1]
            elif (
                isinstance(node, yaml.SequenceNode)
                and isinstance(key, int)
                and key < len(node.value)
            ):
                node = node.value[key]
                line = node.start_mark.line + 1
            else:
                break
        return line


def read_yaml(path: Path, *, number_keys: bool = False) -> Document:
    """Reads a file that holds one YAML document; raises ConfigError with its line otherwise.

    With `number_keys` keys may be whole numbers, as other programs' files have them, and come as
    text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_BYTES} bytes: expected a configuration")
        text = data.decode()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: expected a YAML file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder: expected a YAML file") from None
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"{path} is not text in UTF-8 (byte {exc.start}): expected a YAML file"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    return parse_yaml(text, origin=str(path), number_keys=number_keys)


def parse_yaml(text: str, *, origin: str, number_keys: bool = False) -> Document:
    """Parses one YAML document; `origin` begins the messages: a path, or a command-line option."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as exc:
        line = text.count("\n", 0, exc.position) + 1
        character = f"U+{ord(text[exc.position]):04X}"
        raise ConfigError(
            f"{origin}:{line}: not YAML: the character {character} is not allowed"
        ) from exc
    try:
        root = loader.get_single_node()
        builder = _Builder(loader, origin, number_keys)
        return Document(builder.build(root) if root else None, root)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{origin}:{mark.line + 1}" if mark else origin
        problem = " ".join(part for part in (exc.context, exc.problem) if part)
        raise ConfigError(f"{where}: not YAML: {to_sentence(problem)}") from exc
    except RecursionError:
        raise ConfigError(f"{origin}: not a configuration: nested too deeply") from None
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """PyYAML's, but for what is nested deeply, over which it takes a minute a line."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise RecursionError
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Builder:
    """Builds Python values from nodes; an aliased node is built once and shared."""

    def __init__(self, loader: yaml.SafeLoader, origin: str, number_keys: bool) -> None:
        self._loader = loader
        self._origin = origin
        self._number_keys = number_keys
        self._built: dict[yaml.Node, Any] = {}
        self._open: set[yaml.Node] = set()

    def build(self, node: yaml.Node) -> Any:
        if node in self._built:
            return self._built[node]
        if node in self._open:
            raise self._error(node, "this value contains itself")
        self._open.add(node)
        value: Any
        if isinstance(node, yaml.MappingNode):
            value = self._mapping(node)
        elif isinstance(node, yaml.SequenceNode):
            value = [self.build(item) for item in node.value]
        else:
            value = self._scalar(node)
        self._open.discard(node)
        self._built[node] = value
        return value

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        lines: dict[str, int] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag == _MERGE_TAG:
                merged |= self._merged(value)
                continue
            name = self._scalar(key) if isinstance(key, yaml.ScalarNode) else None
            if self._number_keys and type(name) is int:
                name = str(name)
            if not isinstance(name, str):
                is_scalar = isinstance(key, yaml.ScalarNode)
                shown = f"the key {show(key.value)}" if is_scalar else "this key"
                raise self._error(key, f"{shown} is not text: put it in quotes")
            if name in lines:
                first = f"first set in line {lines[name]}"
                raise self._error(key, f"duplicate key '{show(name)}', {first}")
            lines[name] = key.start_mark.line + 1
            own[name] = (key, value)
        # The node keeps what was merged into it, each key once, so that lines are found there too.
        pairs = merged | own
        node.value = list(pairs.values())
        return {name: self.build(value) for name, (_, value) in pairs.items()}

    def _merged(self, node: yaml.Node) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Returns the keys and values that `<<` brings in; of several mappings, the first wins.

        PyYAML would repeat keys that are merged again and again, until a small file fills memory.
        """
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in reversed(sources):
            if not isinstance(source, yaml.MappingNode):
                raise self._error(source, "`<<` takes a mapping or a list of mappings")
            self.build(source)
            pairs |= {key.value: (key, value) for key, value in source.value}
        return pairs

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            value = self._loader.construct_object(node)
        except (ValueError, ArithmeticError, LookupError, AttributeError) as exc:
            # The date 2026-13-45, a number that is too large; `!!int ""`, on which PyYAML trips.
            raise self._error(node, f"{node.value[:80]!r} has no meaning in YAML: {exc}") from exc
        if isinstance(value, int) and abs(value) >= _LARGEST_NUMBER:
            raise self._error(node, f"{node.value[:80]!r} is too large a number")
        if isinstance(value, (int, float)) and ":" in node.value:  # 1:30 is 90 to YAML 1.1
            raise self._error(node, f"{node.value[:80]!r} is no number, nor text without quotes")
        return value

    def _error(self, node: yaml.Node, problem: str) -> ConfigError:
        return ConfigError(f"{self._origin}:{node.start_mark.line + 1}: {problem}")


def write_new(path: Path, text: str) -> None:
    """Writes a YAML that must not be there yet; `--output` names another."""
    try:
        with deferred(), path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists: delete it, or name another --output") from None
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc
