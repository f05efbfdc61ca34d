"""Writes a schedule into the YAML of a pair; every other line, comments too, stays as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml
from pydantic import ValidationError

from specpipe.build.load import validate
from specpipe.config.document import parse_yaml, read_yaml
from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError
from specpipe.evaluate.tune.schedule import to_yaml
from specpipe.machine.whole_file import written_whole
from specpipe.speculative.adaptive import Schedule

_SECTION, _SCHEDULE, _NUM_DRAFT_TOKENS = "speculation", "schedule", "num_draft_tokens"


def write_schedule(path: Path, schedule: Schedule) -> None:
    """Sets speculation.schedule, and raises speculation.num_draft_tokens where it allows less.

    Raises ConfigError, with what to write by hand, where the section is not in block style.
    """
    read_yaml(path)  # refuses what is not a YAML of ours
    text = path.read_bytes().decode()
    most = max(length for _, length in schedule)
    text = _with_schedule(path, text, schedule)
    data = parse_yaml(text, origin=str(path)).data
    if data[_SECTION].get(_NUM_DRAFT_TOKENS, _default_num_draft_tokens()) < most:
        text = _with_num_draft_tokens(path, text, most)
    try:
        validate(parse_yaml(text, origin=str(path)).data, path)
    except (ConfigError, ValidationError) as exc:
        raise _by_hand(path, schedule) from exc
    try:
        with written_whole(path) as staged:
            staged.write_text(text, encoding="utf-8", newline="")
            shutil.copymode(path, staged)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc


def _with_schedule(path: Path, text: str, schedule: Schedule) -> str:
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    section = _find(_root(text, path), _SECTION)
    if section is None:
        return "".join([*lines, f"{_SECTION}:\n", *_indented(schedule, 2)])
    _, values = section
    if not isinstance(values, yaml.MappingNode) or values.flow_style or not values.value:
        raise _by_hand(path, schedule)
    indent = values.start_mark.column
    setting = _find(values, _SCHEDULE)
    if setting is None:
        at = _last_line(values) + 1
        return "".join([*lines[:at], *_indented(schedule, indent), *lines[at:]])
    key, value = setting
    first, last = key.start_mark.line, _last_line(value)
    return "".join([*lines[:first], *_indented(schedule, indent), *lines[last + 1 :]])


def _with_num_draft_tokens(path: Path, text: str, num_draft_tokens: int) -> str:
    section = _find(_root(text, path), _SECTION)
    assert section is not None
    setting = _find(section[1], _NUM_DRAFT_TOKENS)
    if setting is not None:
        start, end = setting[1].start_mark.index, setting[1].end_mark.index
        return f"{text[:start]}{num_draft_tokens}{text[end:]}"
    lines = text.splitlines(keepends=True)
    first = section[1].start_mark
    lines.insert(first.line, f"{' ' * first.column}{_NUM_DRAFT_TOKENS}: {num_draft_tokens}\n")
    return "".join(lines)


def _root(text: str, path: Path) -> yaml.Node | None:
    return parse_yaml(text, origin=str(path)).root


def _find(node: yaml.Node | None, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((pair for pair in pairs if pair[0].value == name), None)


def _last_line(node: yaml.Node) -> int:
    """Returns the last line of a value; a block's own end mark is after the comments behind it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    mark: int = node.end_mark.line
    return mark


def _indented(schedule: Schedule, indent: int) -> list[str]:
    return [" " * indent + line for line in to_yaml(schedule).splitlines(keepends=True)]


def _default_num_draft_tokens() -> int:
    field = PipelineConfig.model_fields[_SECTION].default
    default: int = getattr(field, _NUM_DRAFT_TOKENS)
    return default


def _by_hand(path: Path, schedule: Schedule) -> ConfigError:
    text = "".join(_indented(schedule, 2))
    return ConfigError(
        f"{path}: the schedule cannot be put into section {_SECTION} as it is written there; "
        f"write it by hand:\n{_SECTION}:\n{text}"
    )
