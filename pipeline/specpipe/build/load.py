"""Reads the YAML of a pair: values, sections, and what its runtime refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from specpipe.config import messages
from specpipe.config.document import parse_yaml, read_yaml
from specpipe.config.sections import PipelineConfig, json_schema
from specpipe.errors import ConfigError
from specpipe.runtimes.setting_faults import setting_faults

_MAX_SHOWN = 300  # characters of an override, in a message
_MAX_KEYS = 10  # of the path of one setting
_MAX_LISTED = 20  # faults of one file that are explained; the rest is counted


def load_config(path: Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Returns the config of a YAML file, validated after `a.b=value` overrides in order."""
    document = read_yaml(path)
    if document.data is None:
        raise ConfigError(f"{path} is empty: expected the keys {_required_keys()}")
    if not isinstance(document.data, dict):
        raise ConfigError(
            f"{path}:{document.line(())}: the file holds {_kind(document.data)}: "
            f"expected a mapping with the keys {_required_keys()}"
        )
    data: Any = document.data
    sets = [_parse_override(text) for text in overrides]
    for override in sets:
        data = override.apply(data)
    try:
        return validate(data, path)
    except ValidationError as exc:
        schema = json_schema()
        errors = exc.errors(include_url=False)
        sentences = []
        for error in errors[:_MAX_LISTED]:
            keys = messages.key_path(error)
            blamed = [_cut(override.text) for override in sets if override.covers(keys)]
            place = f"--set {blamed[-1]}" if blamed else f"{path}:{document.line(keys)}"
            sentences.append(f"{place}: {messages.explain(error, schema)}")
        if len(errors) > _MAX_LISTED:
            sentences.append(f"{path}: {len(errors) - _MAX_LISTED} more faults")
        raise ConfigError("\n".join(sentences)) from None


def validate(data: Any, source: Path) -> PipelineConfig:
    """Returns the config of a YAML's values; `source` is where relative paths start.

    Raises ValidationError for what is no setting or cannot be one, and then for the first that
    the runtime refuses: one without effect, or one that its library cannot do.
    """
    config = PipelineConfig.model_validate(data, context=source)
    for fault in setting_faults(config):
        error = messages.broken_rule(fault.key, fault.value, fault.expected)
        raise ValidationError.from_exception_data(
            PipelineConfig.__name__, [InitErrorDetails(type=error, input=data)]
        )
    return config


@dataclass(frozen=True)
class _Override:
    text: str
    keys: tuple[str, ...]
    value: Any

    def apply(self, data: Any, depth: int = 0) -> Any:
        """Returns `data` with the value set; the mapping it was read into stays as it is."""
        if depth == len(self.keys):
            return self.value
        if data is None:
            data = {}
        if not isinstance(data, dict):
            parent = ".".join(self.keys[:depth])
            value = messages.show(data)
            raise ConfigError(
                f"--set {_cut(self.text)}: {_cut(parent)} is {value}, which has no settings "
                "below it"
            )
        key = self.keys[depth]
        return {**data, key: self.apply(data.get(key), depth + 1)}

    def covers(self, keys: tuple[str | int, ...]) -> bool:
        """Returns whether this override decided what stands, or is missing, at a key path."""
        common = min(len(keys), len(self.keys))
        return keys[:common] == self.keys[:common]


def _parse_override(text: str) -> _Override:
    key, equals, value = text.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys) or len(keys) > _MAX_KEYS:
        raise ConfigError(
            f"--set {_cut(text)}: expected KEY=VALUE, as in --set engine.max_batch_size=8"
        )
    return _Override(text, keys, parse_yaml(value, origin=f"--set {_cut(text)}").data)


def _cut(text: str) -> str:
    """Returns what a user wrote, cut where it is too long to be read to its end."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _required_keys() -> str:
    return ", ".join(n for n, field in PipelineConfig.model_fields.items() if field.is_required())


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return "text" if isinstance(value, str) else f"the value {messages.show(value)}"
