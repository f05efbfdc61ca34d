"""A config that was written, and what its user should know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specpipe.build.load import validate
from specpipe.config import messages
from specpipe.config.document import write_new
from specpipe.config.sections import PipelineConfig, json_schema
from specpipe.errors import ConfigError


@dataclass(frozen=True)
class Migration:
    """A config that was written, and sentences about it, by their titles."""

    output: Path
    sections: Mapping[str, tuple[str, ...]]


def check(data: Any, output: Path, source: str, names: Mapping[str, str]) -> PipelineConfig:
    """Returns the config that the values are; raises ConfigError for what does not validate.

    `source` begins the message; `names` has the flags that settings are from.
    """
    try:
        return validate(data, output)
    except ValidationError as exc:
        schema = json_schema()
        faults = []
        for error in exc.errors(include_url=False):
            flag = names.get(".".join(map(str, messages.key_path(error))))
            faults.append((f"{flag}: " if flag else "") + messages.explain(error, schema))
        raise ConfigError(f"{source} cannot be migrated: {'; '.join(faults)}") from None


def write(text: str, output: Path, comment: str) -> None:
    """Writes a YAML, which must not be there yet, under a comment."""
    write_new(output, "".join(f"# {line}\n" for line in comment.splitlines()) + text)
